"""What it costs to move a payload to another process: a hop, and the copies of a link beside decode steps."""

from collections.abc import Sequence

from bench.harness.parts import run_parts

PARTS = ("hops", "copies")


def main(given: Sequence[str]) -> int:
    return run_parts(__name__, PARTS, given)
