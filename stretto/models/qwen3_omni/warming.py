"""How Qwen3-Omni's adapters are built where their kernels are compiled ahead (see
`models/warming.py`): called by its host, and run by the processes that it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from stretto.config.engine import HostSettings
from stretto.models.qwen3_omni.adapters.talker import TalkerAdapter
from stretto.models.qwen3_omni.adapters.thinker import ThinkerAdapter
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Source
from stretto.models.warming import CompileJob, Room, Steps, Warming, compiled, few, main, start

SPACE = 6 << 30
"""Bytes on the device that one process takes at most, at the released size: two layers, embedding
and head, context."""
NUM_STAGES = 3


def begin(
    model: str,
    config: OmniConfig,
    stages: Sequence[str],
    s: HostSettings,
    blocks: Mapping[str, int],
    dtype: torch.dtype,
    free: int,
    weights: int,
) -> Warming | None:
    """Start processes that compile what these stages need, if some are needed. `free` bytes are
    there for them and for the `weights` bytes that the host goes on to load."""
    wanted = [stage for stage in stages if stage in blocks]
    decoders = (config.thinker.text, config.talker.text, config.talker.predictor)
    if not compiled(decoders, dtype, s.device):
        return None
    # The other stages' hosts may be loading on this device now.
    room = Room(free, weights, SPACE, hosts=1 if len(stages) == NUM_STAGES else NUM_STAGES)
    return start(__name__, model, config, wanted, s, blocks, dtype, room)


def small(config: OmniConfig) -> OmniConfig:
    """The same widths with few layers."""
    th, ta = config.thinker, config.talker
    thinker = replace(
        th,
        text=few(th.text),
        audio=replace(th.audio, num_layers=1),
        vision=replace(th.vision, num_layers=1, deepstack_layers=()),
    )
    return replace(
        config, thinker=thinker, talker=replace(ta, text=few(ta.text), predictor=few(ta.predictor))
    )


def build_lane(job: CompileJob) -> ThinkerAdapter | TalkerAdapter:
    config = small(OmniConfig.read(job.model))
    source = Source.open(
        config,
        job.device,
        getattr(torch, job.dtype),
        "dummy",
        progress=False,
        expert_weights=job.expert_weights,
    )
    if job.tasks[0].stage == "thinker":
        thinker = source.thinker()
        return ThinkerAdapter(
            thinker, thinker.cache(job.blocks, job.block_size), job.max_rows, job.max_context
        )
    words = torch.zeros(1, config.thinker.text.hidden_size, device=job.device, dtype=source.dtype)
    talker = source.talker(words)
    return TalkerAdapter(
        talker, talker.cache(job.blocks, job.block_size), job.max_rows, job.max_context
    )


def run(job: CompileJob) -> None:
    adapter = build_lane(job)
    accept = adapter.model.accept_layer if isinstance(adapter, ThinkerAdapter) else None
    Steps(adapter, adapter.model.model, accept).run(job.tasks)


if __name__ == "__main__":
    main(run)
