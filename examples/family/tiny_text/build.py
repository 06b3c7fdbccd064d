"""How a host makes the stage: what it takes of memory, its model, its adapter."""

from __future__ import annotations

from pathlib import Path

from stretto.models.building import FamilyBuild, HostBuilder, PlanInput, StageBuild, module_bytes
from stretto.models.weights import build
from stretto.stage.host.context import StageContext
from stretto.stage.host.memory_plan import StagePlan
from tiny_text.adapter import TinyTextAdapter
from tiny_text.config import TinyTextConfig
from tiny_text.load import Source
from tiny_text.model import TinyTextModel
from tiny_text.stage import WriterStage


def open_source(c: StageContext) -> Source:
    config = TinyTextConfig.read(Path(c.model))
    return Source.of(config, c.model, c.device, c.dtype, c.settings.load_format, progress=False)


def plan_writer(p: PlanInput) -> StagePlan:
    model = build(lambda: TinyTextModel(p.config), "meta", p.dtype)
    pool = model.cache(p.blocks["writer"] + 1, p.settings.block_size).data.nbytes
    return StagePlan("writer", module_bytes(model), pool, flags_hint="--kv-blocks writer=N")


def build_writer(b: HostBuilder[Source], source: Source) -> WriterStage:
    s, model = b.context.settings, source.model()
    cache = model.cache(b.blocks["writer"] + 1, s.block_size)  # block 0 is for padding
    adapter = TinyTextAdapter(model, cache, s.max_rows, s.max_context)
    return WriterStage(b.core("writer", adapter), model.config.end)


BUILD = FamilyBuild(
    open=open_source,
    stages={"writer": StageBuild(plan=plan_writer, build=build_writer, cpu_blocks=256)},
)
