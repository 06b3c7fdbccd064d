"""Launch parameters to try for any kernel of a decode step: neighbours of those that it has, as far
as its tiles divide the shape. Called by `models.tune_steps`."""

from __future__ import annotations

import math

from stretto.kernels.triton.descent import Tuned
from stretto.kernels.triton.linear import COUNTERS
from stretto.kernels.triton.tuning import TuningQuestion

SWITCHES = ("soon", "fetch", "swap")
"""Parameters that are 0 or 1."""
MOST = {"warps": 16, "stages": 6, "SPLITS": 64, "BLOCK": 256}
DIVIDING_INPUTS = ("BK", "S", "SPLITS")
ATTENTION = ("decode", "frame")
"""Kernels whose keys are numbers of rows and heads, not widths."""
MASKED = ("vector", "matrix", "split", "wide", "route")
"""Kernels whose last outputs need not fill a tile."""


def nearby(current: Tuned) -> list[Tuned]:
    """One parameter doubled, halved, or switched."""
    found = []
    for name, value in current.items():
        others = [1 - value] if name in SWITCHES else [n for n in (value * 2, value // 2) if n > 0]
        found += [current | {name: n} for n in others]
    return found


def possible(asked: TuningQuestion, c: Tuned) -> bool:
    """Whether tiles divide what they cut, so that no program reads behind a tensor's end. Keys end
    with outputs and inputs."""
    if any(c[name] > most for name, most in MOST.items() if name in c) or c.get("stages", 2) < 2:
        return False
    if asked.kernel in ATTENTION or len(asked.key) < 2:
        return True
    outputs, inputs = asked.key[-2:]
    cut = math.prod(c[name] for name in DIVIDING_INPUTS if c.get(name, 0) > 0)
    columns = c.get("BN", 1)
    if asked.kernel == "split" and outputs > COUNTERS * columns:
        return False
    return inputs % cut == 0 and (asked.kernel in MASKED or outputs % columns == 0)


def candidates(asked: TuningQuestion) -> list[Tuned]:
    """None for kernels that pick tokens: what they do depends on the logits."""
    if asked.kernel.startswith("pick"):
        return []
    return [c for c in nearby(asked.found) if possible(asked, c)]
