"""The vocabulary shared by all parts. Imports nothing of ours but errors, and no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NewType

import msgspec

from stretto.errors import Invalid

RequestId = NewType("RequestId", str)
"""Minted once by the engine; the same in every stage. Never client text."""

SECRET_BYTES = 32
"""The size of a link's secret, which is random and new for each of its generations."""

ExpertWeights = Literal["full", "float8"]
"""How the experts of a mixture are stored: in the model's dtype, or in 8 bits."""


class Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message between processes."""


class Mark(IntEnum):
    """How a chunk ends. Ordered, so that marks merge with `max`."""

    MORE = 0
    REQUEST_END = 1


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Half-open range of rows."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a span: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return True  # an empty span is still a span: it can carry a mark


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one stage of one request picks its tokens. The defaults are greedy.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1` are off. A seed makes the request's
    tokens a function of the request alone, whatever else is in its batch."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise Invalid(f"{name} must be {rule}, got {getattr(self, name)!r}", param=name)

        check(0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100")
        check(self.top_k >= 0, "top_k", "0 (off) or positive")
        check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        check(
            0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "above 0 and at most 100"
        )
        check(-(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


GREEDY = SamplingParams()


def stage_seed(seed: int, stage: str) -> int:
    """A stage's own seed, so that the stages' draws are independent."""
    return int.from_bytes(
        hashlib.blake2b(f"{seed}/{stage}".encode(), digest_size=8).digest(), "little"
    )
