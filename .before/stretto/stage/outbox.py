"""Where a stage leaves its rows for the next one. One `Outbox` per request and link, on the stage loop's thread.

Rows are added as steps produce them (on the device, or in the ring while their copy still runs), and leave in
chunks as they are confirmed; surplus rows of steps that ran ahead never leave. What the courier has no room for
waits here: `send` and `flush` say so, and the scheduler lets the request rest until there is. Packing, which may
have to wait for copies, happens later, on the courier's thread (`Draft.pack`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from stretto.connector import wire
from stretto.connector.contract import Chunk
from stretto.connector.courier import Parcel
from stretto.errors import Bug
from stretto.stage.payload.chunker import ChunkPolicy, Confirmed, cut
from stretto.stage.payload.ring import ReadLease
from stretto.stage.payload.schema import Payload
from stretto.types import Mark, RequestId, Span

P = TypeVar("P", bound=Payload)


@dataclass(slots=True)
class _Piece(Generic[P]):
    """Rows as a step left them: in a slot of the ring (`lease`), or on the device (`event`), or plain."""

    payload: P
    lease: ReadLease | None
    event: torch.cuda.Event | None

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()

    def settle(self) -> None:
        """Move the rows out of the ring, if their copy is done: whoever waits must not hold a slot."""
        if self.lease is not None and self.lease.filled:
            self.payload = self.payload.copied()
            self.lease.release()
            self.lease = None

    def part(self, span: Span) -> _Piece[P]:
        """Rows of `span`, with a share of the lease."""
        return _Piece(self.payload.part(span), self.lease.share() if self.lease else None, self.event)


@dataclass(slots=True)
class Draft(Generic[P]):
    """A chunk that is cut but not packed: the pieces that its rows lie in."""

    kind: type[P]
    request: RequestId
    epoch: int
    segment: int
    seq: int
    span: Span
    mark: Mark
    pieces: list[_Piece[P]]

    def pack(self) -> Chunk:
        """Wait for the copies to the host, if there are any, and make the chunk. Device rows are not waited for:
        they stay on the device and the chunk carries an event.

        One piece is passed on as it lies; several are joined, and their slots are free at once."""
        for piece in self.pieces:
            if piece.lease is not None:
                piece.lease.wait()
        tensors, event = _joined(self.kind, self.pieces)
        chunk = wire.chunk(
            self.request,
            self.span,
            self.mark,
            tensors,
            epoch=self.epoch,
            segment=self.segment,
            seq=self.seq,
            event=event,
        )
        if len(self.pieces) == 1:
            chunk.lease, self.pieces = self.pieces[0].lease, []
        else:
            self.drop()
        return chunk

    def drop(self) -> None:
        """Let go of the rows: they will not be sent, or were copied."""
        pieces, self.pieces = self.pieces, []
        for piece in pieces:
            piece.release()


def _joined(kind: type[P], pieces: list[_Piece[P]]) -> tuple[dict[str, torch.Tensor], torch.cuda.Event | None]:
    """The pieces as one payload's tensors and, for device rows, the event after which they are all there."""
    if not pieces:
        return {}, None
    payloads = [piece.payload for piece in pieces]
    if len(pieces) == 1:
        return payloads[0].tensors(), pieces[0].event
    tensors = [(name, tensor) for payload in payloads for name, tensor in payload.tensors().items()]
    on_device = [tensor for _, tensor in tensors if tensor.is_cuda]
    if not on_device:
        return kind.join(payloads).tensors(), None
    stream = torch.cuda.current_stream(on_device[0].device)
    for event in [piece.event for piece in pieces if piece.event is not None]:
        stream.wait_event(event)
    if len({(name, tensor.is_cuda) for name, tensor in tensors}) > len({name for name, _ in tensors}):
        # A large piece that is still on the device, next to small ones that are in the ring: only on a courier.
        return kind.join([_on_host(kind, payload) for payload in payloads]).tensors(), None
    for tensor in on_device:
        tensor.record_stream(stream)  # they are let go of before the join below has run
    return kind.join(payloads).tensors(), stream.record_event()


def _on_host(kind: type[P], payload: P) -> P:
    return kind.read(payload.span, {name: tensor.cpu() for name, tensor in payload.tensors().items()})


class Outbox(Generic[P]):
    """The rows of one request on their way to one link.

    Spans count from the start of the segment. A cursor counts from the start of the sequence: `origin` is where the
    segment's row 0 lies there, and is set by the stage when a segment begins.
    `offer` hands a draft to the link's courier and never blocks; False means that it has no room now."""

    def __init__(
        self,
        kind: type[P],
        request: RequestId,
        policy: ChunkPolicy,
        offer: Callable[[Parcel], bool],
        *,
        epoch: int = 0,
        segment: int = 0,
        origin: int = 0,
    ) -> None:
        self.request = request
        self.epoch = epoch
        self.segment = segment
        self.origin = origin
        self.sent = 0  # rows of this segment that were cut
        self.added = 0  # rows of this segment that were added
        self.ended = False
        self._kind = kind
        self._policy = policy
        self._offer = offer
        self._seq = 0
        self._pieces: deque[_Piece[P]] = deque()
        self._drafts: deque[Draft[P]] = deque()

    @property
    def waiting(self) -> int:
        """Chunks that were cut but found no room."""
        return len(self._drafts)

    def add(self, payload: P, *, lease: ReadLease | None = None, event: torch.cuda.Event | None = None) -> None:
        """The next rows, as a step left them. `lease` (a share of its own; the outbox releases it) if they lie in
        the ring, `event` if they are on the device. Their memory must not be reused before they have left."""
        if self.ended or payload.span.start != self.added:
            raise Bug(f"request {self.request}: rows {payload.span} added at {self.added}, ended={self.ended}")
        self.added = payload.span.stop
        if len(payload.span):
            self._pieces.append(_Piece(payload, lease, event))
        elif lease is not None:
            lease.release()

    def send(self, confirmed: Confirmed, mark: Mark = Mark.MORE) -> bool:
        """Cut what is ready, up to the `confirmed` row of the cursor, and hand it on. With an end mark the segment
        is over and rows beyond `confirmed` are surplus. False: some found no room; `flush` when there is."""
        ready = confirmed - self.origin
        if self.ended or not self.sent <= ready <= self.added:
            raise Bug(f"request {self.request}: {ready} confirmed of {self.added} added, {self.sent} sent")
        for span, how in cut(self._policy, self.sent, ready, mark):
            pieces = self._take(span)
            self._drafts.append(Draft(self._kind, self.request, self.epoch, self.segment, self._seq, span, how, pieces))
            self._seq += 1
            self.sent = span.stop
        if mark is not Mark.MORE:
            self._begin(self.segment + 1)
            self.ended = mark is Mark.REQUEST_END
        return self.flush()

    def flush(self) -> bool:
        """Hand on what waits. True: nothing does any more."""
        while self._drafts and self._offer(self._drafts[0]):
            self._drafts.popleft()
        return not self._drafts

    def settle(self) -> None:
        """Move rows that wait here out of the ring (see `Outboxes.settle`)."""
        for piece in self._pieces:
            piece.settle()
        for draft in self._drafts:
            for piece in draft.pieces:
                piece.settle()

    def interrupt(self, epoch: int, segment: int) -> None:
        """A new epoch begins, with `segment` from its start; what has not left is dropped."""
        if epoch <= self.epoch or self.ended:
            raise Bug(f"request {self.request}: epoch {epoch} does not follow {self.epoch}, ended={self.ended}")
        self.epoch = epoch
        self._drop_drafts()
        self._begin(segment)

    def drop(self) -> None:
        """The request is over before its end: let go of everything."""
        self.ended = True
        self._drop_drafts()
        self._begin(self.segment)

    def _begin(self, segment: int) -> None:
        """Start a segment; rows of the last one that were never confirmed go."""
        while self._pieces:
            self._pieces.popleft().release()
        self.segment, self.sent, self.added, self._seq = segment, 0, 0, 0

    def _take(self, span: Span) -> list[_Piece[P]]:
        """The pieces that hold `span`, cut to it. Pieces used up are passed on whole, with their lease."""
        taken: list[_Piece[P]] = []
        start = span.start
        while start < span.stop:
            piece = self._pieces[0]
            held = piece.payload.span
            stop = min(held.stop, span.stop)
            if start == held.start and stop == held.stop:
                taken.append(self._pieces.popleft())
            else:
                taken.append(piece.part(Span(start, stop)))
                if stop == held.stop:
                    self._pieces.popleft().release()
            start = stop
        return taken

    def _drop_drafts(self) -> None:
        while self._drafts:
            self._drafts.popleft().drop()


class Outboxes(Generic[P]):
    """The outboxes of a link, by request."""

    def __init__(self, kind: type[P], policy: ChunkPolicy, offer: Callable[[Parcel], bool]) -> None:
        self._kind = kind
        self._policy = policy
        self._offer = offer
        self._open: dict[RequestId, Outbox[P]] = {}

    def __getitem__(self, request: RequestId) -> Outbox[P]:
        return self._open[request]

    def __contains__(self, request: RequestId) -> bool:
        return request in self._open

    def open(self, request: RequestId, *, epoch: int = 0, segment: int = 0, origin: int = 0) -> Outbox[P]:
        if request in self._open:
            raise Bug(f"request {request} is opened twice")
        box = Outbox(self._kind, request, self._policy, self._offer, epoch=epoch, segment=segment, origin=origin)
        self._open[request] = box
        return box

    def flush(self) -> bool:
        """Hand on what waits, as far as there is room. True: nothing waits any more."""
        return all(box.flush() for box in self._open.values())

    def settle(self) -> None:
        """Free the slots of the ring that only waiting rows hold.

        A slot holds a whole batch's rows, and one request that rests with rows below its next boundary would keep
        it for as long as it rests. So when the ring has run out, call this before giving up: what is left then is
        in the courier's hands, and comes back."""
        for box in self._open.values():
            box.settle()

    def forget(self, request: RequestId) -> None:
        """The request is over: what it still holds goes. A request that ended in good order may still have chunks
        waiting for room; forget it when `Outbox.waiting` is 0."""
        box = self._open.pop(request, None)
        if box is not None:
            box.drop()
