"""Launch gaps: how long each stage of a host rests between two decode steps that follow each other.

    python -m bench gaps --model released --out bench/results/gaps_h200.json  # 2 minutes, GPU
    python -m bench gaps --rows 1 2 --rounds 1                                # tries the program

One host in this process holds all stages, as in service on one GPU. So many requests (`--rows`)
come at once, and their decode steps are measured from the stage's last prefill to the first request
that ends there. Three kinds of request: a text that is answered in text (only the thinker runs), a
text that is answered in speech, and a spoken question that is answered in speech.

On a GPU the times come from CUDA events on the stage's own stream: one right before the copy and
the captured graph of a step, one behind the copy of its result. A gap is the time from the second
event of a step to the first event of the next one, so kernels of other stages may run in it. On a
CPU a launch is the work, and its beginning and end are taken.

Two numbers must not be mixed up. `stage_idle`: the share of time in which no step of *this* stage
is on the device, though its requests decode (it may wait for the stage before it, or be held back
on purpose). `device_idle`: the share in which no step of *any* stage is.

Ways: `on` is the default, with two steps in flight; `off` launches a step when the one before it is
retired (`overlap_depth` 1); `retire all` has both steps in flight and retires all that are done
before it launches one. For each way requests also come one by one (32, every 50 ms), for what it
does to first audio.

A step's gap ends where its copy and graph are launched: the microseconds from there to its first
kernel count as the step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.ablation.rows import APART_S, depth_one, nothing, retire_all
from bench.harness.checkpoint import add_model_arguments, checkpoint, device_here, host_settings
from bench.harness.env import describe
from bench.harness.host import STAGES, VOCODER, Asker, OneHost
from bench.harness.results import arguments, parser, quantile, write
from bench.harness.rounds import turns
from bench.harness.workload import Question, Workload
from bench.report.proofs import gap_table
from stretto.config.engine import HostSettings
from stretto.errors import StrettoError
from stretto.messages.requests import Ended, FromHost, Pcm
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Capability
from stretto.stage.host.process import settle_down
from stretto.types import RequestId

ARRIVALS = 32
"""Requests of a round that come one by one."""
WAYS: dict[str, Callable[[OneHost], AbstractContextManager[Any]]] = {
    "on": nothing,
    "off": depth_one,
    "retire all": retire_all,
}


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    capability: Capability
    prompt: Question
    ways: tuple[str, ...] = ("on", "off")


KINDS = {
    k.name: k
    for k in (
        Kind("text", "text", Question(100)),
        Kind("speech", "speech", Question(100), tuple(WAYS)),
        Kind("spoken question", "speech", Question(20, audio_s=2.0)),
    )
}


# ---- when steps ran


@dataclass(slots=True, eq=False)
class Mark:
    """A step of a stage: its beginning and end, on the device or (without one) on the host."""

    stage: str
    decodes: bool
    stream: torch.cuda.Stream | None
    first: Any = None
    last: Any = None

    def __post_init__(self) -> None:
        if self.stream is not None:
            self.first, self.last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def begin(self) -> None:
        """Called again where the step's work really begins: the later call counts."""
        if self.stream is None:
            self.first = time.perf_counter()
        else:
            self.first.record(self.stream)

    def end(self) -> None:
        if self.stream is None:
            self.last = time.perf_counter()
        else:
            self.last.record(self.stream)

    def span_us(self, base: Mark) -> tuple[float, float]:
        if self.stream is None:
            times = 1e6 * (self.first - base.first), 1e6 * (self.last - base.first)
        else:
            ends = base.first.elapsed_time(self.first), base.first.elapsed_time(self.last)
            times = 1e3 * ends[0], 1e3 * ends[1]
        return round(times[0], 1), round(times[1], 1)


@dataclass(slots=True)
class Round:
    """The steps of one round, in the order of their launches, and where the steady part of each
    stage ends: at the first report of an end there."""

    marks: list[Mark] = field(default_factory=list)
    begun: set[RequestId] = field(default_factory=set)  # that have sound
    audible: int | None = None  # steps that were launched when all requests had sound
    ended: dict[str, int] = field(default_factory=dict)

    def steady(self, stage: str) -> list[Mark]:
        """Decode steps behind the stage's last prefill; of the vocoder those behind the first
        packets."""
        stop = self.ended.get(stage, len(self.marks))
        mine = [(i, m) for i, m in enumerate(self.marks[:stop]) if m.stage == stage]
        first = max((i for i, m in mine if not m.decodes), default=-1)
        if stage == VOCODER:
            first = len(self.marks) if self.audible is None else self.audible - 1
        return [m for i, m in mine if i > first]


class GapHost(OneHost):
    """Notes every step of its stages."""

    def __init__(self, directory: Path, settings: HostSettings) -> None:
        self.round = Round()
        self.asked = 0
        super().__init__(directory, settings)
        for name, stage in self.host.stages.items():
            if name == VOCODER:
                self._watch_vocoder()
            else:
                self._watch_stage(name, stage.core.runner)  # type: ignore[attr-defined]

    def _mark(self, stage: str, decodes: bool, stream: torch.cuda.Stream | None) -> Mark:
        mark = Mark(stage, decodes, stream)
        self.round.marks.append(mark)
        mark.begin()
        return mark

    def _watch_stage(self, name: str, runner: Any) -> None:
        launch, graphs = runner.launch, runner.graphs

        def marked(batch: Any) -> Any:
            mark = self._mark(name, batch.decode_only, runner.stream)
            step = launch(batch)
            mark.end()
            return step

        runner.launch = marked
        if graphs is not None:
            # The host's work before it belongs to the gap.
            run = graphs.replay

            def replay(*args: Any) -> Any:
                self.round.marks[-1].begin()
                return run(*args)

            graphs.replay = replay

    def _watch_vocoder(self) -> None:
        codec = self.codec()
        run = codec.run

        def marked(streams: int, size: int) -> Any:
            mark = self._mark(VOCODER, True, codec.stream)
            made = run(streams, size)
            mark.end()
            return made

        codec.run = marked

    def post(self, message: FromHost, blob: bytes = b"") -> None:
        match message:
            case Pcm(request=id) if self.round.audible is None:
                self.round.begun.add(id)
                if len(self.round.begun) == self.asked:
                    self.round.audible = len(self.round.marks)
            case Ended(stage=stage):
                self.round.ended.setdefault(stage, len(self.round.marks))
        super().post(message, blob)

    def begin(self, requests: int) -> None:
        """A new round of so many."""
        self.round = Round()
        self.asked = requests

    def measure(self, questions: Sequence[Any]) -> dict[str, list[tuple[float, float]]]:
        """One round: (begin, end) of the steady steps of each stage, and of all steps in the time
        for which `device_idle` is told, in µs."""
        self.begin(len(questions))
        self.ask(questions)
        if self.host.device.type == "cuda":
            torch.cuda.synchronize()
        base = self.round.marks[0]
        found = {s: [m.span_us(base) for m in self.round.steady(s)] for s in STAGES}
        slowest = found["talker"] or found["thinker"]
        spans = sorted(m.span_us(base) for m in self.round.marks)
        if slowest:
            start, stop = slowest[0][0], slowest[-1][1]
            found["all"] = [
                (max(a, start), min(b, stop)) for a, b in spans if b > start and a < stop
            ]
        return found


# ---- numbers


def gaps_of(spans: Sequence[tuple[float, float]]) -> list[float]:
    """From the end of each step to the beginning of the next one."""
    return [max(0.0, b[0] - a[1]) for a, b in pairwise(spans)]


def idle_share(spans: Sequence[tuple[float, float]]) -> float | None:
    """The share of time, from the first beginning to the last end, in which none of these runs."""
    if not spans:
        return None
    idle, end = 0.0, spans[0][0]
    for start, stop in sorted(spans):
        idle += max(0.0, start - end)
        end = max(end, stop)
    whole = end - min(start for start, _ in spans)
    return idle / whole if whole else 0.0


def summary(rounds: Sequence[dict[str, list[tuple[float, float]]]]) -> dict[str, Any]:
    """What several rounds of one cell say of each stage, and of the device."""
    told: dict[str, Any] = {"stages": {}, "device_idle": mean_idle(rounds, "all")}
    for stage in STAGES:
        gaps = [g for r in rounds for g in gaps_of(r[stage])]
        steps = [b - a for r in rounds for a, b in r[stage]]
        if not gaps:
            continue
        told["stages"][stage] = {
            "steps": len(steps),
            "gap_us": {name: quantile(gaps, q) for name, q in QUANTILES.items()},
            "step_us": {name: quantile(steps, q) for name, q in QUANTILES.items()},
            "stage_idle": mean_idle(rounds, stage),
        }
    return told


QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def mean_idle(rounds: Sequence[dict[str, list[tuple[float, float]]]], which: str) -> float | None:
    shares = [s for r in rounds if (s := idle_share(r.get(which, []))) is not None]
    return sum(shares) / len(shares) if shares else None


# ---- the run


@dataclass(slots=True)
class Run:
    args: argparse.Namespace
    host: GapHost
    asker: Asker
    begun: float
    result: dict[str, Any]

    def cells(self) -> Iterator[tuple[Kind, int]]:
        """The most telling first, since a limit may cut the rest."""
        for name in ("speech", "text", "spoken question"):
            for rows in self.args.rows:
                if name in self.args.kinds:
                    yield KINDS[name], rows

    def late(self) -> bool:
        return time.monotonic() - self.begun > self.args.limit

    def measure(self) -> None:
        for kind, rows in self.cells():
            if self.late():
                self.result["left_out"].append([kind.name, rows])
                continue
            self.cell(kind, rows)
            write(self.args.out, self.result)
            if rows == self.args.rows[-1] and kind.name == "speech" and not self.late():
                self.arrivals(kind)

    def arrivals(self, kind: Kind) -> None:
        """First audio and RTF of requests that come one by one while others are answered."""
        workload = Workload("gaps", "", kind.prompt, self.args.text, self.args.frames)
        found: dict[str, list[Any]] = {way: [] for way in self.args.ways}
        start = time.monotonic()
        for number, way in turns(self.args.ways, self.args.rounds):
            if number and (time.monotonic() - start > 3 * self.args.seconds or self.late()):
                break
            questions = self.asker.round(workload, min(ARRIVALS, max(self.args.rows)))
            self.host.begin(len(questions))
            with WAYS[way](self.host):
                samples = self.host.ask(questions, APART_S)
            found[way] += [{"first_audio": s.first_audio, "rtf": s.rtf} for s in samples]
            self.result["arrivals"] = {"apart_s": APART_S, "ways": found}
            write(self.args.out, self.result)
        for way, samples in found.items():
            first = [s["first_audio"] for s in samples if s["first_audio"] is not None]
            if first:
                told = f"first audio p50 {1e3 * quantile(first, 0.5):.1f} ms"
                print(f"one by one, {way}: {len(first)} answers, {told}", flush=True)

    def cell(self, kind: Kind, rows: int) -> None:
        workload = Workload("gaps", "", kind.prompt, self.args.text, self.args.frames)
        ways = [way for way in self.args.ways if way in kind.ways]
        rounds: dict[str, list[Any]] = {way: [] for way in ways}
        self.host.measure(self.asker.round(workload, rows, kind.capability))  # warm
        start = time.monotonic()
        for number, way in turns(ways, self.args.rounds):
            spent = time.monotonic() - start > self.args.seconds or self.late()
            if spent and number and len(rounds[way]) >= number:
                break
            with WAYS[way](self.host):
                rounds[way].append(
                    self.host.measure(self.asker.round(workload, rows, kind.capability))
                )
        for way, found in rounds.items():
            cell = {"kind": kind.name, "rows": rows, "way": way, **summary(found), "rounds": found}
            self.result["cells"].append(cell)
            print(line(cell), flush=True)


def line(cell: dict[str, Any]) -> str:
    stages = ", ".join(
        f"{name} {s['gap_us']['p50']:.0f} / {s['gap_us']['p99']:.0f} µs behind "
        f"{s['step_us']['p50']:.0f} ({100 * s['stage_idle']:.1f} % idle)"
        for name, s in cell["stages"].items()
    )
    idle = cell["device_idle"]
    device = "-" if idle is None else f"{100 * idle:.1f} %"
    return f"{cell['kind']} x {cell['rows']}, {cell['way']}: {stages}; device idle {device}"


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[tuple[GapHost, Asker]]:
    most = max(args.rows)
    blocks = {"thinker": 32 * most, "talker": 32 * most} if args.device == "cpu" else {}
    settings = host_settings(args, max_rows=most, blocks=blocks)
    with checkpoint(args.model) as directory:
        host = GapHost(directory, settings)
        try:
            settle_down()  # as a host's process does
            yield host, Asker(PromptBuilder.open(directory, OmniConfig.read(directory)))
        finally:
            host.close()


def main(given: Sequence[str]) -> int:
    p = parser("gaps", __doc__)
    add_model_arguments(p)
    p.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    p.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    p.add_argument("--text", type=int, default=64, help="tokens of an answer (default: 64)")
    p.add_argument("--frames", type=int, default=125, help="of an answer (default: 125)")
    p.add_argument("--rounds", type=int, default=4, help="of each cell, at most (default: 4)")
    p.add_argument("--seconds", type=float, default=4.0, help="of a cell, about (default: 4)")
    p.add_argument("--limit", type=float, default=600.0, help="seconds after which no cell begins")
    args = p.parse_args(given)
    args.device = args.device or device_here()
    begun = time.monotonic()
    result: dict[str, Any] = {
        "env": describe(), "arguments": arguments(args), "cells": [], "left_out": [],
    }  # fmt: skip
    with opened(args) as (host, asker):
        result["load_s"] = host.load_s
        print(f"loaded in {host.load_s:.1f} s", flush=True)
        try:
            Run(args, host, asker, begun, result).measure()
        except StrettoError as e:  # a stage is dead; what was found before is worth its time
            result["error"] = f"{type(e).__name__}: {e}"
            print(result["error"], flush=True)
    write(args.out, result)
    print(gap_table(result))
    return 0 if result["cells"] and "error" not in result else 1
