"""What crosses a link, typed: `ThinkerRows` and `CodecFrames`. One type per link; the bridge makes and reads them.

A payload is a run of consecutive rows of one segment, on the device or on the host. It can be cut by span and
joined again, and turned into a chunk's named tensors and back; reading checks all that the wire cannot know
(names, dtypes, row counts), so a bridge never meets a payload that is not well formed. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Protocol, Self, TypeVar

import torch

from stretto.connector.contract import Chunk, Corrupt
from stretto.types import Span


class Payload(Protocol):
    """What inbox, outbox and copies need to know of a payload type."""

    HOST: ClassVar[frozenset[str]]  # tensors that stay on the host, where their reader wants them

    @property
    def span(self) -> Span: ...

    def part(self, span: Span) -> Self:
        """The rows of `span`, as views."""
        ...

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Consecutive parts as one; a single part as it is."""
        ...

    def copied(self) -> Self:
        """The same rows in memory of their own."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]: ...

    @classmethod
    def read(cls, span: Span, tensors: Mapping[str, torch.Tensor]) -> Self:
        """The inverse of `tensors`; `ValueError` if they are not what this type sends."""
        ...


P = TypeVar("P", bound=Payload)


def unpack(kind: type[P], chunk: Chunk) -> P | None:
    """The payload of a taken chunk, as views; None for an empty span, which carries a mark and no tensors.

    What the type refuses is, coming from a peer, a corrupt chunk."""
    span, request = chunk.header.span, chunk.header.request
    if len(span) == 0:
        if chunk.tensors:
            raise Corrupt(f"tensors {sorted(chunk.tensors)} for no rows", request=request)
        return None
    try:
        return kind.read(span, chunk.tensors)
    except ValueError as error:
        raise Corrupt(str(error), request=request) from error


@dataclass(frozen=True, slots=True)
class CodecFrames:
    """Talker to code2wav: frames of codes. `codes[i]` are the codebooks of frame `span.start + i`."""

    HOST: ClassVar[frozenset[str]] = frozenset({"codes"})  # a step of the vocoder takes those of all streams along

    span: Span
    codes: torch.Tensor  # int32 [frames, codebooks]

    def __post_init__(self) -> None:
        shape = self.codes.shape
        if len(shape) != 2 or shape[0] != len(self.span) or self.codes.dtype is not torch.int32:
            raise ValueError(f"codes {self.codes.dtype} {tuple(self.codes.shape)} for {self.span}")

    def part(self, span: Span) -> CodecFrames:
        start, stop = _within(self.span, span)
        return CodecFrames(span, self.codes[start:stop])

    @classmethod
    def join(cls, parts: Sequence[CodecFrames]) -> CodecFrames:
        span = _joined([part.span for part in parts])
        return parts[0] if len(parts) == 1 else cls(span, torch.cat([part.codes for part in parts]))

    def copied(self) -> CodecFrames:
        return CodecFrames(self.span, self.codes.clone())

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"codes": self.codes}

    @classmethod
    def read(cls, span: Span, tensors: Mapping[str, torch.Tensor]) -> CodecFrames:
        (codes,) = _named(tensors, "codes")
        return cls(span, codes)


_NOTHING = torch.empty(0, 0)


@dataclass(frozen=True, slots=True)
class ThinkerRows:
    """Thinker to talker: the id at each position, and the accept layer's hidden rows at media positions only.

    `media` are the runs of media positions inside `span`, in order; `hidden` holds their rows, run after run."""

    # Ids are looked at by the talker's scheduler, which must not wait for an upload that waits behind its own steps.
    HOST: ClassVar[frozenset[str]] = frozenset({"ids", "media"})

    span: Span
    ids: torch.Tensor  # int32 [rows]
    media: tuple[Span, ...]
    hidden: torch.Tensor  # [media rows, hidden size]; what it is where there are none does not matter

    def __post_init__(self) -> None:
        shape = self.ids.shape
        if len(shape) != 1 or shape[0] != len(self.span) or self.ids.dtype is not torch.int32:
            raise ValueError(f"ids {self.ids.dtype} {tuple(self.ids.shape)} for {self.span}")
        if self.media and (self.hidden.dim() != 2 or len(self.hidden) != sum(len(run) for run in self.media)):
            raise ValueError(f"hidden {tuple(self.hidden.shape)} for {self.media}")
        position = self.span.start
        for run in self.media:
            if not position <= run.start < run.stop <= self.span.stop:
                raise ValueError(f"media runs {self.media} in {self.span}")
            position = run.stop

    def part(self, span: Span) -> ThinkerRows:
        start, stop = _within(self.span, span)
        media: list[Span] = []
        before = inside = 0  # media rows ahead of `span`, and in it
        for run in self.media:
            first, last = max(run.start, span.start), min(run.stop, span.stop)
            before += max(0, min(run.stop, span.start) - run.start)
            if first < last:
                media.append(Span(first, last))
                inside += last - first
        return ThinkerRows(span, self.ids[start:stop], tuple(media), self.hidden[before : before + inside])

    @classmethod
    def join(cls, parts: Sequence[ThinkerRows]) -> ThinkerRows:
        span = _joined([part.span for part in parts])
        if len(parts) == 1:
            return parts[0]
        media: list[Span] = []
        for run in (run for part in parts for run in part.media):
            if media and media[-1].stop == run.start:
                media[-1] = replace(media[-1], stop=run.stop)
            else:
                media.append(run)
        ids = torch.cat([part.ids for part in parts])
        rows = [part.hidden for part in parts if part.media]
        return cls(span, ids, tuple(media), torch.cat(rows) if rows else _NOTHING)

    def copied(self) -> ThinkerRows:
        return ThinkerRows(self.span, self.ids.clone(), self.media, self.hidden.clone())

    def tensors(self) -> dict[str, torch.Tensor]:
        if not self.media:
            return {"ids": self.ids}
        runs = torch.tensor([[run.start, run.stop] for run in self.media], dtype=torch.int64).reshape(-1, 2)
        return {"ids": self.ids, "media": runs, "hidden": self.hidden}

    @classmethod
    def read(cls, span: Span, tensors: Mapping[str, torch.Tensor]) -> ThinkerRows:
        if tensors.keys() == {"ids"}:
            return cls(span, tensors["ids"], (), _NOTHING)
        ids, runs, hidden = _named(tensors, "ids", "media", "hidden")
        if runs.dim() != 2 or not len(runs) or runs.shape[1] != 2 or runs.dtype is not torch.int64 or not runs.is_cpu:
            raise ValueError(f"media runs {runs.dtype} {tuple(runs.shape)}")
        return cls(span, ids, tuple(Span(start, stop) for start, stop in runs.tolist()), hidden)


def _within(whole: Span, span: Span) -> tuple[int, int]:
    if span.start < whole.start or span.stop > whole.stop:
        raise ValueError(f"{span} is not within {whole}")
    return span.start - whole.start, span.stop - whole.start


def _joined(spans: Sequence[Span]) -> Span:
    for left, right in pairwise(spans):
        if left.stop != right.start:
            raise ValueError(f"{left} and {right} do not meet")
    return Span(spans[0].start, spans[-1].stop)


def _named(tensors: Mapping[str, torch.Tensor], *names: str) -> list[torch.Tensor]:
    if set(tensors) != set(names):
        raise ValueError(f"tensors {sorted(tensors)} where {sorted(names)} belong")
    return [tensors[name] for name in names]
