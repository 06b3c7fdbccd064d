"""The measured runs that the planner is compared with, and their replays. Used by the rest of this package."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.results import RESULTS, read
from stretto.planner.heard import Asked, Heard
from stretto.planner.plan import quantile
from stretto.planner.replay import Card, replay
from stretto.planner.table import Table

FRAME_S, OPENING_S = 0.08, 0.08 - 1365 / 24000
ASKED = {"text-100": Asked(108, 64, 125), "long-60s": Asked(108, 300, 750)}
PARTS = ("latency", "open", "realtime")
"""Of a result, whose runs are replayed."""
MEASURES = ("first_audio_p50", "first_audio_p99", "rtf_p50")
SEEDS = 10
"""Replays of a run. The least change lets other requests share a step, so one of them says little."""


def fitted_runs(gpu: str) -> list[Any]:
    return runs_of(read(RESULTS / f"plan_traced_{gpu}.json"))


def other_runs(gpu: str) -> list[Any]:
    """Of the same commit, each file by a server of its own, and nothing of them fitted."""
    return [run for name in (gpu, f"{gpu}_again") for run in runs_of(read(RESULTS / f"{name}.json"))]


def runs_of(result: Mapping[str, Any]) -> list[Any]:
    arguments, parts = result["arguments"], [result["parts"][part] for part in PARTS if part in result["parts"]]
    return [{**run, "arguments": arguments} for part in parts for run in part["found"]]


def told(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What was measured, in all of these together."""
    samples = [s for run in runs for s in run["samples"]]
    return marked([s["first_audio"] for s in samples], [s["rtf"] for s in samples])


def seen(heard: Sequence[Heard]) -> dict[str, float]:
    return marked([h.first_audio for h in heard if h.first_audio is not None], [h.rtf for h in heard])


def marked(first: Sequence[float], rtf: Sequence[float]) -> dict[str, float]:
    return dict(zip(MEASURES, (quantile(first, 0.5), quantile(first, 0.99), quantile(rtf, 0.5)), strict=True))


def label(run: Mapping[str, Any]) -> str:
    if run["streams"] is None:
        return f"{run['rate']:g} a second"
    return f"{run['streams']} within {run['within_s']:g} s" if run.get("within_s") else f"{run['streams']} streams"


def replays(
    table: Table, run: Mapping[str, Any], seeds: int = SEEDS, made: Callable[[int], Card] | None = None
) -> list[list[Heard]]:
    """Several, since it is chance which requests share a step. `made`: the card of each, by its seed."""
    asked, found = ASKED[run["workload"]], []
    for seed in range(seeds):
        card = made(seed) if made is not None else Card(table, seed=seed)
        if run["workload"] == "text-100" and run["rate"] is None:
            found.append(replay_closed(card, asked, Loop.of(run["streams"], run["arguments"])))
        else:
            found.append(replay(card, iter(sorted((s["sent"], asked) for s in run["samples"])), math.inf))
    return found


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop, as the program `serve` has it: listeners in processes, each of which has its own requests."""

    streams: int
    requests: int  # that count
    processes: int
    seconds: float  # no request begins after so long

    @classmethod
    def of(cls, streams: int, arguments: Mapping[str, Any]) -> Loop:
        """From the arguments of `serve`."""
        return cls(
            streams,
            max(arguments["requests"], arguments["rounds"] * streams),
            arguments["processes"],
            arguments["seconds"],
        )


def replay_closed(card: Card, asked: Asked, loop: Loop) -> list[Heard]:
    """Each client sends its next request when it has its answer, if its process has one left. As many as there are
    clients are left out of the result, the first of each process."""
    many, total = min(loop.processes, loop.streams), loop.streams + loop.requests
    left = [iter(range(len(range(i, total, many)))) for i in range(many)]
    clients = [loop.streams // many + (i < loop.streams % many) for i in range(many)]
    of: dict[int, int] = {}  # which process a request is of
    counted: list[Heard] = []

    def ask(process: int) -> None:
        number = next(left[process], None)
        if number is not None and card.now <= loop.seconds:
            heard = card.arrive(asked)
            of[id(heard)] = process
            if number >= clients[process]:
                counted.append(heard)

    card.ended = lambda heard: ask(of[id(heard)])
    for process, streams in enumerate(clients):
        for _ in range(streams):
            ask(process)
    while card.running:
        card.advance(card.now + 1.0)
    return sorted(counted, key=lambda h: h.arrived)
