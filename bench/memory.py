"""Which card serves which checkpoint of the released size: the table of docs/serve.md.

    python -m bench memory

Computed from the memory plan that every start makes, with the shapes of the released tensors and no
weights: `stretto env MODEL --cards` says the same of a checkpoint that is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.harness.markdown import markdown
from bench.harness.results import parser
from stretto.models.cards import CardRoom, card_rooms
from stretto.models.qwen3_omni.build import BUILD
from stretto.models.qwen3_omni.config import parse
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.testing.qwen3_omni import FORMATS, released_config, released_formats

NAMES = {"bf16": "bfloat16", "fp8": "FP8", "int4": "int4", "int4-talker": "int4, talker too"}


def rooms(checkpoint: str) -> list[CardRoom]:
    """Of one of `FORMATS`, by card."""
    config = parse(released_config()).with_formats(released_formats(checkpoint))
    return list(card_rooms(BUILD, config, PIPELINE.names, torch.bfloat16))


def card_table() -> str:
    columns = {name: rooms(name) for name in FORMATS}
    heads = [
        f"{NAMES[name]}, {of_one[0].weights / 2**30:.1f} GiB" for name, of_one in columns.items()
    ]
    lines = [
        [f"{row[0].card.gigabytes} GB ({row[0].card.example})", *map(str, row)]
        for row in zip(*columns.values(), strict=True)
    ]
    return markdown(["card", *heads], lines)


def main(given: Sequence[str]) -> int:
    parser("memory", __doc__).parse_args(given)
    print(card_table())
    return 0
