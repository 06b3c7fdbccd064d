"""The two sides of a link as a node sees them: outboxes that it sends from, inboxes that it reads. Loop thread only.

`Link` hands chunks to whatever carries them and remembers which requests found no room; `Intake` takes what has
arrived and gives it, in order, to the node that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from stretto.connector.contract import EVERY_EPOCH, Chunk
from stretto.connector.courier import InLink, OutLink
from stretto.errors import StrettoError
from stretto.stage.inbox import Inboxes
from stretto.stage.outbox import Outbox
from stretto.stage.payload.chunker import ChunkPolicy
from stretto.stage.payload.schema import Payload
from stretto.stage.request import Confirmed
from stretto.stage.scheduler.scheduler import Scheduler
from stretto.types import Mark, RequestId

P = TypeVar("P", bound=Payload)

TOGETHER = ChunkPolicy(first=1, each=1, limit=4096)
"""All rows that a node sends at once go as one chunk: when they go is the node's business."""


class Link(Generic[P]):
    """The node's side of the link it sends on: outboxes of the requests that speak."""

    def __init__(self, kind: type[P]) -> None:
        self.kind = kind
        self.out: OutLink | None = None
        self.boxes: dict[RequestId, Outbox[P]] = {}
        self._slow: set[RequestId] = set()  # whose listener does not keep up
        # Whose chunks wait for room, longest first. Few, so that a turn need not look at all boxes.
        self._full: dict[RequestId, None] = {}

    def open(self, id: RequestId) -> None:
        self.boxes[id] = Outbox(self.kind, id, TOGETHER, self._offer)

    def _offer(self, parcel: object) -> bool:
        return self.out is not None and self.out.offer(parcel)  # type: ignore[arg-type]

    def send(self, id: RequestId, confirmed: Confirmed, mark: Mark = Mark.MORE) -> bool:
        """Send what was added up to `confirmed`. False: there is no room; `flush` comes back to it."""
        sent = self.boxes[id].send(confirmed, mark)
        if not sent:
            self._full[id] = None
        elif mark is Mark.REQUEST_END:
            self._forget(id)
        return sent

    def flush(self) -> list[RequestId]:
        """Send what waited. Returns the requests whose outbox is empty again after it was not."""
        if not self._full:
            return []
        freed = [id for id in self._full if self.boxes[id].flush()]
        for id in freed:
            del self._full[id]
            if self.boxes[id].ended:
                self._forget(id)
        if self._full and self.out is not None:
            self.out.wake_when_sent()
        return freed

    def throttle(self, id: RequestId, on: bool) -> None:
        if on and id in self.boxes:
            self._slow.add(id)
        else:
            self._slow.discard(id)

    def blocked(self, id: RequestId) -> bool:
        """A request rests while its listener is slow or its chunks find no room: each may end before the other."""
        return id in self._slow or id in self._full

    def settle(self, id: RequestId, scheduler: Scheduler) -> None:
        """Tell the scheduler whether the request rests."""
        if id in scheduler:
            scheduler.set_blocked(id, self.blocked(id))

    def close(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        box = self.boxes.get(id)
        self._slow.discard(id)
        if box is None or (not purge and id in self._full):
            return  # its last chunks still wait for room; `flush` comes back to it
        self._forget(id)
        box.drop()
        if purge and self.out is not None:
            self.out.purge(id, EVERY_EPOCH)

    def _forget(self, id: RequestId) -> None:
        del self.boxes[id]
        self._slow.discard(id)
        self._full.pop(id, None)


class Intake:
    """The node's side of the link it receives on: inboxes of the requests that were announced. `read` is given each
    chunk in order and must not keep it; `fail` is told what went wrong with a request."""

    def __init__(
        self, read: Callable[[RequestId, Chunk], None], fail: Callable[[RequestId, StrettoError], None]
    ) -> None:
        self.link: InLink | None = None
        self.boxes = Inboxes()
        self._read, self._fail = read, fail

    def open(self, id: RequestId) -> None:
        """Announce a request, and take what came for it early."""
        self.boxes.announce(id)
        self._take(id)

    def turn(self) -> bool:
        """Take what has arrived. True: something had."""
        did = False
        while self.link is not None and (chunk := self.link.poll()) is not None:
            did = True
            id = chunk.header.request
            try:
                self.boxes.push(chunk)
                self._take(id)
            except StrettoError as e:
                self._fail(id, e)
        return did

    def close(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        self.boxes.forget(id)
        if purge and self.link is not None:
            self.link.purge(id, EVERY_EPOCH)

    def _take(self, id: RequestId) -> None:
        if id not in self.boxes:
            return
        inbox = self.boxes[id]
        while (chunk := inbox.pop()) is not None:
            try:
                self._read(id, chunk)
            finally:
                chunk.release()
            if inbox.ended and not len(inbox):
                self.boxes.forget(id)
                return
