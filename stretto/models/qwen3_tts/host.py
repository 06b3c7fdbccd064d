"""Builds Qwen3-TTS's stages in a host: weights, the KV pool, captured graphs, and the node around each.

Called once by the host, on its main thread, before its loop runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.errors import Bug
from stretto.models.qwen3_tts.enroller import EnrollerNode
from stretto.models.qwen3_tts.lane import TalkerLane
from stretto.models.qwen3_tts.load import Source
from stretto.models.qwen3_tts.plan import plan, pool_sizes
from stretto.models.qwen3_tts.talker_node import TalkerNode
from stretto.models.qwen3_tts.vocoder_node import CodecNode
from stretto.stage.context import StageContext
from stretto.stage.node import Node
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.stage.stage import Emit, Stage


def build(stages: Sequence[str], c: StageContext) -> dict[str, Node]:
    s = c.settings
    source = Source.open(c.model, c.device, c.dtype, s.load_format, progress=False)
    blocks = pool_sizes(source.config, stages, s, source.dtype, c.device, c.beside)
    c.fit(plan(source.config, stages, s, blocks, source.dtype))
    nodes: dict[str, Node] = {}
    for name in stages:
        room = f"{blocks[name] * s.block_size} tokens" if name in blocks else f"{s.max_rows} streams"
        c.progress(name, f"loading, with room for {room}" if name != "enroller" else "loading")
        nodes[name] = _node(name, source, blocks, c)
    if c.device.type == "cuda":
        torch.cuda.synchronize()
    return nodes


def _node(name: str, source: Source, blocks: dict[str, int], c: StageContext) -> Node:
    match name:
        case "talker":
            return _talker(source, blocks["talker"], c)
        case "code2wav":
            return _vocoder(source, c)
        case "enroller":
            return EnrollerNode(source.enroller(), c)
        case _:
            raise Bug(f"no stage is called {name!r}")


def _talker(source: Source, blocks: int, c: StageContext) -> TalkerNode:
    s, model = c.settings, source.talker()
    lane = TalkerLane(model, model.cache(blocks + 1, s.block_size), s.max_rows, s.max_context)

    def capture(stream: torch.cuda.Stream) -> None:
        prompts = PrefillGraphs.where_usable(model.model, lane.cache, lane.rows, None)
        if prompts is not None:
            c.progress("talker", "capturing prompts")
            prompts.capture(stream)
            lane.prompts = prompts

    def stage(emit: Emit) -> Stage:
        # A captured frame serves decoding rows alone; beside a prompt it would be launched kernel by kernel.
        return c.autoregressive("talker", lane, blocks, emit, priority=-1, mixed=not lane.fused, capture=capture)

    return TalkerNode(stage, model, c)


def _vocoder(source: Source, c: StageContext) -> CodecNode:
    model = source.vocoder()
    return CodecNode(lambda emit: c.vocoder("code2wav", model, emit), c)
