"""What Qwen3-TTS's stages take of a device's memory. The sizes come from the stages themselves,
built on the meta device, where tensors have shapes and no memory; so the plan cannot drift away
from the code that it speaks of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from stretto.config.engine import HostSettings
from stretto.errors import Bug
from stretto.models.qwen3_tts.config import TtsConfig
from stretto.models.qwen3_tts.enroller import Enroller
from stretto.models.qwen3_tts.talker import Talker
from stretto.models.qwen3_tts.vocoder import CodecDecoder
from stretto.models.weights import build
from stretto.stage.host.memory_plan import StagePlan, room_for_pools, share_out
from stretto.stage.vocoder import CodecConfig

POOL = 1024
"""Blocks of the talker's KV pool where nothing is said and memory is not there to be filled: on a
CPU."""


def pool_sizes(
    config: TtsConfig,
    stages: Sequence[str],
    s: HostSettings,
    dtype: torch.dtype,
    device: torch.device,
    beside: Sequence[Sequence[str]] = (),
) -> dict[str, int]:
    """Blocks of the talker's pool, where hosts with the stages of `beside` will load on the same
    card."""
    if device.type != "cuda":
        return {"talker": POOL, **s.blocks}
    everyone = [*stages, *(stage for host in beside for stage in host)]
    wanting = [stage for stage in everyone if stage == "talker" and stage not in s.blocks]
    room = room_for_pools(device, 1 + len(beside), s.memory_share)
    blocks = share_out(
        lambda open_: plan(config, everyone, s, {**s.blocks, **open_}, dtype), wanting, s, room
    )
    return {"talker": blocks, **s.blocks}


def plan(
    config: TtsConfig,
    stages: Sequence[str],
    s: HostSettings,
    blocks: Mapping[str, int],
    dtype: torch.dtype,
) -> list[StagePlan]:
    makers: dict[str, Callable[[], StagePlan]] = {
        "talker": lambda: _talker(config, s, blocks, dtype),
        "code2wav": lambda: _vocoder(config, s, dtype),
        "enroller": lambda: StagePlan(
            "enroller", _weights(build(lambda: Enroller(config), "meta", torch.float32)), 0
        ),
    }
    if unknown := set(stages) - set(makers):
        raise Bug(f"no stage is called {', '.join(sorted(unknown))}")
    return [makers[stage]() for stage in stages]


def _weights(module: nn.Module) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def _talker(
    config: TtsConfig, s: HostSettings, blocks: Mapping[str, int], dtype: torch.dtype
) -> StagePlan:
    model, t = build(lambda: Talker(config), "meta", dtype), config.talker
    pool = model.cache(blocks["talker"] + 1, s.block_size).data.nbytes
    table = t.text_vocab * t.decoder.hidden_size * dtype.itemsize
    words = t.text_vocab * t.text_hidden * dtype.itemsize
    # A narrower predictor's kernels have the tables once more, as its inputs: all but the last
    # code's.
    groups, p = t.num_code_groups, t.predictor
    inputs = (
        t.decoder.vocab_size + (groups - 2) * p.vocab_size
        if p.hidden_size != t.decoder.hidden_size
        else 0
    )
    # While the text table is made, it is there twice, in pieces and joined, and so is the embedding
    # that it is made of.
    kept = _weights(model) - words + table + inputs * p.hidden_size * dtype.itemsize
    return StagePlan("talker", kept, pool, table + words, "--kv-blocks talker=N or --max-model-len")


def _vocoder(config: TtsConfig, s: HostSettings, dtype: torch.dtype) -> StagePlan:
    c = config.vocoder
    model = build(lambda: CodecDecoder(c), "meta", dtype)
    model.ready = True
    state = model.state(s.max_rows, max(CodecConfig().frame_sizes))
    assert model.quantizer is not None
    folded = _weights(model.quantizer)
    table = c.num_quantizers * c.codebook_size * c.table_size * dtype.itemsize
    primers = CodecConfig().primers * (
        state.window.nbytes // (1 + s.max_rows) + state.tails.nbytes // s.max_rows
    )
    memory = state.window.nbytes + state.tails.nbytes + (primers if config.kind == "base" else 0)
    return StagePlan(
        "code2wav", _weights(model) - folded + table, memory, folded, flags_hint="--max-rows"
    )
