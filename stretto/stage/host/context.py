"""What a family builds its stages with, in a host: where they run, how they are sized, and what
they report to.

Called once by the host, on its main thread, before its loop runs. Says how far it is, since it
takes a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stretto.config.engine import HostSettings
from stretto.errors import Bug
from stretto.messages.hosts import Configure, Loading
from stretto.observe.recorder import Recorder
from stretto.stage.ar import StageCore
from stretto.stage.host.channel import Channel
from stretto.stage.host.memory_plan import RESERVE, StagePlan, card_memory, check, free_memory
from stretto.stage.host.stats import record_codec, record_stage
from stretto.stage.launch_timing import LaunchTimer
from stretto.stage.runner.adapter import ModelAdapter
from stretto.stage.runner.graphs import SIZES, DecodeGraphs, sizes_for
from stretto.stage.runner.runner import Runner
from stretto.stage.runner.waiter import Waiter
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.scheduler import Scheduler
from stretto.stage.stage import Stage
from stretto.stage.vocoder import CodecConfig, VocoderCore
from stretto.stage.vocoder.model import VocoderModel


@dataclass(slots=True, eq=False)
class StageContext:
    model: str  # directory
    settings: HostSettings
    device: torch.device
    wake: Callable[[], None]  # wakes the loop
    channel: Channel  # to the engine
    num_requests: Callable[[], int] = lambda: 0  # that any stage of the host holds something for
    clock: Callable[[], int] = time.perf_counter_ns  # the loop's
    recorder: Recorder = field(default_factory=Recorder)
    memory: dict[str, int] = field(default_factory=dict)  # bytes by stage, as planned
    waiters: list[Waiter] = field(default_factory=list)
    configure: Configure | None = None  # the host's stages, links and settings

    @property
    def loading_later(self) -> tuple[tuple[str, ...], ...]:
        """The stages of each host that will load on this card after this one."""
        return self.configure.loading_later if self.configure is not None else ()

    @property
    def dtype(self) -> torch.dtype | None:
        """As asked for; None: the family's own choice."""
        return getattr(torch, self.settings.dtype) if self.settings.dtype else None

    @property
    def graphs(self) -> bool:
        """Are steps to be captured?"""
        return self.device.type == "cuda" and self.settings.graphs

    def progress(self, stage: str, what: str) -> None:
        self.channel.send(Loading(stage, what))

    def fit(self, plans: Sequence[StagePlan]) -> int:
        """Refuse stages that do not fit; else the bytes that are free for them."""
        share = self.settings.memory_share
        others = self.configure is not None and self.configure.others
        free, reserve = free_memory(self.device, share), RESERVE[self.device.type]
        check(plans, free, reserve, str(self.device), card_memory(self.device, share), others)
        self.memory.update({p.stage: p.total for p in plans})
        return free - reserve

    def waiter(self, stage: str) -> Waiter | None:
        """On a GPU: the thread that rings when a step of the stage is done."""
        if self.device.type != "cuda":
            return None
        waiter = Waiter(self.wake, stage)
        self.waiters.append(waiter)
        return waiter

    def autoregressive(
        self,
        name: str,
        adapter: ModelAdapter[Any],
        blocks: int,
        *,
        priority: int = 0,
        mixed: bool = True,
    ) -> StageCore:
        """The core of a stage around one model: scheduler, runner, captured steps. `priority` of
        its stream on a device that it shares: lower goes first. `mixed`: captured steps may hold
        prompts and answers together."""
        s = self.settings
        graphs = DecodeGraphs(adapter, sizes_for(s.max_rows)) if self.graphs else None
        runner = Runner(adapter, graphs, priority)
        if graphs is not None and runner.stream is not None:
            self.progress(name, "capturing graphs")
            graphs.capture(runner.stream)
        # On a CPU a step is done when its launch is, and all stages of the host wait for it.
        usual, lone = (256, 256) if self.device.type == "cpu" else (1024, 2560)
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=blocks,
                block_size=s.block_size,
                max_rows=s.max_rows,
                max_waiting=s.max_waiting,
                max_context=s.max_context,
                max_step_tokens=s.max_step_tokens,
                prefill_chunk=s.prefill_chunk or usual,
                lone_prefill_chunk=s.lone_prefill_chunk or lone,
                overlap_depth=s.overlap_depth,
                prefix_cache=s.prefix_cache,
                mixed=s.mixed_steps and (mixed or graphs is None),
            )
        )
        # On a CPU a step is done when its launch is, so there is nothing to wait for.
        hold = self.device.type == "cuda" and self.settings.switches.just_in_time
        sizes = graphs.sizes if graphs is not None else SIZES
        timer = LaunchTimer(sizes, int(1e6 * s.launch_lead_ms), hold, self.clock)
        core = StageCore(name, scheduler, runner, self.waiter(name), timer, self.recorder)
        record_stage(self.recorder, core)
        return core

    def vocoder(self, name: str, model: VocoderModel) -> VocoderCore:
        """The core of a stage that makes samples of frames: a slot for each stream, captured
        steps."""
        s = self.settings
        config = CodecConfig(
            slots=s.max_rows, max_waiting=s.max_waiting, overlap_depth=s.overlap_depth
        )
        captured = config.captured() if self.graphs else config
        codec = VocoderCore(model, captured, self.waiter(name), recorder=self.recorder, name=name)
        record_codec(self.recorder, codec)
        if self.graphs:
            self.progress(name, "capturing graphs")
            codec.capture()
            torch.cuda.empty_cache()  # what the library tried out its convolutions in
        return codec


BuildStages = Callable[[Sequence[str], StageContext], dict[str, Stage]]
"""A family's function that makes these stages, in their order."""


def check_built(stages: Mapping[str, Stage], c: Configure) -> None:
    """Refuse stages that are not those that were asked for, or whose links are not those that the
    pipeline declares: a request would wait for ever for what no stage makes or takes."""
    if list(stages) != list(c.stages):
        raise Bug(
            f"{c.build} made the stages {list(stages)}; the stages of this host are "
            f"{list(c.stages)}"
        )
    for name, stage in stages.items():
        into = {f"{a}>{b}" for a, b in c.links if b == name}
        out = {f"{a}>{b}" for a, b in c.links if a == name}
        for what, links, declared in (
            ("receives", stage.receives, into),
            ("sends", stage.sends, out),
        ):
            if set(links) != declared:
                raise Bug(
                    f"stage {name} {what} by {sorted(links)}; the pipeline's links are "
                    f"{sorted(declared)}"
                )
