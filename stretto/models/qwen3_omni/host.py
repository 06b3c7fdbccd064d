"""Builds Qwen3-Omni's stages in a host: weights, KV pools, captured graphs.

Called once by the host, on its main thread, before its loop runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from stretto.errors import Bug
from stretto.models.building import Building
from stretto.models.qwen3_omni.adapters.talker import TalkerAdapter
from stretto.models.qwen3_omni.adapters.thinker import ThinkerAdapter
from stretto.models.qwen3_omni.audio_graphs import WindowGraphs
from stretto.models.qwen3_omni.load import Source
from stretto.models.qwen3_omni.plan import plan, pool_sizes
from stretto.models.qwen3_omni.stages.talker import TalkerStage
from stretto.models.qwen3_omni.stages.thinker import ThinkerStage
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.qwen3_omni.vision_graphs import FrameGraphs
from stretto.models.qwen3_omni.warming import begin
from stretto.models.qwen3_omni.warmup import warm_up
from stretto.models.speech.vocoder_stage import VocoderStage
from stretto.stage.ar import StageCore
from stretto.stage.host.context import StageContext
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.stage.stage import Stage

PRIORITIES = {"thinker": 0, "talker": -1}
"""Of the stages' streams on a device they share: what is heard sooner goes first. (The vocoder's is
-2.)"""


def build(stages: Sequence[str], context: StageContext) -> dict[str, Stage]:
    return StageBuilder(stages, context).build()


@dataclass(slots=True, eq=False)
class StageBuilder(Building[Source]):
    """Of one host's stages."""

    _words: torch.Tensor | None = field(
        init=False, default=None
    )  # the thinker's embedding, which a talker borrows
    _thinker_core: StageCore | None = field(
        init=False, default=None
    )  # whose prefills go before the talker's decode

    def build(self) -> dict[str, Stage]:
        """The stages, if all of them fit.

        On a GPU, kernels that were never compiled on this machine are compiled by other processes
        meanwhile. These start when the plan is made, so that it does not take their memory for
        gone, and have ended before the first KV pool is allocated. The vocoder comes first: it has
        few such kernels, and takes as long as they do."""
        c, s = self.context, self.context.settings
        source = Source.open(
            c.model,
            c.device,
            c.dtype,
            s.load_format,
            progress=False,
            expert_weights=s.expert_weights,
        )
        order = sorted(self.stages, key=lambda name: name != "code2wav")
        self._plan(source, order, pool_sizes, plan, begin)
        stages = self._stages(source, order)
        c.warm_up = warm_up(source.config, c.device, source.dtype)
        return stages

    def _stage(self, name: str, source: Source) -> Stage:
        if name != "code2wav" and self.warming is not None and self.warming.apart:
            self.finish_warming(name)
        self.context.progress(name, self._room(name))
        match name:
            case "thinker":
                return self._thinker(source)
            case "talker":
                return self._talker(source)
            case "code2wav":
                return self._code2wav(source)
            case _:
                raise Bug(f"no stage is called {name!r}")

    def _thinker(self, source: Source) -> ThinkerStage:
        c, s = self.context, self.context.settings
        thinker = source.thinker()
        self._words = thinker.model.embed_tokens.weight.data
        self.finish_warming("thinker")
        cache = thinker.cache(self.blocks["thinker"] + 1, s.block_size)
        adapter = ThinkerAdapter(thinker, cache, s.max_rows, s.max_context)

        def capture(stream: torch.cuda.Stream) -> None:
            self._capture_prompts("thinker", adapter, stream)
            self.capture_encoders(thinker, stream)

        blocks, priority = self.blocks["thinker"], PRIORITIES["thinker"]
        core = c.autoregressive("thinker", adapter, blocks, priority=priority, capture=capture)
        if c.switches.prefill_priority:
            self._thinker_core = core
        return ThinkerStage(core, thinker, c)

    def _talker(self, source: Source) -> TalkerStage:
        c, s = self.context, self.context.settings
        talker = source.talker(self._words)
        self.finish_warming("talker")
        cache = talker.cache(self.blocks["talker"] + 1, s.block_size)
        adapter = TalkerAdapter(talker, cache, s.max_rows, s.max_context)

        core = c.autoregressive(
            "talker",
            adapter,
            self.blocks["talker"],
            priority=PRIORITIES["talker"],
            # A captured frame serves decoding rows alone; beside a prompt it would be launched
            # kernel by kernel.
            mixed=not adapter.fused,
            capture=lambda stream: self._capture_prompts("talker", adapter, stream),
        )
        return TalkerStage(core, talker, c, self._thinker_core)

    def _code2wav(self, source: Source) -> VocoderStage:
        c, model = self.context, source.code2wav()
        return VocoderStage(c.vocoder("code2wav", model))

    def _room(self, stage: str) -> str:
        s, blocks = self.context.settings, self.blocks.get(stage)
        room = f"{blocks * s.block_size} tokens" if blocks is not None else f"{s.max_rows} streams"
        narrow = (
            ", experts as float8" if stage == "thinker" and s.expert_weights == "float8" else ""
        )
        return f"loading{narrow}, with room for {room}"

    def capture_encoders(self, thinker: Thinker, stream: torch.cuda.Stream) -> None:
        windows = WindowGraphs(thinker.audio_tower)
        windows.capture(stream)
        thinker.audio_tower.graphs = windows
        with torch.cuda.stream(stream), torch.inference_mode():
            thinker.audio_tower.warm()
        if self.context.settings.vision_graphs:
            frames = FrameGraphs(thinker.visual)
            frames.capture(stream)
            thinker.visual.graphs = frames

    def _capture_prompts(
        self, name: str, adapter: ThinkerAdapter | TalkerAdapter, stream: torch.cuda.Stream
    ) -> None:
        """Passes over prompts. After the decode steps: their warm-ups must not find these."""
        accept = adapter.model.accept_layer if isinstance(adapter, ThinkerAdapter) else None
        prompts = PrefillGraphs.where_usable(
            adapter.model.model, adapter.cache, adapter.rows, accept
        )
        if prompts is not None:
            self.context.progress(name, "capturing prompts")
            prompts.capture(stream)
            adapter.prompts = prompts
