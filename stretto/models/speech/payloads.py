"""What crosses the link from a talker to its vocoder. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from stretto.stage.payload import named, within
from stretto.types import Span


@dataclass(frozen=True, slots=True)
class CodecFrames:
    """Talker to vocoder: frames of codes. `codes[i]` are the codebooks of frame `span.start +
    i`."""

    # a step of the vocoder takes those of all streams along
    HOST: ClassVar[frozenset[str]] = frozenset({"codes"})

    span: Span
    codes: torch.Tensor  # int32 [frames, codebooks]

    def __post_init__(self) -> None:
        shape = self.codes.shape
        if len(shape) != 2 or shape[0] != len(self.span) or self.codes.dtype is not torch.int32:
            raise ValueError(f"codes {self.codes.dtype} {tuple(self.codes.shape)} for {self.span}")

    def part(self, span: Span) -> CodecFrames:
        start, stop = within(self.span, span)
        return CodecFrames(span, self.codes[start:stop])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"codes": self.codes}

    @classmethod
    def read(cls, span: Span, tensors: Mapping[str, torch.Tensor]) -> CodecFrames:
        (codes,) = named(tensors, "codes")
        return cls(span, codes)
