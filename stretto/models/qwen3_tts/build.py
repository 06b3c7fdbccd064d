"""How a host makes Qwen3-TTS's stages: what each takes of a device's memory, its weights, its
adapter, and the adapter of the processes that compile kernels ahead. See `models/building.py`."""

from __future__ import annotations

from dataclasses import replace

import torch

from stretto.models.building import FamilyBuild, HostBuilder, PlanInput, StageBuild, module_bytes
from stretto.models.compile_ahead import LAYERS, CompileAhead, CompileJob, StageModel, few
from stretto.models.qwen3_tts.config import TtsConfig
from stretto.models.qwen3_tts.enroller import Enroller, EnrollerStage
from stretto.models.qwen3_tts.load import Source
from stretto.models.qwen3_tts.stages import PrimedVocoderStage, TalkerStage
from stretto.models.qwen3_tts.talker import Talker, TalkerAdapter
from stretto.models.qwen3_tts.vocoder import CodecDecoder
from stretto.models.weights import build
from stretto.stage.host.context import StageContext
from stretto.stage.host.memory_plan import StagePlan
from stretto.stage.vocoder import CodecConfig

WORDS = 16
"""Of the text table where kernels are compiled ahead: none is specialised by their number."""


def open_source(c: StageContext) -> Source:
    return Source.open(c.model, c.device, c.dtype, c.settings.load_format, progress=False)


# -- the talker


def plan_talker(p: PlanInput) -> StagePlan:
    model, t = build(lambda: Talker(p.config), "meta", p.dtype), p.config.talker
    pool = model.cache(p.blocks["talker"] + 1, p.settings.block_size).data.nbytes
    itemsize = p.dtype.itemsize
    table = t.text_vocab * t.decoder.hidden_size * itemsize
    words = t.text_vocab * t.text_hidden * itemsize
    inputs = 0
    if t.predictor.hidden_size != t.decoder.hidden_size:
        # A narrower predictor's kernels have the tables once more, as its inputs: all but the last
        # code's.
        inputs = t.decoder.vocab_size + (t.num_code_groups - 2) * t.predictor.vocab_size
    # While the text table is made, it is there twice, in pieces and joined, and so is the embedding
    # that it is made of.
    weights = module_bytes(model) - words + table + inputs * t.predictor.hidden_size * itemsize
    return StagePlan(
        "talker", weights, pool, table + words, "--kv-blocks talker=N or --max-model-len"
    )


def build_talker(b: HostBuilder[Source], source: Source) -> TalkerStage:
    s, model = b.context.settings, source.talker()
    b.finish_compiling("talker")
    cache = model.cache(b.blocks["talker"] + 1, s.block_size)
    adapter = TalkerAdapter(model, cache, s.max_rows, s.max_context)
    # A captured frame serves decoding rows alone; beside a prompt it would be launched kernel by
    # kernel.
    mixed = not adapter.fused
    core = b.core("talker", adapter, priority=-1, mixed=mixed, prompts=adapter.prompts)
    return TalkerStage(core, model, b.context)


# -- code2wav


def plan_code2wav(p: PlanInput) -> StagePlan:
    c = p.config.vocoder
    model = build(lambda: CodecDecoder(c), "meta", p.dtype)
    state = model.state(p.settings.max_rows, max(CodecConfig().frame_sizes))
    assert model.quantizer is not None
    folded = module_bytes(model.quantizer)
    table = c.num_quantizers * c.codebook_size * c.table_size * p.dtype.itemsize
    memory = state.window.nbytes + state.tails.nbytes
    if p.config.kind == "base":
        rows = p.settings.max_rows
        each = state.window.nbytes // (1 + rows) + state.tails.nbytes // rows
        memory += CodecConfig().primers * each
    weights = module_bytes(model) - folded + table
    return StagePlan("code2wav", weights, memory, folded, flags_hint="--max-rows")


def build_code2wav(b: HostBuilder[Source], source: Source) -> PrimedVocoderStage:
    return PrimedVocoderStage(b.context.vocoder("code2wav", source.vocoder()))


# -- the enroller


def plan_enroller(p: PlanInput) -> StagePlan:
    model = build(lambda: Enroller(p.config), "meta", torch.float32)
    return StagePlan("enroller", module_bytes(model), 0)


def build_enroller(b: HostBuilder[Source], source: Source) -> EnrollerStage:
    return EnrollerStage(source.enroller(), b.context)


# -- kernels that are compiled ahead


def small(config: TtsConfig, layers: int = LAYERS) -> TtsConfig:
    """The same widths with few layers and words."""
    t = config.talker
    decoder, predictor = few(t.decoder, layers), few(t.predictor, layers)
    return replace(
        config, talker=replace(t, decoder=decoder, predictor=predictor, text_vocab=WORDS)
    )


def small_stage(job: CompileJob) -> StageModel:
    """Called by the processes that compile kernels."""
    config, dtype = small(TtsConfig.read(job.model), job.layers), getattr(torch, job.dtype)
    source = Source.of(config, job.model, job.device, dtype, "dummy", progress=False)
    talker = source.talker()
    cache = talker.cache(job.blocks, job.block_size)
    adapter = TalkerAdapter(talker, cache, job.max_rows, job.max_context)
    return StageModel(adapter, talker.model, adapter.prompts, adapter.scatter)


BUILD = FamilyBuild(
    open=open_source,
    config=TtsConfig.read,
    stages={
        "talker": StageBuild(plan=plan_talker, build=build_talker, cpu_blocks=1024),
        "enroller": StageBuild(plan=plan_enroller, build=build_enroller),
        "code2wav": StageBuild(plan=plan_code2wav, build=build_code2wav),
    },
    compile_ahead=CompileAhead(
        adapter=f"{__name__}:small_stage",
        decoders=lambda c: (c.talker.decoder, c.talker.predictor),
        stages=("talker",),
        # At the larger released size: two layers, tables and context.
        process_bytes=2 << 30,
        read=TtsConfig.read,
    ),
)
