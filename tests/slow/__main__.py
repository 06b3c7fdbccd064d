"""`python -m tests.slow` lists the programs that look for faults, `python -m tests.slow NAME
[arguments]` runs one. Each exits with 1 if it found a problem, and writes what it saw to `--out`.

test_programs.py runs small sizes of them under pytest."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.harness.parts import run_program

PROGRAMS: dict[str, tuple[str, ...]] = {
    "faults": ("kills", "soak", "server"),
    "cluster": (),
    "clients": (),
    "hostile": ("attacks", "floods"),
    "fuzz": ("wire", "realtime"),
}


def main(given: Sequence[str]) -> int:
    return run_program("tests.slow", PROGRAMS, given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
