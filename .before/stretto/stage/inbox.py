"""Where a stage finds its chunks. An `Inbox` per request keeps one link's chunks in order; `Inboxes` keeps those of
a link by request, and what came too early. All on the stage loop's thread.

A chunk is accepted iff it starts where the last one ended, `(segment, seq)` and span alike. A repeat is dropped, a
gap is an error, what belongs to an older epoch or segment is late and ignored, what belongs to a newer epoch waits
for the message that announces it. A request may get chunks before it is announced (control and data take different
ways); they are kept, within a bound on their number and bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from stretto.connector import wire
from stretto.connector.contract import EVERY_EPOCH, Chunk, ChunkHeader, Fences, OnLink
from stretto.errors import Bug, WireError
from stretto.types import Mark, RequestId, Span


class Gap(OnLink, WireError):
    """A chunk that does not follow the last one: something between them was lost, or was never sent right."""


class Unannounced(OnLink, WireError):
    """Too many chunks, or bytes, for requests that nobody has announced."""


class Outcome(Enum):
    """What became of a chunk that was pushed."""

    ACCEPTED = auto()
    REPEAT = auto()
    LATE = auto()
    EARLY = auto()


@dataclass(slots=True)
class Inbox:
    """The chunks of one request on one link, in order, until the stage pops them."""

    request: RequestId
    epoch: int = 0
    segment: int = 0
    mark: Mark = Mark.MORE  # of the last chunk accepted
    _stops: list[int] = field(default_factory=list)  # where each chunk of this segment ended: seq -> stop
    _queue: deque[Chunk] = field(default_factory=deque)

    @property
    def stop(self) -> int:
        """Rows of the segment accepted so far."""
        return self._stops[-1] if self._stops else 0

    @property
    def ended(self) -> bool:
        return self.mark is Mark.REQUEST_END

    def __len__(self) -> int:
        return len(self._queue)

    def __bool__(self) -> bool:
        return True

    def push(self, chunk: Chunk) -> Outcome:
        """Take over a chunk of this request and epoch. Dropped chunks are released; `Gap` if it does not follow."""
        header = chunk.header
        try:
            outcome = self._judge(header)
        except Gap:
            chunk.release()
            raise
        if outcome is not Outcome.ACCEPTED:
            chunk.release()
            return outcome
        if header.segment > self.segment:
            self.segment, self._stops = header.segment, []
        self._stops.append(header.stop)
        self.mark = header.mark
        self._queue.append(chunk)
        return outcome

    def pop(self) -> Chunk | None:
        """The next chunk, which is then the caller's to release."""
        return self._queue.popleft() if self._queue else None

    def interrupt(self, epoch: int, segment: int) -> int:
        """A new epoch begins, with `segment` from its start. What was not popped is released; returns how many.

        The segment is told, not counted: the sender may have been further than what came through."""
        if epoch <= self.epoch:
            raise Bug(f"request {self.request}: epoch {epoch} does not follow {self.epoch}")
        self.epoch, self.segment, self.mark, self._stops = epoch, segment, Mark.MORE, []
        return self.drop()

    def drop(self) -> int:
        """Release what was not popped; returns how many."""
        dropped = len(self._queue)
        while (chunk := self.pop()) is not None:
            chunk.release()
        return dropped

    def _judge(self, header: ChunkHeader) -> Outcome:
        if header.epoch < self.epoch or header.segment < self.segment:
            return Outcome.LATE
        if header.segment == self.segment and header.seq < len(self._stops):
            if not self._same(header):
                raise self._gap(header, "differs from the chunk it repeats")
            return Outcome.REPEAT
        if header.segment == self.segment and self.mark is Mark.MORE:
            follows = (header.seq, header.start) == (len(self._stops), self.stop)
        else:
            follows = (
                self.mark is Mark.SEGMENT_END
                and header.segment == self.segment + 1
                and (header.seq, header.start) == (0, 0)
            )
        if not follows:
            raise self._gap(header, "does not follow the last chunk")
        return Outcome.ACCEPTED

    def _same(self, header: ChunkHeader) -> bool:
        start = self._stops[header.seq - 1] if header.seq else 0
        last = header.seq == len(self._stops) - 1
        return header.span == Span(start, self._stops[header.seq]) and header.mark == (self.mark if last else Mark.MORE)

    def _gap(self, header: ChunkHeader, what: str) -> Gap:
        return Gap(
            f"chunk {header.segment}/{header.seq} [{header.start}, {header.stop}) {what}: have "
            f"{self.segment}/{len(self._stops) - 1} up to {self.stop}, {self.mark.name}",
            request=header.request,
        )


@dataclass(slots=True)
class Inboxes:
    """The inboxes of a link, by request.

    `early_chunks` and `early_bytes` bound what is kept for all requests (or epochs) that are not announced yet.
    Keep `early_chunks` below the link's credits where chunks keep their slots (no upload between)."""

    early_chunks: int = 256
    early_bytes: int = 64 << 20
    counts: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    _open: dict[RequestId, Inbox] = field(default_factory=dict)
    _early: dict[RequestId, list[Chunk]] = field(default_factory=dict)
    _num_early: int = 0
    _early_size: int = 0
    _over: Fences = field(default_factory=Fences)

    def __getitem__(self, request: RequestId) -> Inbox:
        return self._open[request]

    def __contains__(self, request: RequestId) -> bool:
        return request in self._open

    def __iter__(self) -> Iterator[Inbox]:
        return iter(self._open.values())

    @property
    def num_early(self) -> int:
        return self._num_early

    def announce(self, request: RequestId, epoch: int = 0, segment: int = 0) -> Inbox:
        """Open the inbox of a request; what came early is pushed into it (and may raise `Gap`)."""
        if request in self._open:
            raise Bug(f"request {request} is announced twice")
        inbox = self._open[request] = Inbox(request, epoch, segment)
        self._push_early(inbox)
        return inbox

    def push(self, chunk: Chunk) -> Outcome:
        """Take over a chunk. Raises `Gap` or `Unannounced`, naming the request; the chunk is then released."""
        header = chunk.header
        inbox = self._open.get(header.request)
        if self._over.stale(header):
            chunk.release()
            outcome = Outcome.LATE
        elif inbox is None or header.epoch > inbox.epoch:
            self._keep(chunk)
            outcome = Outcome.EARLY
        else:
            outcome = inbox.push(chunk)
        self.counts[outcome] += 1
        return outcome

    def interrupt(self, request: RequestId, epoch: int, segment: int) -> None:
        """The request goes on in a new epoch, with `segment`; what is left of the old one is dropped."""
        inbox = self._open[request]
        self.counts[Outcome.LATE] += inbox.interrupt(epoch, segment)
        self._push_early(inbox)

    def forget(self, request: RequestId) -> None:
        """The request is over (done, aborted, failed), announced or not; later chunks of it are ignored."""
        self._over.purge(request, EVERY_EPOCH)
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
            raise Unannounced(f"{self._num_early} chunks wait for their announcement already", request=request)
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
