"""Builds Qwen3-TTS's stages in a host: weights, the KV pool, captured graphs.

Called once by the host, on its main thread, before its loop runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stretto.errors import Bug
from stretto.models.building import Building
from stretto.models.qwen3_tts.adapter import TalkerAdapter
from stretto.models.qwen3_tts.enroller import EnrollerStage
from stretto.models.qwen3_tts.load import Source
from stretto.models.qwen3_tts.plan import plan, pool_sizes
from stretto.models.qwen3_tts.talker_stage import TalkerStage
from stretto.models.qwen3_tts.vocoder_stage import PrimedVocoderStage
from stretto.models.qwen3_tts.warming import begin
from stretto.models.qwen3_tts.warmup import warm_up
from stretto.stage.host.context import StageContext
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.stage.stage import Stage


def build(stages: Sequence[str], context: StageContext) -> dict[str, Stage]:
    return StageBuilder(stages, context).build()


@dataclass(slots=True, eq=False)
class StageBuilder(Building[Source]):
    """Of one host's stages."""

    def build(self) -> dict[str, Stage]:
        """The stages, if all of them fit.

        On a GPU, kernels that were never compiled on this machine are compiled by other processes
        meanwhile. These have ended before the KV pool is allocated. The talker, whose kernels they
        are, comes last."""
        c, s = self.context, self.context.settings
        source = Source.open(c.model, c.device, c.dtype, s.load_format, progress=False)
        order = sorted(self.stages, key=lambda name: name == "talker")
        self._plan(source, order, pool_sizes, plan, begin)
        stages = self._stages(source, order)
        c.warm_up = warm_up(source.config, c.device)
        return stages

    def _stage(self, name: str, source: Source) -> Stage:
        if self.warming is not None and self.warming.apart:
            self.finish_warming(name)
        self.context.progress(name, self._room(name))
        match name:
            case "talker":
                return self._talker(source)
            case "code2wav":
                return self._vocoder(source)
            case "enroller":
                return self._enroller(source)
            case _:
                raise Bug(f"no stage is called {name!r}")

    def _talker(self, source: Source) -> TalkerStage:
        c, s, model = self.context, self.context.settings, source.talker()
        self.finish_warming("talker")
        blocks = self.blocks["talker"]
        adapter = TalkerAdapter(
            model, model.cache(blocks + 1, s.block_size), s.max_rows, s.max_context
        )

        def capture(stream: torch.cuda.Stream) -> None:
            prompts = PrefillGraphs.where_usable(model.model, adapter.cache, adapter.rows, None)
            if prompts is not None:
                c.progress("talker", "capturing prompts")
                prompts.capture(stream)
                adapter.prompts = prompts

        # A captured frame serves decoding rows alone; beside a prompt it would be launched kernel
        # by kernel.
        core = c.autoregressive(
            "talker", adapter, blocks, priority=-1, mixed=not adapter.fused, capture=capture
        )
        return TalkerStage(core, model, c)

    def _vocoder(self, source: Source) -> PrimedVocoderStage:
        c, model = self.context, source.vocoder()
        return PrimedVocoderStage(c.vocoder("code2wav", model))

    def _enroller(self, source: Source) -> EnrollerStage:
        return EnrollerStage(source.enroller(), self.context)

    def _room(self, stage: str) -> str:
        s = self.context.settings
        rooms = {
            "talker": f"{self.blocks.get('talker', 0) * s.block_size} tokens",
            "code2wav": f"{s.max_rows} streams",
        }
        return f"loading, with room for {rooms[stage]}" if stage in rooms else "loading"
