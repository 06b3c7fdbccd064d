"""Builds the stages of a host: weights, KV pools, captured graphs, and the node around each.

Called by the host once, on its main thread, before its loop runs. Says how far it is, since it takes a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stretto.connector.switches import OverlapSwitches
from stretto.errors import Bug
from stretto.models.qwen3_omni.audio_graphs import WindowGraphs
from stretto.models.qwen3_omni.load import Source
from stretto.models.qwen3_omni.vision_graphs import FrameGraphs
from stretto.orchestrator.messages import Loading
from stretto.orchestrator.settings import HostSettings
from stretto.stage.ahead import Ahead
from stretto.stage.codec import CodecConfig, CodecStage
from stretto.stage.loop import Loop
from stretto.stage.nodes.code2wav import Code2WavNode
from stretto.stage.nodes.node import Node
from stretto.stage.nodes.report import Report
from stretto.stage.nodes.talker import TalkerNode
from stretto.stage.nodes.thinker import ThinkerNode
from stretto.stage.plan import RESERVE, check, free_memory, plan, sized
from stretto.stage.runner.graphs import SIZES, DecodeGraphs
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.stage.runner.runner import Runner
from stretto.stage.runner.talker import TalkerLane
from stretto.stage.runner.thinker import ThinkerLane
from stretto.stage.runner.waiter import Waiter
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.scheduler import Scheduler
from stretto.stage.stage import PayloadStore, Stage
from stretto.stage.warming import Warming, begin

PRIORITIES = {"thinker": 0, "talker": -1}
"""Of the stages' streams on a device they share: what is heard sooner goes first. (The vocoder's is -2.)"""


@dataclass(slots=True, eq=False)
class Builder:
    """Of one host's stages. `settings`, `memory` and `waiters` are complete when `build` returns."""

    model: str
    stages: Sequence[str]  # in the order of the data's way
    settings: HostSettings  # sizes that are not stated come with the plan
    device: torch.device
    switches: OverlapSwitches
    loop: Loop  # that the stages will have their turns in
    report: Report
    push: Callable[[], None]
    memory: dict[str, int] = field(init=False, default_factory=dict)  # bytes by stage
    waiters: list[Waiter] = field(init=False, default_factory=list)
    warming: Warming | None = field(init=False, default=None)  # while kernels are being compiled
    _words: torch.Tensor | None = field(init=False, default=None)  # the thinker's embedding, which a talker borrows

    def build(self) -> dict[str, Node]:
        """The stages' nodes, if all of them fit.

        On a GPU, kernels that were never compiled on this machine are compiled by other processes meanwhile. These
        start when the plan is made, so that it does not take their memory for gone, and have ended before the first KV
        pool is allocated. The vocoder comes first: it has few such kernels, and takes as long as they do."""
        s = self.settings
        source = Source.open(
            self.model,
            self.device,
            getattr(torch, s.dtype) if s.dtype else None,
            s.load_format,
            progress=False,
            expert_weights=s.expert_weights,
        )
        order = sorted(self.stages, key=lambda name: name != "code2wav")
        self._plan(source, order)
        try:
            nodes = {name: self._node(name, source) for name in order}
        finally:
            if self.warming is not None:
                self.warming.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return {name: nodes[name] for name in self.stages}

    def _plan(self, source: Source, order: Sequence[str]) -> None:
        """Size the pools, refuse what does not fit, and begin to compile kernels."""
        self.settings = s = sized(source.config, order, self.settings, source.dtype, self.device)
        plans = plan(source.config, order, s, source.dtype)
        free, reserve = free_memory(self.device), RESERVE[self.device.type]
        check(plans, free, reserve, str(self.device))
        self.memory = {p.stage: p.kept for p in plans}
        if self.device.type == "cuda":
            weights = sum(p.weights + p.passing + (p.state if p.stage == "code2wav" else 0) for p in plans)
            self.warming = begin(self.model, source.config, order, s, source.dtype, free - reserve, weights)

    def _node(self, name: str, source: Source) -> Node:
        if name != "code2wav" and self.warming is not None and self.warming.apart:
            self.finish_warming(name)
        self._progress(name, self._room(name))
        waiter = self._waiter(name)
        match name:
            case "thinker":
                return self._thinker(source, waiter)
            case "talker":
                return self._talker(source, waiter)
            case "code2wav":
                return Code2WavNode(self._vocoder(source, waiter), self.report)
            case _:
                raise Bug(f"no stage is called {name!r}")

    def _thinker(self, source: Source, waiter: Waiter | None) -> ThinkerNode:
        s = self.settings
        assert s.thinker_blocks is not None
        thinker = source.thinker()
        self._words = thinker.model.embed_tokens.weight.data
        self.finish_warming("thinker")
        cache = thinker.cache(s.thinker_blocks + 1, s.block_size)
        lane = ThinkerLane(thinker, cache, s.max_rows, s.max_context)
        return ThinkerNode(self._stage("thinker", lane, s.thinker_blocks, waiter), thinker, self.report)

    def _talker(self, source: Source, waiter: Waiter | None) -> TalkerNode:
        s = self.settings
        assert s.talker_blocks is not None
        talker = source.talker(self._words)
        self.finish_warming("talker")
        cache = talker.cache(s.talker_blocks + 1, s.block_size)
        lane = TalkerLane(talker, cache, s.max_rows, s.max_context)
        return TalkerNode(self._stage("talker", lane, s.talker_blocks, waiter), talker, self.report)

    def _vocoder(self, source: Source, waiter: Waiter | None) -> CodecStage:
        s = self.settings
        config = CodecConfig(slots=s.max_rows, max_waiting=s.max_waiting, overlap_depth=s.overlap_depth)
        graphs = self.device.type == "cuda" and s.graphs
        codec = CodecStage(source.code2wav(), _nobody, config.captured() if graphs else config, waiter)
        if graphs:
            self._progress("code2wav", "capturing graphs")
            codec.capture()
            torch.cuda.empty_cache()  # what the library tried out its convolutions in
        return codec

    def finish_warming(self, stage: str) -> None:
        """Wait until kernels are compiled, and the memory of those who did it is back."""
        if self.warming is not None:
            if self.warming.running:
                self._progress(stage, "compiling kernels")
            self.warming.finish()
            self.warming = None

    def _room(self, stage: str) -> str:
        s = self.settings
        blocks = {"thinker": s.thinker_blocks, "talker": s.talker_blocks}.get(stage)
        room = f"{blocks * s.block_size} tokens" if blocks is not None else f"{s.max_rows} streams"
        narrow = ", experts as float8" if stage == "thinker" and s.expert_weights == "float8" else ""
        return f"loading{narrow}, with room for {room}"

    def _progress(self, stage: str, what: str) -> None:
        self.report(Loading(stage, what), b"")
        self.push()

    def _waiter(self, name: str) -> Waiter | None:
        if self.device.type != "cuda":
            return None
        waiter = Waiter(self.loop.bell.ring, name)
        self.waiters.append(waiter)
        return waiter

    def _stage(self, name: str, lane: ThinkerLane | TalkerLane, blocks: int, waiter: Waiter | None) -> Stage:
        s = self.settings
        graphs = None
        if self.device.type == "cuda" and s.graphs:
            graphs = DecodeGraphs(lane, [n for n in SIZES if n <= s.max_rows])
        runner = Runner(lane, graphs, PRIORITIES[name])
        if graphs is not None and runner.stream is not None:
            self._progress(name, "capturing graphs")
            graphs.capture(runner.stream)
            self._capture_prompts(name, lane, runner.stream)
        store = PayloadStore()
        scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=blocks,
                block_size=s.block_size,
                max_rows=s.max_rows,
                max_waiting=s.max_waiting,
                max_context=s.max_context,
                max_step_tokens=s.max_step_tokens,
                prefill_chunk=s.prefill_chunk,
                lone_prefill_chunk=s.lone_prefill_chunk,
                overlap_depth=s.overlap_depth,
                prefix_cache=s.prefix_cache,
                # A captured frame serves decoding rows alone; beside a prompt it would be launched kernel by kernel.
                mixed=s.mixed_steps and not (name == "talker" and graphs is not None and lane.fused),
            ),
            store.drop,
        )
        # On a CPU a step is done when its launch is, so there is nothing to wait for.
        hold = self.device.type == "cuda" and self.switches.just_in_time
        sizes = graphs.sizes if graphs is not None else SIZES
        ahead = Ahead(sizes, int(1e6 * s.launch_lead_ms), hold, self.loop.clock)
        return Stage(name, scheduler, runner, _nobody, store, waiter, ahead)

    def _capture_prompts(self, name: str, lane: ThinkerLane | TalkerLane, stream: torch.cuda.Stream) -> None:
        """Passes over prompts, and the encoders'. After the decode steps: their warm-ups must not find these."""
        accept = lane.model.accept_layer if isinstance(lane, ThinkerLane) else None
        prompts = PrefillGraphs.where_usable(lane.model.model, lane.cache, lane.rows, accept)
        if prompts is not None:
            self._progress(name, "capturing prompts")
            prompts.capture(stream)
            lane.prompts = prompts
        if isinstance(lane, ThinkerLane):
            windows = WindowGraphs(lane.model.audio_tower)
            windows.capture(stream)
            lane.model.audio_tower.graphs = windows
            if self.settings.vision_graphs:
                frames = FrameGraphs(lane.model.visual)
                frames.capture(stream)
                lane.model.visual.graphs = frames


def _nobody(output: Any) -> None:
    raise Bug("a stage without a node")
