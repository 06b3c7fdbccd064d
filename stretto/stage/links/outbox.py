"""The sending end of a link to another host: the chunks that have not left yet. There is an
`Outlet` for each link, and an `Outbox` for each request. Used by the host, on the loop thread.

Rows that a stage sends at once become one chunk, or several if a slot of the link cannot hold them.
Chunks that the courier has no room for wait here: `send` says so, and the host pauses the request
until there is room. Nothing here waits: device rows stay on the device, with the event after which
they are complete."""

from __future__ import annotations

from collections import deque

import torch

from stretto.errors import Bug
from stretto.stage.payload import Payload
from stretto.stage.stage import Stage, Transfer
from stretto.transport import wire
from stretto.transport.contract import Chunk
from stretto.transport.courier import Outgoing
from stretto.types import Mark, RequestId, Span


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

    def flush(self, courier: Outgoing | None) -> bool:
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


class Outlet:
    """The requests that are open on the link, and those that must wait."""

    def __init__(self, name: str, sender: Stage) -> None:
        self.name = name
        self.sender = sender
        self._courier: Outgoing | None = None
        # of a chunk; known when the link is laid, which is before any request
        self._slot_bytes = 0
        self._boxes: dict[RequestId, Outbox] = {}
        # Whose chunks wait for room, longest first. Few, so that a poll need not look at all boxes.
        self._full: dict[RequestId, None] = {}
        # whose listener does not keep up
        self._slow: set[RequestId] = set()

    def attach(self, courier: Outgoing) -> None:
        self._courier = courier
        self._slot_bytes = courier.slot_bytes

    def detach(self) -> None:
        self._courier = None

    @property
    def num_sending(self) -> int:
        """Requests that it holds anything for."""
        return len(self._boxes)

    def start_sending(self, id: RequestId) -> None:
        self._boxes[id] = Outbox(id)

    def stop_sending(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        self._slow.discard(id)
        if id in self._boxes and (purge or id not in self._full):
            # else its last chunks still wait for room
            self._forget(id, purge)

    def send(self, transfer: Transfer) -> bool:
        """False: there is no room for all; `flush` comes back to it."""
        id = transfer.request
        box = self._boxes.get(id)
        if box is None:
            # it was cancelled while this waited to be sent
            return True
        box.add(transfer.payload, self._slot_bytes, transfer.mark, transfer.event)
        sent = box.flush(self._courier)
        if not sent:
            self._full[id] = None
        elif box.ended:
            self._forget(id)
        return sent

    def flush(self) -> list[RequestId]:
        """Send what waited. Returns the requests of which nothing waits any more."""
        freed = [id for id in self._full if self._boxes[id].flush(self._courier)]
        for id in freed:
            del self._full[id]
            if self._boxes[id].ended:
                self._forget(id)
        if self._full and self._courier is not None:
            self._courier.wake_when_sent()
        return freed

    def throttle(self, id: RequestId, on: bool) -> None:
        if on and id in self._boxes:
            self._slow.add(id)
        else:
            self._slow.discard(id)

    def blocked(self, id: RequestId) -> bool:
        """A request rests while its listener is slow or its chunks find no room: each may end
        before the other."""
        return id in self._slow or id in self._full

    def _forget(self, id: RequestId, purge: bool = False) -> None:
        self._boxes.pop(id).drop()
        self._full.pop(id, None)
        self._slow.discard(id)
        if purge and self._courier is not None:
            self._courier.purge(id)
