"""The few numbers that are measured nowhere: found by search, by when requests of the traced runs reached the host.
Used by the program."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.plan.inputs import table_of
from bench.plan.runs import fitted_runs, label, replays
from stretto.planner.heard import Heard
from stretto.planner.plan import quantile
from stretto.planner.replay import Card
from stretto.planner.table import Table

FITTED: dict[str, dict[str, float]] = {"h200": {"overhead_ms": 1.683, "serial_ms": 0.7187, "build_ms": 0.4497}}
"""Of `--fit 120`."""
PARTS = (0.1, 0.25, 0.5, 0.75, 0.9)
SEEDS = 2


class Watched(Card):
    """Notes when the host's thread hears of each request."""

    def __init__(self, table: Table, max_rows: int | None = None, seed: int = 0) -> None:
        self.announced: dict[int, float] = {}
        super().__init__(table, max_rows, seed)

    def _admit(self) -> bool:
        for i, heard in enumerate(self._messages):
            self.announced[id(heard)] = self.now + i * self.table.admit_next_ms / 1e3
        return super()._admit()

    def took_ms(self, heard: Sequence[Heard]) -> list[float]:
        return [1e3 * (self.announced[id(h)] - h.arrived) for h in heard]


def loss(table: Table, runs: Sequence[Mapping[str, Any]], measured: Mapping[str, Sequence[float]]) -> float:
    """How far quantiles of the way to the host are from those measured, over all runs."""
    total = 0.0
    for run in runs:
        there = [quantile(measured[label(run)], p) for p in PARTS]
        cards = [Watched(table, seed=seed) for seed in range(SEEDS)]
        found = replays(table, run, SEEDS, cards.__getitem__)
        took = [card.took_ms(heard) for card, heard in zip(cards, found, strict=True)]
        marks = [statistics.mean(quantile(each, p) for each in took) for p in PARTS]
        total += sum(abs(math.log(a / b)) ** 1.5 for a, b in zip(marks, there, strict=True))
    return total


def fit(gpu: str, found: Mapping[str, Any], runs: Mapping[str, Any], seconds: float, seed: int) -> dict[str, float]:
    """Change a few numbers at a time, and keep what is better."""
    best, loads, measured = dict(FITTED[gpu]), fitted_runs(gpu), found["announced_ms"]
    least, rng = loss(table_of(gpu, found, best, runs), loads, measured), random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        k = dict(best)
        for name in rng.sample(sorted(k), rng.choice((1, 2, 3))):
            k[name] = float(f"{k[name] * math.exp(rng.gauss(0, 0.15)):.4g}")
        if (new := loss(table_of(gpu, found, k, runs), loads, measured)) < least:
            least, best = new, k
            print(f"{least:.4f}", json.dumps(best), flush=True)
    return best
