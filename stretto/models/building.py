"""Building a host's stages, as far as all families do it alike: sizes and kernels first, then stage
after stage.

Called once by the host, on its main thread, before its loop runs."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from stretto.kernels import triton as fast
from stretto.models.warming import Warming
from stretto.stage.host.context import StageContext
from stretto.stage.stage import Stage

log = logging.getLogger(__name__)

S = TypeVar("S")  # where a family's weights come from


@dataclass(slots=True, eq=False)
class Building(Generic[S]):
    """Of one host's stages."""

    stages: Sequence[str]  # in data-flow order
    context: StageContext
    blocks: dict[str, int] = field(init=False, default_factory=dict)  # of the KV pools
    warming: Warming | None = field(init=False, default=None)  # while kernels are being compiled

    @abstractmethod
    def _stage(self, name: str, source: S) -> Stage: ...

    def _plan(
        self, source: Any, order: Sequence[str], pool_sizes: Callable[..., dict[str, int]],
        plan: Callable[..., Any], begin: Callable[..., Warming | None],
    ) -> None:  # fmt: skip
        """Size the pools, refuse what does not fit, and begin to compile kernels, as the family has
        these."""
        c, s = self.context, self.context.settings
        if c.device.type == "cuda" and not fast.apply(source.dtype, c.device):
            name = torch.cuda.get_device_name(c.device)
            needed = "an Ampere GPU or a newer one, Triton and bfloat16"
            log.warning(
                "%s: several times slower without fused kernels, which need %s", name, needed
            )
        self.blocks = pool_sizes(source.config, order, s, source.dtype, c.device, c.beside)
        plans = plan(source.config, order, s, self.blocks, source.dtype)
        free = c.fit(plans)
        if c.device.type == "cuda":
            weights = sum(
                p.weights + p.transient_bytes + (p.state if p.stage == "code2wav" else 0)
                for p in plans
            )
            self.warming = begin(
                c.model, source.config, order, s, self.blocks, source.dtype, free, weights
            )

    def _stages(self, source: S, order: Sequence[str]) -> dict[str, Stage]:
        """Of all stages, built in this order."""
        try:
            stages = {name: self._stage(name, source) for name in order}
        finally:
            if self.warming is not None:
                self.warming.close()
        if self.context.device.type == "cuda":
            torch.cuda.synchronize()
        return {name: stages[name] for name in self.stages}

    def finish_warming(self, stage: str) -> None:
        """Wait until kernels are compiled, and the memory of those who did it is back."""
        if self.warming is not None:
            if self.warming.running:
                self.context.progress(stage, "compiling kernels")
            self.warming.finish()
            self.warming = None
