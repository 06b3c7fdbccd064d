"""What Qwen3-Omni's stages take of a device's memory. The sizes come from the stages themselves,
built on the meta device, where tensors have shapes and no memory; so the plan cannot drift away
from the code that it speaks of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from stretto.config.engine import HostSettings
from stretto.errors import Bug
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.weights import build
from stretto.stage.host.memory_plan import StagePlan, room_for_pools, share_out
from stretto.stage.vocoder import CodecConfig

POOLS = {"thinker": 512, "talker": 1024}
"""Blocks of the stages' KV pools where nothing is said and memory is not there to be filled: on a
CPU."""

Blocks = Mapping[str, int]


def pool_sizes(
    config: OmniConfig,
    stages: Sequence[str],
    s: HostSettings,
    dtype: torch.dtype,
    device: torch.device,
    beside: Sequence[Sequence[str]] = (),
) -> dict[str, int]:
    """Blocks of each stage's pool. An answer takes about as many rows in the talker as in the
    thinker. Hosts that will load on the same card (`beside`, the stages of each) find as many
    blocks as these stages do."""
    if device.type != "cuda":
        return {**POOLS, **s.blocks}
    everyone = [*stages, *(stage for host in beside for stage in host)]
    return shared(
        config, everyone, s, dtype, room_for_pools(device, 1 + len(beside), s.memory_share)
    )


def shared(
    config: OmniConfig, stages: Sequence[str], s: HostSettings, dtype: torch.dtype, room: int
) -> dict[str, int]:
    """The same where pools of open size share so many bytes with all the rest."""
    wanting = [stage for stage in stages if stage in POOLS and stage not in s.blocks]
    blocks = share_out(
        lambda open_: plan(config, stages, s, {**s.blocks, **open_}, dtype), wanting, s, room
    )
    return {**dict.fromkeys(POOLS, blocks), **s.blocks}


def plan(
    config: OmniConfig, stages: Sequence[str], s: HostSettings, blocks: Blocks, dtype: torch.dtype
) -> list[StagePlan]:
    makers: dict[str, Callable[[], StagePlan]] = {
        "thinker": lambda: _thinker(config, s, blocks, dtype),
        "talker": lambda: _talker(config, s, blocks, dtype, alone="thinker" not in stages),
        "code2wav": lambda: _code2wav(config, s, dtype),
    }
    if unknown := set(stages) - set(makers):
        raise Bug(f"no stage is called {', '.join(sorted(unknown))}")
    return [makers[stage]() for stage in stages]


def _weights(module: nn.Module) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def _thinker(config: OmniConfig, s: HostSettings, blocks: Blocks, dtype: torch.dtype) -> StagePlan:
    model = build(lambda: Thinker(config), "meta", dtype)
    pool = model.cache(blocks["thinker"] + 1, s.block_size).data.nbytes
    flags_hint = "--kv-blocks thinker=N or --max-model-len"
    if s.expert_weights == "float8":
        return StagePlan("thinker", _weights(model), pool, flags_hint=flags_hint)

    def saved_bytes() -> int:
        return _weights(model) - _weights(
            build(lambda: Thinker(config.with_float8_experts()), "meta", dtype)
        )

    alternative = "load experts as float8 (--expert-weights float8)"
    return StagePlan(
        "thinker",
        _weights(model),
        pool,
        flags_hint=flags_hint,
        alternative=alternative,
        saved_bytes=saved_bytes,
    )


def _talker(
    config: OmniConfig, s: HostSettings, blocks: Blocks, dtype: torch.dtype, alone: bool
) -> StagePlan:
    model = build(lambda: Talker(config), "meta", dtype)
    pool = model.cache(blocks["talker"] + 1, s.block_size).data.nbytes
    text = config.thinker.text
    table = text.vocab_size * config.talker.text.hidden_size * dtype.itemsize
    # Both the table and its pieces are there while they are joined; alone, so is the thinker's word
    # embedding.
    words = text.vocab_size * text.hidden_size * dtype.itemsize if alone else 0
    return StagePlan(
        "talker",
        _weights(model) + table,
        pool,
        table + words,
        "--kv-blocks talker=N or --max-model-len",
    )


def _code2wav(config: OmniConfig, s: HostSettings, dtype: torch.dtype) -> StagePlan:
    model = build(lambda: Code2Wav(config.code2wav), "meta", dtype)
    # Not by `prepare`: its constants are a few KiB, and arithmetic on the meta device costs seconds
    # of imports.
    model.ready = True
    state = model.state(s.max_rows, max(CodecConfig().frame_sizes))
    return StagePlan(
        "code2wav",
        _weights(model),
        state.window.nbytes + state.tails.nbytes,
        flags_hint="--max-rows",
    )
