"""What crosses Qwen3-Omni's first link: `ThinkerRows`. (The second one's is `speech/payloads.py`.)
Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from stretto.stage.payload import named, within
from stretto.types import Span

_NOTHING = torch.empty(0, 0)


@dataclass(frozen=True, slots=True)
class ThinkerRows:
    """Thinker to talker: the id at each position, and the accept layer's hidden rows at media
    positions only.

    `media` are the runs of media positions inside `span`, in order; `hidden` holds their rows, run
    after run."""

    # Ids are looked at by the talker's scheduler, which must not wait for an upload that waits
    # behind its own steps.
    HOST: ClassVar[frozenset[str]] = frozenset({"ids", "media"})

    span: Span
    ids: torch.Tensor  # int32 [rows]
    media: tuple[Span, ...]
    # [media rows, hidden size]; what it is where there are none does not matter
    hidden: torch.Tensor

    def __post_init__(self) -> None:
        shape = self.ids.shape
        if len(shape) != 1 or shape[0] != len(self.span) or self.ids.dtype is not torch.int32:
            raise ValueError(f"ids {self.ids.dtype} {tuple(self.ids.shape)} for {self.span}")
        if self.media and (
            self.hidden.dim() != 2 or len(self.hidden) != sum(len(run) for run in self.media)
        ):
            raise ValueError(f"hidden {tuple(self.hidden.shape)} for {self.media}")
        position = self.span.start
        for run in self.media:
            if not position <= run.start < run.stop <= self.span.stop:
                raise ValueError(f"media runs {self.media} in {self.span}")
            position = run.stop

    def part(self, span: Span) -> ThinkerRows:
        start, stop = within(self.span, span)
        media: list[Span] = []
        before = inside = 0  # media rows ahead of `span`, and in it
        for run in self.media:
            first, last = max(run.start, span.start), min(run.stop, span.stop)
            before += max(0, min(run.stop, span.start) - run.start)
            if first < last:
                media.append(Span(first, last))
                inside += last - first
        return ThinkerRows(
            span, self.ids[start:stop], tuple(media), self.hidden[before : before + inside]
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        if not self.media:
            return {"ids": self.ids}
        runs = torch.tensor(
            [[run.start, run.stop] for run in self.media], dtype=torch.int64
        ).reshape(-1, 2)
        return {"ids": self.ids, "media": runs, "hidden": self.hidden}

    @classmethod
    def read(cls, span: Span, tensors: Mapping[str, torch.Tensor]) -> ThinkerRows:
        if tensors.keys() == {"ids"}:
            return cls(span, tensors["ids"], (), _NOTHING)
        ids, runs, hidden = named(tensors, "ids", "media", "hidden")
        if (
            runs.dim() != 2
            or not len(runs)
            or runs.shape[1] != 2
            or runs.dtype is not torch.int64
            or not runs.is_cpu
        ):
            raise ValueError(f"media runs {runs.dtype} {tuple(runs.shape)}")
        return cls(span, ids, tuple(Span(start, stop) for start, stop in runs.tolist()), hidden)
