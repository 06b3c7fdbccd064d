"""Which cards a checkpoint fits, and what room they have for KV caches: the memory plan that a host
makes at its start, made for cards that are not here. Found by `registry.py`, for `stretto env` and
`stretto quantize`; `bench/memory.py` makes the table of docs/serve.md of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto._imports import load
from stretto.config.devices import rows_for
from stretto.config.engine import HostSettings
from stretto.errors import Invalid
from stretto.family import PipelineSpec
from stretto.models.building import FamilyBuild
from stretto.stage.host.memory_plan import GIB, RESERVE, SPARE, needed, size

CONTEXT = GIB // 2
"""What a process's CUDA context takes of a card before anything else."""
PER_LISTENER = 1024
"""Tokens of question and answer that a listener is counted with: a minute of speech."""


@dataclass(frozen=True, slots=True)
class Card:
    gigabytes: int  # as it is sold
    memory: float  # GiB, as its driver says
    example: str


CARDS = (
    Card(16, 15.6, "RTX 5080"),
    Card(24, 23.5, "RTX 4090"),
    Card(32, 31.4, "RTX 5090"),
    Card(48, 44.4, "L40S"),
    Card(80, 79.1, "H100"),
    Card(141, 139.8, "H200"),
)


@dataclass(frozen=True, slots=True)
class CardRoom:
    """What a checkpoint takes of a card, and what that leaves."""

    card: Card
    weights: int  # bytes
    rows: int  # of a step, as `stretto serve` chooses them
    tokens: int  # in the KV caches; 0: it does not fit
    short: int  # bytes that are missing

    @property
    def listeners(self) -> int:
        return min(self.rows, self.tokens // PER_LISTENER)

    def __str__(self) -> str:
        if not self.tokens:
            return f"no: {size(self.short)} short"
        rounded = self.tokens // 1000 * 1000 if self.tokens >= 10_000 else self.tokens
        return f"{rounded:,} tokens, {self.listeners} listeners"


def card_rooms(
    family: FamilyBuild[Any], config: Any, stages: Sequence[str], dtype: torch.dtype
) -> Iterator[CardRoom]:
    """For each of the cards, if it had nothing else to do."""
    order = sorted(stages, key=lambda name: name in family.cpu_blocks)  # as a host loads them
    one = HostSettings(device="cuda", max_rows=1)
    weights = sum(p.weights for p in family.plan(config, order, one, family.cpu_blocks, dtype))
    for card in CARDS:
        total = int(card.memory * GIB)
        rows = rows_for(total - weights)
        settings = HostSettings(device="cuda", max_rows=rows)
        free = total - CONTEXT
        room = free - RESERVE["cuda"] - total // SPARE
        blocks = family.share_room(config, order, settings, dtype, room)
        short = needed(family.plan(config, order, settings, blocks, dtype)) + RESERVE["cuda"] - free
        tokens = min(blocks.values(), default=0) * settings.block_size
        yield CardRoom(card, weights, rows, 0 if short > 0 else tokens, max(0, short))


def describe_cards(directory: Path, pipeline: PipelineSpec) -> dict[str, str]:
    """For a checkpoint, in bfloat16 where its weights are wide."""
    family = load(pipeline.build)
    if not isinstance(family, FamilyBuild) or family.config is None:
        raise Invalid(f"{directory}: its family does not say what it takes of a card", "cards")
    config = family.config(directory)
    rooms = card_rooms(family, config, pipeline.names, torch.bfloat16)
    return {f"{r.card.gigabytes} GB": str(r) for r in rooms}
