"""Stock clients, each newest version in an environment of its own, against `stretto serve`.

    python -m tests.slow clients --out bench/results/clients.json

Environments are made in a temporary folder, or in `--keep FOLDER`, where the next run finds them.
pip and npm must reach their registries; npm's clients are left out where there is no npm. What a
client did not do is a problem, and the last lines of what it said stand in the result. With
`--only` the file keeps what it says of the other clients.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.harness.env import describe
from bench.harness.parts import one_of
from bench.harness.results import arguments, parser, read, write
from tests.server.certificates import certificate_settings
from tests.server.realtime import conversation
from tests.server.realtime.conftest import talking
from tests.server.scripted_engine import ScriptedEngine
from tests.slow.clients.cases import CASES, ClientCase, Exchange, Which
from tests.slow.clients.environments import CannotInstall, ClientEnvironment

QUESTION = "What is seven plus eight?"
RATE = 24_000
PATIENCE_S = 900  # for one program
LAST_LINES = 12


@dataclass(slots=True)
class Servers:
    """`stretto serve`, started when a client first needs it."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    urls: dict[Which, str] = field(default_factory=dict)

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    def url(self, which: Which) -> str:
        if which not in self.urls:
            self.urls[which] = self._start(which)
        return self.urls[which]

    def _start(self, which: Which) -> str:
        model = "nano"
        if which == "tiny":
            model = str(self.folder / "tiny")
            subprocess.run([sys.executable, "-m", "stretto", "tiny", model], check=True)
        port = _free_port()
        words = [sys.executable, "-m", "stretto", "serve", model, "--port", str(port)]
        words += ["--min-pace", "0"]
        scheme = "http"
        if which == "nano over TLS":
            scheme = "https"
            for name, value in certificate_settings(self.folder).items():
                words += [f"--{name.replace('_', '-')}", value]
        log = self.folder / f"{which}.log"
        with log.open("wb") as file:
            self.processes.append(subprocess.Popen(words, stdout=file, stderr=file))
        url = f"{scheme}://127.0.0.1:{port}"
        verify = str(self.certificate) if scheme == "https" else True
        while not _ready(url, verify):
            if self.processes[-1].poll() is not None:
                raise RuntimeError(f"the server for {which} ended:\n{_last_lines(log.read_text())}")
            time.sleep(0.2)
        return f"{url}/v1"

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()


def _ready(url: str, verify: str | bool) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", verify=verify, timeout=60).status_code == 200
    return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def write_question(url: str, path: Path) -> None:
    """Nano's own voice asks."""
    body = {"model": "default", "input": QUESTION, "response_format": "pcm"}
    sound = httpx.post(f"{url}/audio/speech", json=body, timeout=600).raise_for_status().content
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(sound)


def run_exchange(
    exchange: Exchange, environment: ClientEnvironment, servers: Servers, question: Path
) -> dict[str, Any]:
    if exchange.server == "scripted":
        return _run_conversation(exchange, environment, servers.folder)
    url = servers.url(exchange.server)
    answer = str(servers.folder / "answer.wav")
    arguments = {
        "url": [url],
        "url question": [url, str(question)],
        "question answer url": [str(question), answer, "--url", url],
        "question answer ws": [
            str(question),
            answer,
            "--url",
            url.replace("http", "ws", 1) + "/realtime",
        ],
    }[exchange.arguments]
    certificate = servers.certificate if exchange.server == "nano over TLS" else None
    return _run_program(exchange, arguments, environment, servers.folder, certificate)


def _run_conversation(
    exchange: Exchange, environment: ClientEnvironment, folder: Path
) -> dict[str, Any]:
    turn = folder / "turn.wav"
    conversation.write_turn(turn)
    engine = ScriptedEngine(script=conversation.answers)
    with talking(engine) as running:
        arguments = [f"{running.url}/v1", str(turn)]
        found = _run_program(exchange, arguments, environment, folder)
        if found["passed"]:
            try:
                conversation.check_conversation(running, engine)
            except AssertionError as e:
                found |= {"passed": False, "error": f"what the server was asked: {e}"}
    return found


def _run_program(
    exchange: Exchange,
    arguments: list[str],
    environment: ClientEnvironment,
    folder: Path,
    certificate: Path | None = None,
) -> dict[str, Any]:
    command = [*environment.command(exchange.program), *arguments]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
            env=environment.variables(certificate), cwd=folder,
        )  # fmt: skip
        error = "" if done.returncode == 0 else _last_lines(done.stderr or done.stdout)
        said = done.stdout
    except subprocess.TimeoutExpired as e:
        said = (e.stdout or b"").decode(errors="replace")
        error = f"nothing for {PATIENCE_S} s"
    worked = [w.removeprefix("ok: ") for w in said.splitlines() if w.startswith("ok: ")]
    return {
        "program": exchange.program.name,
        "server": exchange.server,
        "exchanged": worked or (["a spoken question and its answer, realtime"] * (not error)),
        "seconds": time.monotonic() - begun,
        "passed": not error,
        **({"error": error} if error else {}),
    }


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])


def run_case(case: ClientCase, folder: Path, servers: Servers, question: Path) -> dict[str, Any]:
    environment = ClientEnvironment(case, folder / case.name)
    found: dict[str, Any] = {"client": case.package, "from": case.tool, "version": None}
    try:
        environment.install()
    except CannotInstall as e:
        return {**found, "passed": False, "error": str(e), "exchanges": []}
    found["version"] = environment.version()
    exchanges = [run_exchange(e, environment, servers, question) for e in case.exchanges]
    return {**found, "passed": all(e["passed"] for e in exchanges), "exchanges": exchanges}


@contextlib.contextmanager
def running_servers(folder: Path) -> Iterator[Servers]:
    servers = Servers(folder)
    try:
        yield servers
    finally:
        servers.close()


def main(given: Sequence[str]) -> int:
    names = [case.name for case in CASES]
    p = parser("clients", __doc__, package="tests.slow")
    p.add_argument("--only", type=one_of(names), default=names, metavar="A,B", help="default: all")
    p.add_argument("--keep", type=Path, help="a folder for the environments")
    args = p.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="stretto-clients-") as temporary:
        return _run_all(args, Path(temporary))


def _run_all(args: argparse.Namespace, temporary: Path) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    cases = [c for c in CASES if c.name in args.only and (c.tool == "pip" or shutil.which("npm"))]
    result: dict[str, Any] = {"env": describe(), "arguments": arguments(args)}
    found = _others(args)
    with running_servers(temporary) as servers:
        question = temporary / "question.wav"
        write_question(servers.url("nano"), question)
        folder = (args.keep or temporary).resolve()  # pip and npm run within it
        for case in cases:
            found[case.name] = run_case(case, folder, servers, question)
            _show(case, found[case.name])
            write(args.out, {**result, **{c.name: found[c.name] for c in CASES if c.name in found}})
    failed = [case.name for case in cases if not found[case.name]["passed"]]
    print(f"{len(cases) - len(failed)} of {len(cases)} clients passed")
    return 1 if failed else 0


def _others(args: argparse.Namespace) -> dict[str, Any]:
    """What the file says of clients that do not run now."""
    if args.out is None or not args.out.exists():
        return {}
    known = read(args.out)
    return {c.name: known[c.name] for c in CASES if c.name in known and c.name not in args.only}


def _show(case: ClientCase, found: dict[str, Any]) -> None:
    print(
        f"{case.name} {found['version']}: {'passed' if found['passed'] else 'FAILED'}", flush=True
    )
    for exchange in found["exchanges"]:
        for what in exchange["exchanged"]:
            print(f"  {exchange['program']}: {what}")
        if not exchange["passed"]:
            print(f"  {exchange['program']} FAILED:\n{exchange['error']}", flush=True)
