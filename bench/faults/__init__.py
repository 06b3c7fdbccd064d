"""Is every caller answered when hosts are killed, are thousands of mixed answers exact, and does nothing leak?"""

from collections.abc import Sequence

from bench.harness.parts import run_parts

PARTS = ("kills", "soak")


def main(given: Sequence[str]) -> int:
    return run_parts(__name__, PARTS, given)
