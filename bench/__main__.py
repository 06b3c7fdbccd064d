"""`python -m bench` lists the benchmarks, `python -m bench NAME [arguments]` runs one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.harness.parts import run_program

PROGRAMS: dict[str, tuple[str, ...]] = {
    "serve": (),
    "formats": (),
    "proofs": (),
    "trees": (),
    "engine": ("load", "guided", "fullsize", "links"),
    "realtime": (),
    "ablation": (),
    "host": ("loop", "scheduler"),
    "gaps": (),
    "http": (),
    "steps": ("decode", "together", "formats", "cpu"),
    "kernels": ("vocoder", "prompts", "pictures", "alone", "in_step", "rounding", "cards"),
    "connectors": ("hops", "copies", "machines"),
    "ingress": (),
    "memory": (),
    "path": (),
    "report": (),
}
"""Speed from the outside in, then what runs, then the tables."""


def main(given: Sequence[str]) -> int:
    return run_program("bench", PROGRAMS, given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
