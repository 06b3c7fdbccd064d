"""Installs what `python -m build` made into a clean environment and tries it there as a new user
would: `make dist`, and the release workflow.

    python scripts/check_release.py dist                      # its wheels and source archives
    python scripts/check_release.py --url http://127.0.0.1:8000      # a server that runs: the image

--shared FOLDER: site-packages with the dependencies, which are then not installed."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TORCH = ("torch==2.13.0+cpu", "--extra-index-url", "https://download.pytorch.org/whl/cpu")
QUESTION = {
    "model": "default",
    "messages": [{"role": "user", "content": "Hello!"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "max_tokens": 40,
    "max_audio_frames": 25,
}


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("dist", type=Path, nargs="?", metavar="DIST")
    p.add_argument("--url", help="try a server that runs, and nothing else")
    p.add_argument("--shared", type=Path, metavar="FOLDER")
    args = p.parse_args()
    if args.url:
        check_server(args.url)
        return 0
    if args.dist is None:
        p.error("name the folder of the wheels, or a server with --url")
    built = Built.find(args.dist.resolve())
    built.check_archive()
    with tempfile.TemporaryDirectory(prefix="stretto-release-") as folder:
        check_installed(built, Path(folder), args.shared)
    say("all that was built works")
    return 0


@dataclass(frozen=True)
class Built:
    version: str
    wheel: Path
    archive: Path
    voice: Path

    @classmethod
    def find(cls, dist: Path) -> Built:
        [wheel] = dist.glob("stretto-*.whl")
        [archive] = dist.glob("stretto-*.tar.gz")
        [voice] = dist.glob("stretto_nano-*.whl")
        return cls(wheel.name.split("-")[1], wheel, archive, voice)

    def check_archive(self) -> None:
        """The source archive has what it takes to build the wheel again, and its licence."""
        with tarfile.open(self.archive) as tar:
            names = {name.partition("/")[2] for name in tar.getnames()}
        for needed in ("pyproject.toml", "README.md", "LICENSE", "stretto/server/web/index.html"):
            require(needed in names, f"{self.archive.name} lacks {needed}")
        say(f"{self.archive.name}: complete")


class Environment:
    """A virtual environment, and the commands in it, run in an empty folder."""

    def __init__(self, folder: Path, shared: Path | None) -> None:
        self.bin = folder / "venv" / "bin"
        self.empty = folder / "empty"
        self.empty.mkdir()
        self.shared = shared
        venv.create(folder / "venv", with_pip=True, symlinks=True)
        hidden = ("PYTHON", "STRETTO_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        if shared is not None:
            [site] = (folder / "venv" / "lib").glob("python*/site-packages")
            (site / "shared.pth").write_text(f"{shared}\n")

    def install(self, *words: str | Path) -> None:
        options = ["--quiet", "--disable-pip-version-check"]
        if self.shared is not None:
            options += ["--no-deps", "--no-index"]
        self.run("python", "-m", "pip", "install", *options, *words)

    def run(self, program: str, *words: str | Path, status: int = 0) -> str:
        command = [self.bin / program, *words]
        done = subprocess.run(
            command, cwd=self.empty, env=self.env, capture_output=True, text=True, check=False
        )
        said = done.stdout + done.stderr
        require(done.returncode == status, f"{program} {words}: status {done.returncode}\n{said}")
        return said

    @contextlib.contextmanager
    def served(self) -> Iterator[str]:
        """`stretto serve nano`, until it is ready; its address."""
        command = [self.bin / "stretto", "serve", "nano", "--port", "0", "--device", "cpu"]
        with subprocess.Popen(
            command, cwd=self.empty, env=self.env, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stderr is not None
                said = ""
                while not (page := re.search(r"^  page +(\S+)/$", said, re.M)):
                    line = process.stderr.readline()
                    require(bool(line), f"the server ended before it was ready:\n{said}")
                    said += line
                yield page[1]
                process.send_signal(signal.SIGTERM)
                said = process.stderr.read()
                require(process.wait() == 0, f"the server ended with {process.returncode}:\n{said}")
            finally:
                process.kill()


def check_installed(built: Built, folder: Path, shared: Path | None) -> None:
    env = Environment(folder, shared)
    if shared is None:
        say("installing PyTorch for the CPU")
        env.install(*TORCH)
    say(f"installing {built.wheel.name}")
    env.install(built.wheel)
    require(f"stretto {built.version}" in env.run("stretto", "--version"), "another version")
    require(f"stretto      {built.version}" in env.run("stretto", "env"), "another version")
    said = env.run("stretto", "serve", status=2)
    require("pip install 'stretto[nano]'" in said, f"it does not say how to get the voice: {said}")
    say(f"installing {built.voice.name}")
    env.install(built.voice)
    with env.served() as url:
        check_server(url)
    if shared is None:
        say(f"installing {built.archive.name}")
        env.install("--force-reinstall", "--no-deps", built.archive)
        require(f"stretto {built.version}" in env.run("stretto", "--version"), "another version")


def check_server(url: str) -> None:
    """One spoken answer, the page and the documents."""
    answer = json.loads(fetch(f"{url}/v1/chat/completions", QUESTION))
    said = answer["choices"][0]["message"]["audio"]
    sound = base64.b64decode(said["data"])
    require(bool(said["transcript"].strip()), "the answer has no words")
    require(sound[:4] == b"RIFF" and len(sound) > 10_000, "the answer has no sound")
    for path in ("/", "/docs", "/openapi.json", "/v1/models"):
        require(bool(fetch(url + path)), f"{path} is empty")
    say(f"{url} says {said['transcript']!r}, {(len(sound) - 44) / 48_000:.1f} s of speech")


def fetch(url: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return bytes(answer.read())


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(f"check_release: {otherwise}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
