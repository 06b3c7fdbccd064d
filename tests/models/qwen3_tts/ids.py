"""The fixed strings around a text, as ids of the tiny tokenizer: as the model's package tokenizes
them."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.testing.tiny_tokenizer import token_ids

IDS = token_ids()
START, END, LINE = IDS["<|im_start|>"], IDS["<|im_end|>"], IDS["Ċ"]
ROLE = [START, IDS["assistant"], LINE]


def assistant_ids(text: Sequence[int]) -> list[int]:
    return [*ROLE, *text, END, LINE, *ROLE]


def instruct_ids(text: Sequence[int]) -> list[int]:
    return [START, IDS["user"], LINE, *text, END, LINE]
