"""The few numbers that are measured nowhere: found by search, on the runs that were traced. Used by the program."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.plan.inputs import table_of
from bench.plan.runs import FIT_SEEDS, fitted_runs, replays
from stretto.planner.plan import quantile
from stretto.planner.table import Table

FITTED: dict[str, dict[str, float]] = {
    "h200": {"overhead_ms": 3.703, "serial_ms": 0.6519, "build_ms": 0.2222, "hop_us": 113.0}
}
"""Of `--fit 250` on the traced runs, which began from a coarse grid."""
TEXT, AUDIO = (0.5, 0.9), (0.1, 0.5, 0.9, 0.99)
"""Quantiles of first text and first audio that are fitted, beside the median of the real-time factor."""
WEIGHTS = (0.7, 0.7, 0.3, 1.0, 1.0, 0.4, 1.5)


def marks(first_text: Sequence[float], first_audio: Sequence[float], rtf: Sequence[float]) -> list[float]:
    """What the fit compares: more of the distributions than what is reported, since the p99 of so few samples says
    little."""
    text, audio = ([quantile(values, p) for p in parts] for values, parts in ((first_text, TEXT), (first_audio, AUDIO)))
    return [*text, *audio, quantile(rtf, 0.5)]


def loss(table: Table, runs: Sequence[Mapping[str, Any]], least: float = math.inf) -> float:
    """Of all runs, or so much of it that it is no better than `least`."""
    total = 0.0
    for run in runs:
        there = marks(*([s[what] for s in run["samples"]] for what in ("first_text", "first_audio", "rtf")))
        found = [
            marks([h.first_text or 0.0 for h in heard], [h.first_audio or 0.0 for h in heard], [h.rtf for h in heard])
            for heard in replays(table, run, 2 if run["streams"] == 128 else FIT_SEEDS)
        ]
        off = [statistics.mean(each) / m - 1 for each, m in zip(zip(*found, strict=True), there, strict=True)]
        total += sum(w * abs(e) ** 1.5 for w, e in zip(WEIGHTS, off, strict=True))
        if total >= least:
            break
    return total


def fit(gpu: str, found: Mapping[str, Any], runs: Mapping[str, Any], seconds: float, seed: int) -> dict[str, float]:
    """Change a few numbers at a time, and keep what is better."""
    best, loads = dict(FITTED[gpu]), sorted(fitted_runs(gpu), key=lambda run: run["streams"] == 128)
    least, rng = loss(table_of(gpu, found, best, runs), loads), random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        k = dict(best)
        for name in rng.sample(sorted(k), rng.choice((1, 2, 3))):
            k[name] = float(f"{k[name] * math.exp(rng.gauss(0, 0.07)):.4g}")
        if (new := loss(table_of(gpu, found, k, runs), loads, least)) < least:
            least, best = new, k
            print(f"{least:.4f}", json.dumps(best), flush=True)
    return best
