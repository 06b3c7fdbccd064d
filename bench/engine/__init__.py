"""The engine without HTTP, in its processes: load of any kind, answers by a grammar, and the released size."""

from collections.abc import Sequence

from bench.harness.parts import run_parts

PARTS = ("load", "guided", "fullsize")


def main(given: Sequence[str]) -> int:
    return run_parts(__name__, PARTS, given)
