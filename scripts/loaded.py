"""Runs the unit tests while busy loops take the processor's time, and records which tests failed.

    .venv/bin/python -m scripts.loaded                              # what `make unit` runs
    .venv/bin/python -m scripts.loaded --runs 1 tests/server -k loop  # some of it

Each run is `pytest -n auto` beside four processes that never rest. A test that looks at the clock
fails here. Each run is written to bench/results/loaded.json (`--out`) when it ends. The status is 1
if one failed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness.env import describe
from bench.harness.results import RESULTS, ROOT, write

BUSY = "while True: pass"
FAILURES = {"failure", "error"}


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


def run(pytest_args: list[str], loops: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, busy_loops(loops):
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", f"--junitxml={report}"]
        began = time.monotonic()
        status = subprocess.run(
            [*command, *pytest_args],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        ).returncode
        seconds = time.monotonic() - began
        load = os.getloadavg()[1]
        return {"status": status, "seconds": seconds, "load": load, **outcomes(report)}


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--runs", type=int, default=3, help="default: %(default)s")
    p.add_argument("--loops", type=int, default=4, help="default: %(default)s")
    p.add_argument("--out", type=Path, default=RESULTS / "loaded.json", help="default: %(default)s")
    args, pytest_args = p.parse_known_args()
    result: dict[str, Any] = {"env": describe(), "loops": args.loops, "pytest": pytest_args}
    result["runs"] = runs = []
    for _ in range(args.runs):
        runs.append(run(pytest_args, args.loops))
        write(args.out, result)
    return int(any(one["status"] for one in runs))


if __name__ == "__main__":
    sys.exit(main())
