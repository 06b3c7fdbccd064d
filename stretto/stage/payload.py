"""What crosses a link, typed. One type per link, defined by the family whose stages it joins.

A payload is a run of consecutive rows of one request, on the device or on the host. It can be cut
by span, and turned into a chunk's named tensors and back. Reading checks what the wire format
cannot know (names, dtypes, row counts), so a stage only gets well-formed payloads. Pure; any
thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol, Self, TypeVar

import torch

from stretto.transport.contract import Chunk, Corrupt
from stretto.types import Span


class Payload(Protocol):
    """What links and copies need of a payload type."""

    # tensors that stay on the host, where their reader wants them
    HOST: ClassVar[frozenset[str]]

    @property
    def span(self) -> Span: ...

    def part(self, span: Span) -> Self:
        """The rows of `span`, as views."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]: ...

    @classmethod
    def read(cls, span: Span, tensors: Mapping[str, torch.Tensor]) -> Self:
        """The inverse of `tensors`; `ValueError` if they are not what this type sends."""
        ...


P = TypeVar("P", bound=Payload)


def unpack(kind: type[P], chunk: Chunk) -> P | None:
    """The payload of a taken chunk, as views; None for an empty span, which carries a mark and no
    tensors.

    `Corrupt` if the type refuses it."""
    span, request = chunk.header.span, chunk.header.request
    if len(span) == 0:
        if chunk.tensors:
            raise Corrupt(f"tensors {sorted(chunk.tensors)} for no rows", request=request)
        return None
    try:
        return kind.read(span, chunk.tensors)
    except (LookupError, TypeError, ValueError) as error:
        raise Corrupt(f"not a {kind.__name__}: {error}", request=request) from error


def within(whole: Span, span: Span) -> tuple[int, int]:
    """The rows of `span`, counted from the start of `whole`."""
    if span.start < whole.start or span.stop > whole.stop:
        raise ValueError(f"{span} is not within {whole}")
    return span.start - whole.start, span.stop - whole.start


def named(tensors: Mapping[str, torch.Tensor], *names: str) -> list[torch.Tensor]:
    """The tensors in the order of `names`; `ValueError` if there are others, or some are
    missing."""
    if set(tensors) != set(names):
        raise ValueError(f"tensors {sorted(tensors)} where {sorted(names)} belong")
    return [tensors[name] for name in names]
