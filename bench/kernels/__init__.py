"""Kernels and parts of models by themselves, on a GPU: launch parameters, prompts, pictures, the vocoder."""

from collections.abc import Sequence

from bench.harness.parts import run_parts

PARTS = ("alone", "in_step", "prompts", "pictures", "vocoder", "rounding")


def main(given: Sequence[str]) -> int:
    return run_parts(__name__, PARTS, given)
