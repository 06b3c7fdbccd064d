"""What crosses a link, typed. One type per link, of the family whose stages it joins.

A payload is a run of consecutive rows of one segment, on the device or on the host. It can be cut by span and
joined again, and turned into a chunk's named tensors and back; reading checks all that the wire cannot know
(names, dtypes, row counts), so a node never meets a payload that is not well formed. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def within(whole: Span, span: Span) -> tuple[int, int]:
    if span.start < whole.start or span.stop > whole.stop:
        raise ValueError(f"{span} is not within {whole}")
    return span.start - whole.start, span.stop - whole.start


def joined(spans: Sequence[Span]) -> Span:
    for left, right in pairwise(spans):
        if left.stop != right.start:
            raise ValueError(f"{left} and {right} do not meet")
    return Span(spans[0].start, spans[-1].stop)


def named(tensors: Mapping[str, torch.Tensor], *names: str) -> list[torch.Tensor]:
    if set(tensors) != set(names):
        raise ValueError(f"tensors {sorted(tensors)} where {sorted(names)} belong")
    return [tensors[name] for name in names]
