"""Building a host's stages, for all families alike: sizes of the KV pools, the memory plan, kernels
that are compiled ahead, weights, captured graphs. A family says what its stages take and how each
is made (`FamilyBuild`).

Called once by the host, on its main thread, before its loop runs. On a GPU, kernels that were never
compiled on this machine are compiled by other processes meanwhile: these start when the plan is
made, so that it does not take their memory for gone, and have ended before the first KV pool is
allocated. Stages without a KV pool come first: they have few such kernels, and take as long as the
processes do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from stretto.config.engine import HostSettings
from stretto.errors import Bug
from stretto.kernels import triton as fast
from stretto.models.compile_ahead import CompileAhead, CompileProcesses, Room, start
from stretto.models.source import WeightSource
from stretto.stage.ar import StageCore
from stretto.stage.host.context import StageContext
from stretto.stage.host.memory_plan import StagePlan, room_for_pools, share_out
from stretto.stage.runner.adapter import ModelAdapter
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.stage.stage import Stage

log = logging.getLogger(__name__)


S = TypeVar("S", bound=WeightSource[Any])  # a family's


@dataclass(frozen=True, slots=True)
class PlanInput:
    """What a stage's plan depends on."""

    config: Any  # the family's
    settings: HostSettings
    blocks: Mapping[str, int]  # of the KV pools, by stage
    dtype: torch.dtype
    stages: Sequence[str]  # that are planned together


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBuild(Generic[S]):
    """How one stage is made."""

    plan: Callable[[PlanInput], StagePlan]
    build: Callable[[HostBuilder[S], S], Stage]
    # Blocks of its KV pool on a CPU, where memory is not there to be filled. 0: it has no pool.
    cpu_blocks: int = 0
    # How its weights are loaded, where that is not as they lie on disk; for progress messages.
    variant: Callable[[HostSettings], str] = lambda settings: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyBuild(Generic[S]):
    """How the stages of a family are made. `PipelineSpec.build` names one, and a host calls it."""

    open: Callable[[StageContext], S]
    stages: Mapping[str, StageBuild[S]]
    compile_ahead: CompileAhead | None = None
    # of a checkpoint's directory, as a GPU keeps its weights; None: nobody asks for a plan ahead
    config: Callable[[Path], Any] | None = None

    def __call__(self, stages: Sequence[str], context: StageContext) -> dict[str, Stage]:
        return HostBuilder(self, stages, context).build()

    def plan(
        self,
        config: Any,
        stages: Sequence[str],
        s: HostSettings,
        blocks: Mapping[str, int],
        dtype: torch.dtype,
    ) -> list[StagePlan]:
        if unknown := set(stages) - set(self.stages):
            raise Bug(f"no stage is called {', '.join(sorted(unknown))}")
        plan_input = PlanInput(config, s, blocks, dtype, stages)
        return [self.stages[stage].plan(plan_input) for stage in stages]

    def pool_sizes(
        self,
        config: Any,
        stages: Sequence[str],
        s: HostSettings,
        dtype: torch.dtype,
        device: torch.device,
        later_hosts: Sequence[Sequence[str]] = (),
    ) -> dict[str, int]:
        """Blocks of each stage's pool. Hosts that will load on the same card after this one
        (`later_hosts`, the stages of each) find as many blocks as these stages do."""
        if device.type != "cuda":
            return {**self.cpu_blocks, **s.blocks}
        all_stages = [*stages, *(stage for host in later_hosts for stage in host)]
        room = room_for_pools(device, 1 + len(later_hosts), s.memory_share)
        return self.share_room(config, all_stages, s, dtype, room)

    def share_room(
        self, config: Any, stages: Sequence[str], s: HostSettings, dtype: torch.dtype, room: int
    ) -> dict[str, int]:
        """The same where pools of open size share so many bytes with all the rest. A request takes
        about as many rows in each stage, so all pools have as many blocks."""
        pools = self.cpu_blocks
        open_pools = [stage for stage in stages if stage in pools and stage not in s.blocks]
        blocks = share_out(
            lambda open_: self.plan(config, stages, s, {**s.blocks, **open_}, dtype),
            open_pools,
            s,
            room,
        )
        return {**dict.fromkeys(pools, blocks), **s.blocks}

    @property
    def cpu_blocks(self) -> dict[str, int]:
        """Of the stages with a KV pool."""
        return {name: b.cpu_blocks for name, b in self.stages.items() if b.cpu_blocks}


@dataclass(slots=True, eq=False)
class HostBuilder(Generic[S]):
    """Makes the stages of one host."""

    family: FamilyBuild[S]
    stages: Sequence[str]  # in data-flow order
    context: StageContext
    blocks: dict[str, int] = field(init=False, default_factory=dict)  # of the KV pools
    built: dict[str, Stage] = field(init=False, default_factory=dict)
    compiling: CompileProcesses | None = field(init=False, default=None)
    _state: dict[str, int] = field(init=False, default_factory=dict)  # bytes, as planned

    def build(self) -> dict[str, Stage]:
        """The stages, if all of them fit."""
        source = self.family.open(self.context)
        order = sorted(self.stages, key=lambda name: name in self.family.cpu_blocks)
        self.plan(source, order)
        try:
            for name in order:
                self.built[name] = self._stage(name, source)
        finally:
            if self.compiling is not None:
                self.compiling.close()
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()
        return {name: self.built[name] for name in self.stages}

    def plan(self, source: S, order: Sequence[str]) -> None:
        """Size the pools, refuse what does not fit, and begin to compile kernels."""
        c, s, family = self.context, self.context.settings, self.family
        if c.device.type == "cuda" and not fast.apply(source.dtype, c.device):
            name = torch.cuda.get_device_name(c.device)
            needed = "an Ampere GPU or a newer one, Triton and bfloat16"
            log.warning(
                "%s: several times slower without fused kernels, which need %s", name, needed
            )
        config, dtype = source.config, source.dtype
        self.blocks = family.pool_sizes(config, order, s, dtype, c.device, c.loading_later)
        plans = family.plan(config, order, s, self.blocks, dtype)
        self._state = {p.stage: p.state for p in plans}
        free = c.fit(plans)
        if c.device.type == "cuda" and family.compile_ahead is not None:
            pools = family.cpu_blocks
            weights = sum(
                p.weights + p.transient_bytes + (0 if p.stage in pools else p.state) for p in plans
            )
            room = Room(free, weights)
            self.compiling = start(
                family.compile_ahead, c.model, config, order, s, self.blocks, dtype, room
            )

    def _stage(self, name: str, source: S) -> Stage:
        has_pool = name in self.family.cpu_blocks
        if has_pool and self.compiling is not None and self.compiling.apart:
            self.finish_compiling(name)
        self.context.progress(name, self._loading(name))
        return self.family.stages[name].build(self, source)

    def _loading(self, name: str) -> str:
        s, blocks = self.context.settings, self.blocks.get(name)
        loading = f"loading{self.family.stages[name].variant(s)}"
        if blocks is not None:
            return f"{loading}, with room for {blocks * s.block_size} tokens"
        return f"{loading}, with room for {s.max_rows} streams" if self._state[name] else loading

    def core(
        self,
        name: str,
        adapter: ModelAdapter[Any],
        *,
        priority: int = 0,
        mixed: bool = True,
        prompts: PrefillGraphs | None = None,
    ) -> StageCore:
        """The core of a stage that writes token by token. `prompts`: passes over prompts, captured
        after the decode steps, whose warm-ups must not find them."""
        core = self.context.autoregressive(
            name, adapter, self.blocks[name], priority=priority, mixed=mixed
        )
        if prompts is not None and self.context.graphs:
            assert core.stream is not None
            self.context.progress(name, "capturing prompts")
            prompts.capture(core.stream)
        return core

    def finish_compiling(self, stage: str) -> None:
        """Wait until kernels are compiled, and the memory of those who did it is back. A stage
        calls it before it allocates a KV pool."""
        if self.compiling is not None:
            if self.compiling.running:
                self.context.progress(stage, "compiling kernels")
            self.compiling.finish()
            self.compiling = None


def module_bytes(module: nn.Module) -> int:
    """Of a module that may lie on the meta device, where tensors have shapes and no memory: so a
    plan cannot drift away from the code that it speaks of."""
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
