"""The receiving end of a link from another host: the chunks that came and were not read yet. An
`Inbox` per request keeps one link's chunks in order; `Inboxes` keeps those of a link by request,
and chunks of requests that are not announced yet; an `Inlet` hands them to the host as payloads. On
the loop thread.

A chunk is accepted if it follows the last one, by `seq` and by span. A repeat is dropped and a gap
is an error. A chunk of a request that is over is late and ignored. Control messages and chunks take
different ways, so chunks may come before their request is announced: they are kept, up to a number
and a size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from stretto.errors import Bug, StrettoError, WireError
from stretto.stage.payload import unpack
from stretto.stage.stage import Stage, Transfer
from stretto.transport import wire
from stretto.transport.contract import Chunk, ChunkHeader, OnLink, PurgedRequests
from stretto.transport.courier import Incoming
from stretto.types import Mark, RequestId, Span


class Gap(OnLink, WireError):
    """A chunk that does not follow the last one: one between them was lost, or the sender is
    wrong."""


class Unannounced(OnLink, WireError):
    """Too many chunks, or bytes, for requests that are not announced."""


class Pushed(Enum):
    """What became of a chunk that was pushed."""

    ACCEPTED = auto()
    REPEAT = auto()
    LATE = auto()
    EARLY = auto()


@dataclass(slots=True)
class Inbox:
    """The chunks of one request on one link, in order, until the stage pops them."""

    request: RequestId
    # of the last chunk accepted
    mark: Mark = Mark.MORE
    # where each chunk ended: seq -> stop
    _stops: list[int] = field(default_factory=list)
    _queue: deque[Chunk] = field(default_factory=deque)

    @property
    def stop(self) -> int:
        """Rows accepted so far."""
        return self._stops[-1] if self._stops else 0

    @property
    def ended(self) -> bool:
        return self.mark is Mark.REQUEST_END

    def __len__(self) -> int:
        return len(self._queue)

    def __bool__(self) -> bool:
        return True

    def push(self, chunk: Chunk) -> Pushed:
        """Take over a chunk of this request. Dropped chunks are released; `Gap` if it does not
        follow."""
        header = chunk.header
        try:
            outcome = self._judge(header)
        except Gap:
            chunk.release()
            raise
        if outcome is not Pushed.ACCEPTED:
            chunk.release()
            return outcome
        self._stops.append(header.stop)
        self.mark = header.mark
        self._queue.append(chunk)
        return outcome

    def pop(self) -> Chunk | None:
        """The next chunk, which is then the caller's to release."""
        return self._queue.popleft() if self._queue else None

    def drop(self) -> None:
        """Release what was not popped."""
        while (chunk := self.pop()) is not None:
            chunk.release()

    def _judge(self, header: ChunkHeader) -> Pushed:
        if header.seq < len(self._stops):
            if not self._same(header):
                raise self._gap(header, "differs from the chunk it repeats")
            return Pushed.REPEAT
        if self.ended or (header.seq, header.start) != (len(self._stops), self.stop):
            raise self._gap(header, "does not follow the last chunk")
        return Pushed.ACCEPTED

    def _same(self, header: ChunkHeader) -> bool:
        start = self._stops[header.seq - 1] if header.seq else 0
        last = header.seq == len(self._stops) - 1
        return header.span == Span(start, self._stops[header.seq]) and header.mark == (
            self.mark if last else Mark.MORE
        )

    def _gap(self, header: ChunkHeader, what: str) -> Gap:
        return Gap(
            f"chunk {header.seq} [{header.start}, {header.stop}) {what}: have "
            f"{len(self._stops) - 1} up to {self.stop}, {self.mark.name}",
            request=header.request,
        )


@dataclass(slots=True)
class Inboxes:
    """The inboxes of a link, by request.

    `early_chunks` and `early_bytes` bound what is kept for all requests that are not announced
    yet."""

    early_chunks: int = 256
    early_bytes: int = 64 << 20
    counts: dict[Pushed, int] = field(default_factory=lambda: dict.fromkeys(Pushed, 0))
    _open: dict[RequestId, Inbox] = field(default_factory=dict)
    _early: dict[RequestId, list[Chunk]] = field(default_factory=dict)
    _num_early: int = 0
    _early_size: int = 0
    _over: PurgedRequests = field(default_factory=PurgedRequests)

    def __getitem__(self, request: RequestId) -> Inbox:
        return self._open[request]

    def __contains__(self, request: RequestId) -> bool:
        return request in self._open

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_early(self) -> int:
        return self._num_early

    def announce(self, request: RequestId) -> Inbox:
        """Open the inbox of a request; what came early is pushed into it (and may raise `Gap`)."""
        if request in self._open:
            raise Bug(f"request {request} is announced twice")
        inbox = self._open[request] = Inbox(request)
        self._push_early(inbox)
        return inbox

    def push(self, chunk: Chunk) -> Pushed:
        """Take over a chunk. Raises `Gap` or `Unannounced`, naming the request; the chunk is then
        released."""
        header = chunk.header
        inbox = self._open.get(header.request)
        if self._over.stale(header):
            chunk.release()
            outcome = Pushed.LATE
        elif inbox is None:
            self._keep(chunk)
            outcome = Pushed.EARLY
        else:
            outcome = inbox.push(chunk)
        self.counts[outcome] += 1
        return outcome

    def forget(self, request: RequestId) -> None:
        """The request is over (done, aborted, failed), announced or not; later chunks of it are
        ignored."""
        self._over.purge(request)
        inbox = self._open.pop(request, None)
        if inbox is not None:
            inbox.drop()
        for chunk in self._take_early(request):
            chunk.release()

    def _keep(self, chunk: Chunk) -> None:
        size = wire.blob_bytes(chunk.header)
        if self._num_early >= self.early_chunks or self._early_size + size > self.early_bytes:
            request = chunk.header.request
            chunk.release()
            raise Unannounced(
                f"{self._num_early} chunks wait for their announcement already", request=request
            )
        self._early.setdefault(chunk.header.request, []).append(chunk)
        self._num_early += 1
        self._early_size += size

    def _take_early(self, request: RequestId) -> list[Chunk]:
        chunks = self._early.pop(request, [])
        self._num_early -= len(chunks)
        self._early_size -= sum(wire.blob_bytes(chunk.header) for chunk in chunks)
        return chunks

    def _push_early(self, inbox: Inbox) -> None:
        waiting = deque(self._take_early(inbox.request))
        try:
            while waiting:
                self.push(waiting.popleft())
        except Gap:
            for chunk in waiting:
                chunk.release()
            raise


class Inlet:
    """Which requests are announced, and what comes for them."""

    def __init__(self, name: str, receiver: Stage) -> None:
        self.name = name
        self.receiver = receiver
        self.kind = receiver.receives[name]
        self._courier: Incoming | None = None
        self._boxes = Inboxes()
        # Since the last `receive`: chunks of theirs may have come early.
        self._announced: list[RequestId] = []

    def attach(self, courier: Incoming) -> None:
        self._courier = courier

    def detach(self) -> None:
        self._courier = None

    @property
    def num_receiving(self) -> int:
        """Requests that are open, and chunks of those that are not announced yet."""
        return self._boxes.num_open + self._boxes.num_early

    def start_receiving(self, id: RequestId) -> None:
        """Announce a request. What came for it early is received next."""
        self._boxes.announce(id)
        self._announced.append(id)

    def stop_receiving(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        self._boxes.forget(id)
        if purge and self._courier is not None:
            self._courier.purge(id)

    def receive(self) -> Iterator[Transfer | tuple[RequestId, StrettoError]]:
        """What has arrived since the last call, and what went wrong with a request."""
        announced = self._announced
        self._announced = []
        for id in announced:
            yield from self._take(id)
        while self._courier is not None and (chunk := self._courier.poll()) is not None:
            id = chunk.header.request
            try:
                self._boxes.push(chunk)
            except StrettoError as e:
                yield id, e
            else:
                yield from self._take(id)

    def _take(self, id: RequestId) -> Iterator[Transfer | tuple[RequestId, StrettoError]]:
        """Chunks of one request, each released when the next one is asked for."""
        if id not in self._boxes:
            return
        inbox = self._boxes[id]
        while (chunk := inbox.pop()) is not None:
            try:
                payload = unpack(self.kind, chunk)
                yield Transfer(self.name, id, payload, chunk.header.mark, chunk.event)
            except StrettoError as e:
                yield id, e
            finally:
                chunk.release()
            if inbox.ended and not len(inbox):
                self._boxes.forget(id)
                return
