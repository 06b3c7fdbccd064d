"""How Qwen3-TTS's adapter is built where its kernels are compiled ahead (see `models/warming.py`):
called by its host, and run by the processes that it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from stretto.config.engine import HostSettings
from stretto.models.qwen3_tts.adapter import TalkerAdapter
from stretto.models.qwen3_tts.config import TtsConfig
from stretto.models.qwen3_tts.load import Source
from stretto.models.warming import CompileJob, Room, Steps, Warming, compiled, few, main, start

SPACE = 2 << 30
"""Bytes on the device that one process takes at most, at the larger released size: two layers,
tables and context."""
WORDS = 16
"""Of the text table: no kernel is specialised by their number."""


def begin(
    model: str,
    config: TtsConfig,
    stages: Sequence[str],
    s: HostSettings,
    blocks: Mapping[str, int],
    dtype: torch.dtype,
    free: int,
    weights: int,
) -> Warming | None:
    """Start processes that compile what the talker needs, if some are needed. `free` bytes are
    there for them and for the `weights` bytes that the host goes on to load."""
    wanted = [stage for stage in stages if stage == "talker"]
    if not compiled((config.talker.decoder, config.talker.predictor), dtype, s.device):
        return None
    return start(__name__, model, config, wanted, s, blocks, dtype, Room(free, weights, SPACE))


def small(config: TtsConfig) -> TtsConfig:
    """The same widths with few layers and words."""
    t = config.talker
    return replace(
        config,
        talker=replace(t, decoder=few(t.decoder), predictor=few(t.predictor), text_vocab=WORDS),
    )


def build_lane(job: CompileJob) -> TalkerAdapter:
    source = Source.open(job.model, job.device, getattr(torch, job.dtype), "dummy", progress=False)
    talker = replace(source, config=small(source.config)).talker()
    return TalkerAdapter(
        talker, talker.cache(job.blocks, job.block_size), job.max_rows, job.max_context
    )


def run(job: CompileJob) -> None:
    adapter = build_lane(job)
    Steps(adapter, adapter.model.model).run(job.tasks)


if __name__ == "__main__":
    main(run)
