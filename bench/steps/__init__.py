"""How long a step takes: thinker steps and talker frames on a GPU, alone and together, and frames on a CPU."""

from collections.abc import Sequence

from bench.harness.parts import run_parts

PARTS = ("decode", "together", "cpu")


def main(given: Sequence[str]) -> int:
    return run_parts(__name__, PARTS, given)
