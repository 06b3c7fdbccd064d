"""How far replays are from the measured runs, and how certain these are themselves. Used by the program."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.plan.runs import MEASURES, label, marked, seen, told
from stretto.planner.heard import Heard
from stretto.planner.plan import quantile
from stretto.planner.table import Check

BURST_S = 0.012  # requests that were sent no farther apart came together


Run = Mapping[str, Any]


def check(runs: Sequence[Run], replayed: Sequence[Sequence[Sequence[Heard]]], fitted: bool) -> Check:
    """Runs of one load beside their replays, several of each; the samples of several runs are taken together."""
    there = told(runs)
    found = [seen([h for heard in each for h in heard]) for each in zip(*replayed, strict=True)]
    off = {m: [f[m] / there[m] - 1 for f in found] for m in MEASURES}
    return Check(
        label(runs[0]), fitted, sum(run["answers"] for run in runs),
        error={m: round(statistics.mean(off[m]), 4) for m in MEASURES},
        spread={m: (round(min(off[m]), 4), round(max(off[m]), 4)) for m in MEASURES}, interval=interval(runs),
    )  # fmt: skip


def interval(runs: Sequence[Run], draws: int = 2000) -> dict[str, tuple[float, float]]:
    """The 90 % sampling interval of what was measured, as shares of it: samples are drawn from the measured ones, those
    that were sent together as one, since they share their steps. (So no p99 is larger than the largest sample: of a
    hundred, there is no saying how much larger it might have been.)"""
    groups = [burst for run in runs for burst in bursts(run)]
    rng, there = random.Random(0), told(runs)
    drawn: dict[str, list[float]] = {m: [] for m in MEASURES}
    for _ in range(draws):
        first, rtf = zip(*(s for burst in rng.choices(groups, k=len(groups)) for s in burst), strict=True)
        for m, value in marked(first, rtf).items():
            drawn[m].append(value / there[m] - 1)
    return {m: (round(quantile(drawn[m], 0.05), 4), round(quantile(drawn[m], 0.95), 4)) for m in MEASURES}


def bursts(run: Run) -> list[list[tuple[float, float]]]:
    """First audio and real-time factor of answers, by the requests that came together."""
    found: list[list[tuple[float, float]]] = []
    last = -math.inf
    for sent, first, rtf in sorted((s["sent"], s["first_audio"], s["rtf"]) for s in run["samples"]):
        if sent - last > BURST_S:
            found.append([])
        found[-1].append((first, rtf))
        last = sent
    return found


def means(checks: Sequence[Check]) -> dict[str, float]:
    return {name: round(statistics.mean(abs(c.error[name]) for c in checks), 4) for name in MEASURES}


def worst(checks: Sequence[Check]) -> dict[str, float]:
    return {name: round(max(abs(c.error[name]) for c in checks), 4) for name in MEASURES}


def between(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """How far the runs of one load are from each other: the largest from the smallest."""
    loads = {load: [told([run]) for run in all] for load, all in by_load(runs).items() if len(all) > 1}
    return {
        load: {name: round(max(m[name] for m in all) / min(m[name] for m in all) - 1, 4) for name in MEASURES}
        for load, all in loads.items()
    }


def by_load(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(label(run), []).append(run)
    return found
