"""How a host makes Qwen3-Omni's stages: what each takes of a device's memory, its weights, its
adapter, and the adapters of the processes that compile kernels ahead. See `models/building.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from stretto.models.building import FamilyBuild, HostBuilder, PlanInput, StageBuild, module_bytes
from stretto.models.checkpoint import CheckpointFiles, has_weights
from stretto.models.compile_ahead import LAYERS, CompileAhead, CompileJob, StageModel, few
from stretto.models.quantised.placing import quantised_in
from stretto.models.qwen3_omni.audio_graphs import WindowGraphs
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Source, quantised_formats
from stretto.models.qwen3_omni.stages.encoders import Encoders
from stretto.models.qwen3_omni.stages.talker import TalkerStage
from stretto.models.qwen3_omni.stages.thinker import ThinkerStage
from stretto.models.qwen3_omni.talker import Talker, TalkerAdapter
from stretto.models.qwen3_omni.thinker import Thinker, ThinkerAdapter
from stretto.models.qwen3_omni.vision_graphs import FrameGraphs
from stretto.models.speech.vocoder_stage import VocoderStage
from stretto.models.weights import build
from stretto.stage.host.context import StageContext
from stretto.stage.host.memory_plan import StagePlan
from stretto.stage.vocoder import CodecConfig

PRIORITIES = {"thinker": 0, "talker": -1}
"""Priorities of the stages' CUDA streams on a device that they share: a later stage goes first.
(The vocoder's is -2.)"""
POOL_HINT = "--kv-blocks {}=N or --max-model-len"


def open_source(c: StageContext) -> Source:
    s = c.settings
    return Source.open(
        c.model,
        c.device,
        c.dtype,
        s.load_format,
        progress=False,
        expert_weights=s.expert_weights,
    )


def stored_config(directory: Path) -> OmniConfig:
    """With those parts packed that a GPU keeps packed."""
    config = OmniConfig.read(directory)
    if not has_weights(directory):
        return config
    return config.with_formats(
        quantised_formats(quantised_in(directory, CheckpointFiles.open(directory)), config)
    )


# -- the thinker


def plan_thinker(p: PlanInput) -> StagePlan:
    model = build(lambda: Thinker(p.config), "meta", p.dtype)
    weights = module_bytes(model)
    pool = model.cache(p.blocks["thinker"] + 1, p.settings.block_size).data.nbytes
    hint = POOL_HINT.format("thinker")
    moe = p.config.thinker.text.moe
    if moe is not None and moe.format is not None:
        return StagePlan("thinker", weights, pool, flags_hint=hint)

    def saved_bytes() -> int:
        narrow = build(lambda: Thinker(p.config.with_float8_experts()), "meta", p.dtype)
        return weights - module_bytes(narrow)

    return StagePlan(
        "thinker",
        weights,
        pool,
        flags_hint=hint,
        alternative="load experts as float8 (--expert-weights float8)",
        saved_bytes=saved_bytes,
    )


def build_thinker(b: HostBuilder[Source], source: Source) -> ThinkerStage:
    s, thinker = b.context.settings, source.thinker()
    b.finish_compiling("thinker")
    cache = thinker.cache(b.blocks["thinker"] + 1, s.block_size)
    adapter = ThinkerAdapter(thinker, cache, s.max_rows, s.max_context)
    core = b.core(
        "thinker",
        adapter,
        priority=PRIORITIES["thinker"],
        prompts=adapter.prompts,
    )
    windows: WindowGraphs | None = None
    frames: FrameGraphs | None = None
    if b.context.graphs:
        assert core.stream is not None
        windows, frames = capture_encoders(thinker, core.stream, images=s.vision_graphs)
    encoders = Encoders(thinker, core, b.context, windows, frames)
    return ThinkerStage(core, thinker, encoders, b.context)


def capture_encoders(
    thinker: Thinker, stream: torch.cuda.Stream, images: bool
) -> tuple[WindowGraphs, FrameGraphs | None]:
    """Passes over windows of sound and, if `images`, over single frames."""
    windows = WindowGraphs(thinker.audio_tower)
    windows.capture(stream)
    with torch.cuda.stream(stream), torch.inference_mode():
        thinker.audio_tower.warm()
    if not images:
        return windows, None
    frames = FrameGraphs(thinker.visual)
    frames.capture(stream)
    return windows, frames


# -- the talker


def plan_talker(p: PlanInput) -> StagePlan:
    model = build(lambda: Talker(p.config), "meta", p.dtype)
    pool = model.cache(p.blocks["talker"] + 1, p.settings.block_size).data.nbytes
    text, itemsize = p.config.thinker.text, p.dtype.itemsize
    table = text.vocab_size * p.config.talker.text.hidden_size * itemsize
    # Both the table and its pieces are there while they are joined; alone, so is the thinker's word
    # embedding.
    alone = "thinker" not in p.stages
    words = text.vocab_size * text.hidden_size * itemsize if alone else 0
    weights = module_bytes(model) + table
    return StagePlan("talker", weights, pool, table + words, POOL_HINT.format("talker"))


def build_talker(b: HostBuilder[Source], source: Source) -> TalkerStage:
    """In a host with the thinker it borrows its word embedding, and lets its prefills go before
    its own decode steps."""
    c, s, thinker = b.context, b.context.settings, b.built.get("thinker")
    words = prefill = None
    if isinstance(thinker, ThinkerStage):
        words = thinker.model.model.embed_tokens.weight.data
        prefill = thinker.core if s.switches.prefill_priority else None
    talker = source.talker(words)
    b.finish_compiling("talker")
    cache = talker.cache(b.blocks["talker"] + 1, s.block_size)
    adapter = TalkerAdapter(talker, cache, s.max_rows, s.max_context)
    core = b.core(
        "talker",
        adapter,
        priority=PRIORITIES["talker"],
        # A captured frame serves decoding rows alone; beside a prompt it would be launched kernel
        # by kernel.
        mixed=not adapter.fused,
        prompts=adapter.prompts,
    )
    return TalkerStage(core, talker, c, prefill)


# -- code2wav


def plan_code2wav(p: PlanInput) -> StagePlan:
    model = build(lambda: Code2Wav(p.config.code2wav), "meta", p.dtype)
    state = model.state(p.settings.max_rows, max(CodecConfig().frame_sizes))
    memory = state.window.nbytes + state.tails.nbytes
    return StagePlan("code2wav", module_bytes(model), memory, flags_hint="--max-rows")


def build_code2wav(b: HostBuilder[Source], source: Source) -> VocoderStage:
    return VocoderStage(b.context.vocoder("code2wav", source.code2wav()))


# -- kernels that are compiled ahead


def small(config: OmniConfig, layers: int = LAYERS) -> OmniConfig:
    """The same widths with few layers."""
    th, ta = config.thinker, config.talker
    thinker = replace(
        th,
        text=few(th.text, layers),
        audio=replace(th.audio, num_layers=1),
        vision=replace(th.vision, num_layers=1, deepstack_layers=()),
    )
    talker = replace(ta, text=few(ta.text, layers), predictor=few(ta.predictor, layers))
    return replace(config, thinker=thinker, talker=talker)


def small_stage(job: CompileJob) -> StageModel:
    """Called by the processes that compile kernels."""
    config = small(OmniConfig.read(job.model), job.layers).with_formats(job.formats)
    dtype = getattr(torch, job.dtype)
    source = Source.open(
        config, job.device, dtype, "dummy", progress=False, expert_weights=job.expert_weights
    )
    if job.tasks[0].stage == "thinker":
        thinker = source.thinker()
        cache = thinker.cache(job.blocks, job.block_size)
        writer = ThinkerAdapter(thinker, cache, job.max_rows, job.max_context)
        return StageModel(writer, thinker.model, writer.prompts, writer.scatter)
    words = torch.zeros(1, config.thinker.text.hidden_size, device=job.device, dtype=source.dtype)
    talker = source.talker(words)
    cache = talker.cache(job.blocks, job.block_size)
    speaker = TalkerAdapter(talker, cache, job.max_rows, job.max_context)
    return StageModel(speaker, talker.model, speaker.prompts, speaker.scatter)


def read_config(model: str) -> OmniConfig:
    """Of a checkpoint, by its headers."""
    return Source.open(model, "cpu", torch.bfloat16, progress=False, packed=True).config


BUILD = FamilyBuild(
    open=open_source,
    config=stored_config,
    stages={
        "thinker": StageBuild(
            plan=plan_thinker,
            build=build_thinker,
            cpu_blocks=512,
            variant=lambda s: ", experts as float8" if s.expert_weights == "float8" else "",
        ),
        "talker": StageBuild(plan=plan_talker, build=build_talker, cpu_blocks=1024),
        "code2wav": StageBuild(plan=plan_code2wav, build=build_code2wav),
    },
    compile_ahead=CompileAhead(
        adapter=f"{__name__}:small_stage",
        decoders=lambda c: (c.thinker.text, c.talker.text, c.talker.predictor),
        stages=("thinker", "talker"),
        formats=lambda c: c.formats,
        # At the released size: two layers, embedding and head, context.
        process_bytes=6 << 30,
        read=read_config,
        hosts=3,
        num_stages=3,
        costs={"thinker": {"decode": (10, 2), "prompts": (6, 1), "picks": (2, 1)}},
    ),
)
