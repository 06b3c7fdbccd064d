"""The chunks of a request that have not left for another host yet. One `Outbox` per request and
link; loop thread.

Called by `RemoteOutlet`. Rows that a stage sends at once become one chunk, or several if a slot of
the link cannot hold them. Chunks that the courier has no room for wait here: `flush` says so, and
the scheduler pauses the request until there is room. Nothing here waits: device rows stay on the
device, with the event after which they are complete."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch

from stretto.errors import Bug
from stretto.stage.payload import Payload
from stretto.transport import wire
from stretto.transport.contract import Chunk
from stretto.types import Mark, RequestId, Span


class ChunkSink(Protocol):
    """Where chunks leave: the link's courier."""

    def offer(self, chunk: Chunk) -> bool:
        """Take a chunk, without waiting. False: there is no room now."""
        ...


class Outbox:
    def __init__(self, request: RequestId) -> None:
        self.request = request
        # rows
        self.sent = 0
        self.ended = False
        self._seq = 0
        self._waiting: deque[Chunk] = deque()

    @property
    def waiting(self) -> int:
        """Chunks that found no room."""
        return len(self._waiting)

    def add(
        self,
        payload: Payload | None,
        slot_bytes: int,
        mark: Mark = Mark.MORE,
        event: torch.cuda.Event | None = None,
    ) -> None:
        """The next rows, complete once `event` has fired; None: only the mark. Their memory must
        not be overwritten before they have left, which `flush` makes them do."""
        if self.ended or (payload is not None and payload.span.start != self.sent):
            span = None if payload is None else payload.span
            raise Bug(
                f"request {self.request}: rows {span} sent at {self.sent}, ended={self.ended}"
            )
        if payload is not None and len(payload.span):
            self._cut(payload, slot_bytes, mark, event)
        elif mark is not Mark.MORE:
            self._append(self._chunk(Span(self.sent, self.sent), mark, {}))
        self.ended = mark is Mark.REQUEST_END

    def flush(self, courier: ChunkSink | None) -> bool:
        """Offer the chunks that wait. True: none does any more. None: the link is not laid."""
        while self._waiting and courier is not None and courier.offer(self._waiting[0]):
            self._waiting.popleft()
        return not self._waiting

    def drop(self) -> None:
        """The request is over before its end: drop what has not left."""
        self.ended = True
        self._waiting.clear()

    def _cut(
        self, payload: Payload, slot_bytes: int, mark: Mark, event: torch.cuda.Event | None
    ) -> None:
        """Rows become one chunk, or each half by itself if that exceeds a slot. How many rows fit
        is not known beforehand, since rows differ in size (only some carry a hidden vector). A
        single row that exceeds a slot is kept as it is: the connector refuses it, which fails the
        request with the reason."""
        span = payload.span
        chunk = self._chunk(span, mark, payload.tensors(), event)
        if len(span) == 1 or wire.encoded_size(chunk) <= slot_bytes:
            self._append(chunk)
            return
        middle = (span.start + span.stop) // 2
        self._cut(payload.part(Span(span.start, middle)), slot_bytes, Mark.MORE, event)
        self._cut(payload.part(Span(middle, span.stop)), slot_bytes, mark, event)

    def _chunk(
        self,
        span: Span,
        mark: Mark,
        tensors: dict[str, torch.Tensor],
        event: torch.cuda.Event | None = None,
    ) -> Chunk:
        return wire.chunk(self.request, span, mark, tensors, seq=self._seq, event=event)

    def _append(self, chunk: Chunk) -> None:
        self._waiting.append(chunk)
        self._seq += 1
        self.sent = chunk.header.stop
