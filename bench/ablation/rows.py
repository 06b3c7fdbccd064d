"""The ablation on one loaded host: its overlaps are switched off and on while it runs.

Full-size models take a minute to load and to capture, so an engine for each row would take too
long. Everything that a row switches can be switched on a running host: captured graphs are set
aside, not thrown away. The requests of a round come all at once, except where a row is about one
that comes while others are being answered: then they come one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from bench.harness.host import Asker, OneHost, kernels, swapped
from bench.harness.workload import Workload
from stretto.layers.decoder import Decoder
from stretto.loadtest.runner import Sample
from stretto.models.qwen3_omni.talker import TalkerAdapter
from stretto.stage.runner.columns import SamplingMode
from stretto.stage.runner.graphs import DecodeGraphs

Change = Callable[[OneHost], AbstractContextManager[Any]]
ALL, APART = "all on", "all on, one by one"
# about as often as 32 streams send requests that send the next when they have their answer
APART_S = 0.05


def nothing(host: OneHost) -> AbstractContextManager[Any]:
    return nullcontext()


def stage_by_stage(host: OneHost) -> AbstractContextManager[Any]:
    """The talker begins when the last text of the round is there, the vocoder when the last frame
    is. Their inputs wait in their inboxes meanwhile; kernels and graphs are the same."""
    scheduler, codec = host.host.stages["talker"].core.scheduler, host.codec()  # type: ignore[union-attr]
    schedule, frames = scheduler.schedule, codec.schedule
    return swapped(
        [
            (scheduler, "schedule", lambda: schedule() if host.over("thinker") else None),
            (codec, "schedule", lambda: frames() if host.over("talker") else None),
        ]
    )


def cores(host: OneHost) -> list[Any]:
    return [host.codec(), *(host.host.stages[s].core for s in ("thinker", "talker"))]  # type: ignore[union-attr]


def depth_one(host: OneHost) -> AbstractContextManager[Any]:
    """A stage launches a step when the one before it is retired."""

    def alone(core: Any) -> Callable[..., bool]:
        launch: Callable[..., bool] = core.launch
        return lambda *args, **more: not core.in_flight and launch(*args, **more)

    return swapped([(core, "launch", alone(core)) for core in cores(host)])


def at_once(host: OneHost) -> AbstractContextManager[Any]:
    """A step is launched as soon as the one before it runs."""
    return swapped([(host.host.stages[s].core.timer, "on", False) for s in ("thinker", "talker")])  # type: ignore[union-attr]


def retire_all(host: OneHost) -> AbstractContextManager[Any]:
    """A stage retires all steps that are done before it launches the next one."""

    def drained(core: Any) -> Callable[[], list[Any]]:
        poll = core.poll

        def poll_all() -> list[Any]:
            outputs = []
            before = -1
            while before != core.in_flight:
                before = core.in_flight
                outputs += poll()
            return outputs

        return poll_all

    return swapped([(core, "poll", drained(core)) for core in cores(host)])


def no_graphs(host: OneHost) -> AbstractContextManager[Any]:
    """Every kernel is launched by itself, those of prompts too."""
    runners = host.runners()
    changes = [(r, "graphs", None) for r in runners] + [
        (r.adapter, "prompts", None) for r in runners
    ]
    return swapped([*changes, (host.codec(), "graphs", {})])


def no_prompt_graphs(host: OneHost) -> AbstractContextManager[Any]:
    return swapped([(r.adapter, "prompts", None) for r in host.runners()])


@contextmanager
def no_kernels(host: OneHost) -> Iterator[None]:
    """Plain PyTorch, in graphs that are captured here: as with STRETTO_KERNELS=off."""
    changes: list[tuple[Any, str, Any]] = []
    for runner in host.runners():
        adapter = runner.adapter
        changes += [(m, "fused", None) for m in adapter.model.modules() if isinstance(m, Decoder)]
        changes += [(adapter, "fused", False), (adapter, "prompts", None)]
        if isinstance(adapter, TalkerAdapter):
            changes.append((adapter, "frame", None))
    with kernels("off"), swapped(changes):
        captured: list[tuple[Any, str, Any]] = []
        for runner in host.runners():
            if runner.graphs is not None:
                graphs = DecodeGraphs(
                    runner.adapter, runner.graphs.sizes, [SamplingMode(True, True)]
                )
                graphs.capture(runner.stream)
                captured.append((runner, "graphs", graphs))
        with swapped(captured):
            yield


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    base: str
    change: Change
    needs_cuda: bool = False  # without a GPU it changes nothing
    apart_s: float = 0.0  # between the requests of a round


ROWS = [
    Row(ALL, ALL, nothing),
    Row("stage by stage", ALL, stage_by_stage),
    Row("no kernels", ALL, no_kernels, needs_cuda=True),
    Row("no graphs", ALL, no_graphs, needs_cuda=True),
    Row("depth 1", ALL, depth_one),
    Row("no prompt graphs", ALL, no_prompt_graphs, needs_cuda=True),
    Row("all on, again", ALL, nothing),
    Row(APART, APART, nothing, apart_s=APART_S),
    Row("no just_in_time", APART, at_once, needs_cuda=True, apart_s=APART_S),
]


def measure_row(
    host: OneHost,
    asker: Asker,
    workload: Workload,
    row: Row,
    streams: int,
    rounds: int,
    seconds: float,
) -> list[Sample]:
    """At least one round after one to warm up; more until there are enough or time is up."""
    host.ask(asker.round(workload, streams), row.apart_s)
    found: list[Sample] = []
    start = time.perf_counter()
    for _ in range(rounds):
        found += host.ask(asker.round(workload, streams), row.apart_s)
        if time.perf_counter() - start > seconds:
            break
    return found
