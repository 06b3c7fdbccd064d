"""Damaged and nonsensical input: everything that crosses a process, and events over /v1/realtime."""

from collections.abc import Sequence

from bench.harness.parts import run_parts

PARTS = ("wire", "realtime")


def main(given: Sequence[str]) -> int:
    return run_parts(__name__, PARTS, given)
