"""The memory plan of a host: what its stages will take, looked at before anything is loaded.

Called once by the host, on its main thread. KV pools of open size get what the rest leaves (`sized`). The sizes come
from the stages themselves, built on the meta device, where tensors have shapes and no memory; so the plan cannot drift
away from the code that it speaks of. A plan that does not fit is refused with its numbers and with the settings that
would make it smaller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from stretto.errors import Bug, StageDead
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.qwen3_omni.weights import build
from stretto.orchestrator.settings import HostSettings
from stretto.stage.codec import CodecConfig

GIB = 1 << 30
RESERVE = {"cuda": 2 * GIB, "cpu": GIB // 4}
"""Left for what comes and goes: activations of a step, graphs, workspaces of libraries."""


POOLS = {"thinker": 512, "talker": 1024}
"""Blocks of the stages' KV pools where nothing is said and memory is not there to be filled: on a CPU."""
SPARE = 16
"""Pools that take what is left leave this part of the device's memory besides: graphs of large steps keep theirs."""


class DoesNotFit(StageDead):
    """The host's stages need more memory than there is."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Bytes that one stage will take."""

    stage: str
    weights: int
    state: int  # KV pool, or the vocoder's slots
    passing: int = 0  # needed while it loads, and given back
    knobs: str = ""  # the settings that `state` follows
    lighter: str = ""  # what would make the weights smaller

    @property
    def kept(self) -> int:
        return self.weights + self.state


def needed(plans: Sequence[StagePlan]) -> int:
    """The most that is taken at any time: stages load one after the other."""
    most = kept = 0
    for p in plans:
        most = max(most, kept + p.kept + p.passing)
        kept += p.kept
    return most


def check(plans: Sequence[StagePlan], free: int, reserve: int, where: str) -> None:
    """Raise `DoesNotFit` with the numbers if the stages and the reserve are more than is free."""
    need = needed(plans) + reserve
    if need <= free:
        return
    parts = [
        f"{p.stage} {size(p.kept + p.passing)} (weights {size(p.weights)}, state {size(p.state)}"
        + (f", while loading {size(p.passing)}" if p.passing else "")
        + ")"
        for p in plans
    ]
    largest = max(plans, key=lambda p: p.state)
    raise DoesNotFit(
        f"{', '.join(parts)} and {size(reserve)} of reserve are {size(need)}, but {where} has {size(free)} free; "
        f"lower {largest.knobs} (now {size(largest.state)}), {''.join(f'{p.lighter}, ' for p in plans if p.lighter)}"
        "or place stages on different devices"
    )


def size(count: int) -> str:
    for unit, one in (("GiB", GIB), ("MiB", 1 << 20)):
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"


def sized(
    config: OmniConfig, stages: Sequence[str], s: HostSettings, dtype: torch.dtype, device: torch.device
) -> HostSettings:
    """The settings with the size of each pool of these stages filled in where it was left open."""
    if device.type != "cuda":
        return fill(s, POOLS)
    free, total = torch.cuda.mem_get_info(device)
    return shared_out(config, stages, s, dtype, free - RESERVE["cuda"] - total // SPARE)


def shared_out(
    config: OmniConfig, stages: Sequence[str], s: HostSettings, dtype: torch.dtype, room: int
) -> HostSettings:
    """Open pools share what the rest of the stages leaves of `room` bytes, so that each holds as many tokens as the
    other: an answer takes about as many rows in the talker as in the thinker. None gets more than `max_rows` requests
    of full length can use, nor less than one of them needs (whether that fits is for `check` to say)."""
    one = -(-s.max_context // s.block_size)
    least = dict.fromkeys(POOLS, one)
    wanting = [stage for stage in stages if stage in POOLS and getattr(s, f"{stage}_blocks") is None]
    if not wanting:
        return fill(s, least)
    zero, ten = (plan(config, stages, fill(s, dict.fromkeys(POOLS, n)), dtype) for n in (0, 10))
    each = sum(b.state - a.state for a, b in zip(zero, ten, strict=True) if a.stage in wanting) / 10
    blocks = int((room - needed(zero)) / each)
    return fill(s, dict.fromkeys(POOLS, max(one, min(blocks, one * s.max_rows))))


def fill(s: HostSettings, blocks: Mapping[str, int]) -> HostSettings:
    """Pools whose size is open get theirs from `blocks`."""
    return replace(
        s,
        thinker_blocks=blocks["thinker"] if s.thinker_blocks is None else s.thinker_blocks,
        talker_blocks=blocks["talker"] if s.talker_blocks is None else s.talker_blocks,
    )


def plan(config: OmniConfig, stages: Sequence[str], s: HostSettings, dtype: torch.dtype) -> list[StagePlan]:
    s = fill(s, POOLS)
    makers: dict[str, Callable[[], StagePlan]] = {
        "thinker": lambda: _thinker(config, s, dtype),
        "talker": lambda: _talker(config, s, dtype, alone="thinker" not in stages),
        "code2wav": lambda: _code2wav(config, s, dtype),
    }
    if unknown := set(stages) - set(makers):
        raise Bug(f"no stage is called {', '.join(sorted(unknown))}")
    return [makers[stage]() for stage in stages]


def _weights(module: nn.Module) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def _thinker(config: OmniConfig, s: HostSettings, dtype: torch.dtype) -> StagePlan:
    model = build(lambda: Thinker(config), "meta", dtype)
    assert s.thinker_blocks is not None
    pool = model.cache(s.thinker_blocks + 1, s.block_size).data.nbytes
    lighter = "" if s.expert_weights == "float8" else "load experts as float8 (expert_weights)"
    return StagePlan("thinker", _weights(model), pool, knobs="thinker_blocks", lighter=lighter)


def _talker(config: OmniConfig, s: HostSettings, dtype: torch.dtype, alone: bool) -> StagePlan:
    model = build(lambda: Talker(config), "meta", dtype)
    assert s.talker_blocks is not None
    pool = model.cache(s.talker_blocks + 1, s.block_size).data.nbytes
    text = config.thinker.text
    table = text.vocab_size * config.talker.text.hidden_size * dtype.itemsize
    # Both the table and its pieces are there while they are joined; alone, so is the thinker's word embedding.
    words = text.vocab_size * text.hidden_size * dtype.itemsize if alone else 0
    return StagePlan("talker", _weights(model) + table, pool, table + words, "talker_blocks")


def _code2wav(config: OmniConfig, s: HostSettings, dtype: torch.dtype) -> StagePlan:
    model = build(lambda: Code2Wav(config.code2wav), "meta", dtype)
    # Not by `prepare`: its constants are a few KiB, and arithmetic on the meta device costs seconds of imports.
    model.ready = True
    state = model.state(s.max_rows, max(CodecConfig().frame_sizes))
    return StagePlan("code2wav", _weights(model), state.window.nbytes + state.tails.nbytes, knobs="max_rows")


def free_memory(device: torch.device) -> int:
    """Bytes that this process could take on a device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        free = min(
            free, group_free(int(limit), (group / "memory.current").read_text(), (group / "memory.stat").read_text())
        )
    return free


def group_free(limit: int, current: str, stat: str) -> int:
    """What a container may still take: files that it has read count as used, but make room when asked."""
    fields = dict(line.split() for line in stat.splitlines())
    return limit - int(current) + int(fields["active_file"]) + int(fields["inactive_file"])
