"""A host in this process whose loop thread is measured: how much time it needs for a frame, and for
what.

Used by the program `host`, here and in older checkouts (see tree.py)."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.harness.host import STAGES, VOCODER, OneHost, Question
from bench.harness.results import quantile
from stretto.config.engine import HostSettings
from stretto.errors import StageDead
from stretto.messages.requests import FromHost, Pcm
from stretto.stage.runner.adapter import SideRows
from stretto.stage.runner.step import Step
from stretto.types import RequestId


class Stopwatch:
    """Own time and calls of wrapped functions, by name. One thread."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner = 0  # time of wrapped calls within the one that runs

    def wrap(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0
            start = time.perf_counter_ns()
            try:
                return work(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - start
                self.spent[name] += took - self._inner
                self.calls[name] += 1
                self._inner = outer + took

        return timed

    def reset(self) -> None:
        self.spent.clear()
        self.calls.clear()


@dataclass(slots=True)
class Device:
    """When steps ran on the GPU, by events on their streams."""

    on: bool
    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def watch(
        self, name: str, stream: torch.cuda.Stream | None, launch: Callable[..., Any]
    ) -> Callable[..., Any]:
        if not self.on or stream is None:
            return launch

        def marked(*args: Any) -> Any:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            result = launch(*args)
            after.record(stream)
            self.marks.append((name, before, after))
            return result

        return marked

    def told(self) -> dict[str, Any]:
        """Of the marks since the last reset: step times, and the share of the time without any
        step."""
        if not self.marks:
            return {}
        torch.cuda.synchronize()
        base = self.marks[0][1]
        spans = sorted(
            (base.elapsed_time(a), base.elapsed_time(b), name) for name, a, b in self.marks
        )
        busy, end = 0.0, spans[0][0]
        for start, stop, _ in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        whole = end - spans[0][0]
        steps = {n: [b - a for a, b, name in spans if name == n] for n in STAGES}
        return {
            "window_ms": whole,
            "idle_share": 1 - busy / whole if whole else 0.0,
            "step_ms_p50": {n: quantile(values, 0.5) for n, values in steps.items() if values},
            "step_ms_p99": {n: quantile(values, 0.99) for n, values in steps.items() if values},
        }


Counts = dict[str, dict[str, int]]
"""By what is counted, then by stage."""


class MeasuredHost(OneHost):
    """Measures from when all requests of a round have sound until the first one ends. With `stub`,
    the models are not run; with `phases`, what the loop thread does is timed by stage and phase,
    which takes some time itself."""

    def __init__(self, directory: Path, settings: HostSettings, stub: bool, phases: bool) -> None:
        self.watch = Stopwatch()
        self.device = Device(settings.device != "cpu")
        self.spoken: set[RequestId] = set()
        super().__init__(directory, settings)
        if stub:
            for runner in self.runners():
                stub_runner(runner)
            stub_codec(self.codec())
        self._watch_device()
        if phases:
            self._watch_phases()

    def post(self, message: FromHost, blob: bytes = b"") -> None:
        if isinstance(message, Pcm):
            self.spoken.add(message.request)
        super().post(message, blob)

    def _watch_device(self) -> None:
        for name, node in self.host.stages.items():
            if name == VOCODER:
                codec = self.codec()
                codec.run = self.device.watch(name, codec.stream, codec.run)
            else:
                runner: Any = node.core.runner  # type: ignore[attr-defined]
                runner.launch = self.device.watch(name, runner.stream, runner.launch)

    def _watch_phases(self) -> None:
        wrap = self.watch.wrap
        self.channel.post = wrap("report", self.channel.post)  # type: ignore[method-assign]
        self.channel.push = wrap("report: push", self.channel.push)  # type: ignore[method-assign]
        for name, node in self.host.stages.items():
            stage: Any = node.core  # type: ignore[attr-defined]
            if name != VOCODER:
                stage.runner.launch = wrap(f"{name}: launch", stage.runner.launch)
                stage.scheduler.schedule = wrap(f"{name}: schedule", stage.scheduler.schedule)
            stage.poll = wrap(f"{name}: core poll", stage.poll)
            stage.launch = wrap(f"{name}: core launch", stage.launch)
            node.accept = wrap(f"{name}: accept", node.accept)  # type: ignore[method-assign]
            node.poll = wrap(f"{name}: poll", node.poll)  # type: ignore[method-assign]
            node.launch = wrap(f"{name}: launch stage", node.launch)  # type: ignore[method-assign]

    def run(self, admits: list[Question], profile: bool = False) -> dict[str, Any]:
        """All requests from admission to their end; measured is the time in which all of them have
        sound."""
        host, ids = self.host, {a.request for a, _ in admits}
        self.spoken.clear()
        self.ended.clear()
        start = time.perf_counter()
        for admit, blob in admits:
            host.handle(admit, blob)
        admitted = time.perf_counter() - start
        first = None
        profiler = cProfile.Profile() if profile else None
        result: dict[str, Any] = {}
        asleep, window, cpu, counts = 0, 0, 0, self._counts()
        rounds = 0
        while not all(ids <= self.ended[s] for s in STAGES):
            if self.failed is not None:
                raise StageDead(self.failed)
            if first is None and self.spoken:
                first = time.perf_counter() - start
            if not window and ids <= self.spoken:
                self.watch.reset()
                self.device.marks.clear()
                asleep, rounds, window, counts = 0, 0, time.perf_counter_ns(), self._counts()
                cpu = time.thread_time_ns()
                if profiler is not None:
                    profiler.enable()
            if window and not result and self.ended["talker"]:
                if profiler is not None:
                    profiler.disable()
                took = time.perf_counter_ns() - window
                result = self._told(
                    took, asleep, time.thread_time_ns() - cpu, rounds, counts, len(ids)
                )
            rounds += 1
            if not host.loop.round():
                before = time.perf_counter_ns()
                host.loop.sleep()
                asleep += time.perf_counter_ns() - before
        if not result:  # all ended in one round
            took = time.perf_counter_ns() - window
            result = self._told(took, asleep, time.thread_time_ns() - cpu, rounds, counts, len(ids))
        result["admit_us"] = 1e6 * admitted / len(ids)
        result["first_packet_ms"] = 1e3 * (first or 0.0)
        if profiler is not None:
            result["profile"] = top(profiler)
        return result

    def _counts(self) -> Counts:
        stats = {name: node.core.stats for name, node in self.host.stages.items()}  # type: ignore[attr-defined]
        return {
            "steps": {name: s.steps for name, s in stats.items()},
            "held": {name: s.held for name, s in stats.items()},
            "late": {name: s.late for name, s in stats.items()},
        }

    def _told(
        self, window: int, asleep: int, cpu: int, rounds: int, counts: Counts, streams: int
    ) -> dict[str, Any]:
        grown = {
            what: {name: after - counts[what][name] for name, after in values.items()}
            for what, values in self._counts().items()
        }
        steps = grown["steps"]
        frames = max(1, steps["talker"])
        phases = {
            name: {
                "us_per_frame": self.watch.spent[name] / 1000 / frames,
                "calls": self.watch.calls[name],
                "ms": self.watch.spent[name] / 1e6,
            }
            for name in sorted(self.watch.spent)
        }
        return {
            "streams": streams,
            "window_ms": window / 1e6,
            "busy_share": 1 - asleep / window,
            "rounds": rounds,
            **grown,  # steps; of these, launches that were held back, and held back for too long
            "busy_us_per_frame": (window - asleep) / 1000 / frames,
            "busy_us_per_frame_and_stream": (window - asleep) / 1000 / frames / streams,
            # The loop thread's own: what others on a shared machine take does not count.
            "cpu_us_per_frame": cpu / 1000 / frames,
            "cpu_us_per_frame_and_stream": cpu / 1000 / frames / streams,
            "wall_ms_per_frame": window / 1e6 / frames,
            "phases": phases,
            "device": self.device.told(),
        }


def stub_runner(runner: Any) -> None:
    """Launches that cost nothing and always give the same tokens."""

    def launch(batch: Any) -> Step:
        sampling = [i for i, span in enumerate(batch.spans) if span.samples]
        tokens = torch.ones(len(sampling), runner.adapter.columns, dtype=torch.int32)
        return Step(batch, sampling, tokens, tokens, None, SideRows(), None)

    runner.launch = launch


def stub_codec(stage: Any) -> None:
    rate = stage.model.config.samples_per_frame

    def run(slots: int, size: int) -> tuple[torch.Tensor, None]:
        return torch.zeros(slots, size * rate), None

    stage.run = run


def top(profiler: cProfile.Profile, lines: int = 45) -> str:
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(lines)
    return "\n".join(line for line in out.getvalue().splitlines() if line.strip())
