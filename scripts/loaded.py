"""Runs the unit tests while busy loops take the processor's time, and records which tests failed.

    .venv/bin/python -m scripts.loaded                              # what `make unit` runs
    .venv/bin/python -m scripts.loaded --runs 1 tests/server -k loop  # some of it
    .venv/bin/python -m scripts.loaded --together 3  # three runs beside each other, as root

Each run is `pytest -n auto` beside four processes that never rest. With `--together`, so many runs
are each other's load instead: each has a network, shared memory, processes and a folder for
temporary files of its own, so that they meet at the processor alone. A test that looks at the clock
fails here. Runs are written to bench/results/loaded.json (`--out`) when they end. The status is 1
if one failed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.env import describe
from bench.harness.results import RESULTS, ROOT, write

BUSY = "while True: pass"
FAILURES = {"failure", "error"}
OWN_NAMESPACES = (
    *("unshare", "--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && ip link set lo up && exec "$@"', "sh"),
)
"""What a command stands behind so that nothing of it meets another such command."""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def outcomes(report: Path) -> dict[str, Any]:
    """Counts and failures, of pytest's JUnit file."""
    if not report.exists():
        return {"tests": 0, "skipped": 0, "failed": [], "slowest": []}
    cases = list(ET.parse(report).getroot().iter("testcase"))
    name = {id(case): f"{case.get('classname')}::{case.get('name')}" for case in cases}
    results = {id(case): {child.tag for child in case} for case in cases}
    slowest = sorted(cases, key=lambda case: -float(case.get("time", 0)))[:10]
    return {
        "tests": len(cases),
        "skipped": sum("skipped" in results[id(case)] for case in cases),
        "failed": [name[id(case)] for case in cases if results[id(case)] & FAILURES],
        "slowest": [[name[id(case)], float(case.get("time", 0))] for case in slowest],
    }


@dataclass(slots=True)
class Run:
    """One pytest, until it has ended."""

    folder: Path  # for its temporary files and its report
    process: subprocess.Popen[bytes]
    began: float

    @classmethod
    def start(cls, pytest_args: Sequence[str], folder: Path, alone: bool) -> Run:
        report = f"--junitxml={folder / 'report.xml'}"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", report, *pytest_args]
        env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        words = [*OWN_NAMESPACES, *command] if alone else command
        return cls(folder, subprocess.Popen(words, cwd=ROOT, env=env), time.monotonic())

    def wait(self) -> dict[str, Any]:
        status = self.process.wait()
        seconds = time.monotonic() - self.began
        load = os.getloadavg()[1]
        report = outcomes(self.folder / "report.xml")
        return {"status": status, "seconds": seconds, "load": load, **report}


def run(pytest_args: Sequence[str], loops: int, together: int = 1) -> list[dict[str, Any]]:
    """So many runs at once."""
    with ExitStack() as held:
        held.enter_context(busy_loops(loops))
        folders = [held.enter_context(temporary()) for _ in range(together)]
        runs = [Run.start(pytest_args, folder, together > 1) for folder in folders]
        return [one.wait() for one in runs]


@contextmanager
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="loaded-") as folder:
        yield Path(folder)


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--runs", type=int, default=3, help="default: %(default)s")
    p.add_argument("--together", type=int, default=1, metavar="N", help="runs at once, as root")
    p.add_argument("--loops", type=int, help="default: 4, beside other runs none")
    p.add_argument("--out", type=Path, default=RESULTS / "loaded.json", help="default: %(default)s")
    args, pytest_args = p.parse_known_args()
    if args.together > 1 and os.geteuid() != 0:
        p.error("--together needs root: each run gets namespaces of its own")
    loops = args.loops if args.loops is not None else 4 if args.together == 1 else 0
    result: dict[str, Any] = {"env": describe(), "loops": loops, "together": args.together}
    result["pytest"] = pytest_args
    result["runs"] = runs = []
    while len(runs) < args.runs:
        runs += run(pytest_args, loops, min(args.together, args.runs - len(runs)))
        write(args.out, result)
    return int(any(one["status"] for one in runs))


if __name__ == "__main__":
    sys.exit(main())
