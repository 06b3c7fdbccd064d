"""Processes that compile kernels ahead, and a note on disk that says when there is nothing left for
them to do.

Triton compiles a kernel where it is first launched, one after the other, about a second each, and
keeps the result in its cache directory. A first start would wait minutes for it; instead several
processes launch the same kernels first (what they run is the caller's to say, see
`models/compile_ahead.py`) and the start finds them on disk. Nothing depends on it: a kernel that is
not there is compiled as ever. Called by a host while it loads, on its main thread."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from stretto.kernels.triton.tuning import SHIPPED, own_file

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[2]
SOURCES = ("kernels", "layers", "models", "stage/runner")
"""Parts of the package that decide which kernels there are and which of their variants are
launched."""


SWITCHES = (
    "STRETTO_KERNELS",
    "STRETTO_KERNELS_CARD",
    "STRETTO_KERNELS_DEPENDENT_LAUNCH",
    "STRETTO_KERNELS_FLOAT8",
)
"""Variables that do so too."""


def directory() -> Path:
    """Where Triton keeps compiled kernels."""
    from triton import knobs

    return Path(knobs.cache.dir)


def digest(paths: Iterable[Path]) -> str:
    """Of files' names and contents, in any order; a file that is not there counts too."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.name.encode() + b"\0")
        found.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"none")
    return found.hexdigest()


def sources(package: Path = PACKAGE) -> list[Path]:
    roots = [package / part for part in SOURCES]
    return [p for root in roots for p in (root.rglob("*.py") if root.is_dir() else [root])]


def surroundings(device: torch.device) -> dict[str, str]:
    """All that compiled kernels depend on, but for the shapes they are launched with."""
    import triton

    return {
        "sources": digest(sources()),
        "tuning": digest((SHIPPED, own_file())),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "gpu": f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}",
        **{name: os.environ.get(name, "") for name in SWITCHES},
    }


@dataclass(frozen=True, slots=True)
class Marker:
    """A file that says: kernels for all this were compiled. It lies among them, so that it goes
    when they go."""

    path: Path
    text: bytes

    @classmethod
    def of(cls, folder: Path, about: Mapping[str, object]) -> Marker:
        text = json.dumps(about, sort_keys=True, indent=1).encode()
        return cls(folder / f"stretto-warm-{hashlib.sha256(text).hexdigest()[:16]}.json", text)

    @property
    def there(self) -> bool:
        """Complete, that is; anything else counts for nothing."""
        try:
            return self.path.read_bytes() == self.text
        except OSError:
            return False

    def write(self) -> None:
        """Whole or not at all: hosts may start side by side."""
        fresh = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(self.text)
            fresh.replace(self.path)
        except OSError as e:
            log.warning(
                "%s: cannot be written (%s); the next start will compile kernels anew", self.path, e
            )


class Workers:
    """Child processes that compile. They never speak; what they say on their way out is logged if
    they fail."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        self.failed = 0
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        for command in commands:
            said = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    env=env,
                )
            except OSError as e:
                said.close()
                self._fail(f"did not start: {e}")
            else:
                self._running.append((process, said))

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process, _ in self._running)

    def wait(self, seconds: float) -> bool:
        """Until all have ended; those that have not by then are ended. Did all do what they were
        asked to?"""
        end = time.monotonic() + seconds
        for process, said in self._running:
            try:
                code = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self._fail("was not done in time")
            else:
                if code:
                    said.seek(0)
                    last = said.read().decode(errors="replace").strip().splitlines()[-1:]
                    self._fail(f"ended with {code}: {''.join(last)}")
            said.close()
        self._running.clear()
        return not self.failed

    def close(self) -> None:
        """End those that still run."""
        for process, said in self._running:
            process.kill()
            process.wait()
            said.close()
        self._running.clear()

    def _fail(self, why: str) -> None:
        self.failed += 1
        log.warning(
            "a process that compiles kernels %s; its kernels are compiled when they are needed", why
        )


def python(module: str, *args: str) -> list[str]:
    return [sys.executable, "-m", module, *args]
