"""The two sides of a link as a node sees them: an outlet that it sends on, an inlet that it receives on. Loop thread.

Between stages of one host a payload is handed over as it is: `send` ends in the receiving node's `read`. Between hosts
it becomes a chunk (several, if it exceeds a slot), which couriers carry: an outlet keeps what they have no room for and
remembers whose it is, an inlet puts what has arrived in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from stretto.connector.contract import Chunk
from stretto.connector.courier import Incoming, Outgoing
from stretto.errors import StrettoError
from stretto.stage.inbox import Inboxes
from stretto.stage.outbox import Outbox
from stretto.stage.payload.copies import adopt
from stretto.stage.payload.schema import Payload, unpack
from stretto.stage.scheduler.scheduler import Scheduler
from stretto.types import Mark, RequestId

P = TypeVar("P", bound=Payload)


@dataclass(slots=True)
class Arrival(Generic[P]):
    """What came for a request. The payload is the reader's while it reads; None: nothing but the mark."""

    payload: P | None
    mark: Mark
    event: torch.cuda.Event | None = None  # after which device tensors are there

    def adopt(self) -> None:
        """Make the current stream wait for the payload's device tensors, and keep their memory from being used again
        under it."""
        if self.event is not None and self.payload is not None:
            adopt(self.payload.tensors().values(), self.event)


class Inlet(Generic[P]):
    """The receiving side: payloads of the requests that were announced. `read` is given each in order; `fail` is told
    what went wrong with a request."""

    def __init__(
        self,
        link: str,
        kind: type[P],
        read: Callable[[RequestId, Arrival[P]], None],
        fail: Callable[[RequestId, StrettoError], None],
    ) -> None:
        self.link, self.kind = link, kind
        self.within = False  # the sender is in this host
        self._read, self._fail = read, fail
        self._open: set[RequestId] = set()
        self._courier: Incoming | None = None
        self._boxes = Inboxes()

    def __len__(self) -> int:
        """Requests that it holds anything for."""
        return len(self._open) + self._boxes.num_early

    def attach(self, courier: Incoming) -> None:
        self._courier = courier

    def detach(self) -> None:
        self._courier = None

    def open(self, id: RequestId) -> None:
        """Announce a request, and take what came for it early."""
        self._open.add(id)
        if not self.within:
            self._boxes.announce(id)
            self._take(id)

    def close(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        self._open.discard(id)
        if not self.within:
            self._boxes.forget(id)
            if purge and self._courier is not None:
                self._courier.purge(id)

    def hand(self, id: RequestId, arrival: Arrival[P]) -> None:
        """From the sender in this host."""
        if id not in self._open:
            return  # it was cancelled here
        if arrival.mark is Mark.REQUEST_END:
            self._open.discard(id)
        try:
            self._read(id, arrival)
        except StrettoError as e:
            self._fail(id, e)

    def turn(self) -> bool:
        """Take what has arrived. True: something had."""
        did = False
        while self._courier is not None and (chunk := self._courier.poll()) is not None:
            did = True
            id = chunk.header.request
            try:
                self._boxes.push(chunk)
                self._take(id)
            except StrettoError as e:
                self._fail(id, e)
        return did

    def _take(self, id: RequestId) -> None:
        if id not in self._boxes:
            return
        inbox = self._boxes[id]
        while (chunk := inbox.pop()) is not None:
            try:
                self._read(id, self._arrival(chunk))
            finally:
                chunk.release()
            if inbox.ended and not len(inbox):
                self._open.discard(id)
                self._boxes.forget(id)
                return

    def _arrival(self, chunk: Chunk) -> Arrival[P]:
        return Arrival(unpack(self.kind, chunk), chunk.header.mark, chunk.event)


class Outlet(Generic[P]):
    """The sending side: what has not left yet of each request, and which requests must rest."""

    def __init__(self, link: str, kind: type[P]) -> None:
        self.link, self.kind = link, kind
        self.handed = 0  # payloads, to a receiver in this host
        self._inlet: Inlet[P] | None = None
        self._courier: Outgoing | None = None
        self._open: dict[RequestId, int] = {}  # rows sent
        self._boxes: dict[RequestId, Outbox] = {}
        self._slot_bytes = 0  # of a chunk; known when the link is laid, which is before any request
        self._slow: set[RequestId] = set()  # whose listener does not keep up
        # Whose chunks wait for room, longest first. Few, so that a turn need not look at all boxes.
        self._full: dict[RequestId, None] = {}

    def __len__(self) -> int:
        """Requests that it holds anything for."""
        return len(self._open)

    @property
    def within(self) -> bool:
        """The receiver is in this host."""
        return self._inlet is not None

    def join(self, inlet: Inlet[P]) -> None:
        """The receiver is in this host: there is nothing in between."""
        self._inlet, inlet.within = inlet, True

    def attach(self, courier: Outgoing) -> None:
        self._courier, self._slot_bytes = courier, courier.slot_bytes

    def detach(self) -> None:
        self._courier = None

    def open(self, id: RequestId) -> None:
        self._open[id] = 0
        if self._inlet is None:
            self._boxes[id] = Outbox(id, self._offer)

    def sent(self, id: RequestId) -> int:
        """Rows of a request that were sent so far."""
        return self._open[id]

    def send(
        self, id: RequestId, payload: P | None, mark: Mark = Mark.MORE, event: torch.cuda.Event | None = None
    ) -> bool:
        """The next rows, complete once `event` has fired. False: there is no room for all; `flush` comes back to it."""
        if payload is not None:
            self._open[id] = payload.span.stop
        if self._inlet is not None:
            if mark is Mark.REQUEST_END:
                self._forget(id)
            self.handed += 1
            self._inlet.hand(id, Arrival(payload, mark, event))
            return True
        sent = self._boxes[id].send(payload, self._slot_bytes, mark, event)
        if not sent:
            self._full[id] = None
        elif mark is Mark.REQUEST_END:
            self._forget(id)
        return sent

    def flush(self) -> list[RequestId]:
        """Send what waited. Returns the requests of which nothing waits any more."""
        if not self._full:
            return []
        freed = [id for id in self._full if self._boxes[id].flush()]
        for id in freed:
            del self._full[id]
            if self._boxes[id].ended:
                self._forget(id)
        if self._full and self._courier is not None:
            self._courier.wake_when_sent()
        return freed

    def throttle(self, id: RequestId, on: bool) -> None:
        if on and id in self._open:
            self._slow.add(id)
        else:
            self._slow.discard(id)

    def blocked(self, id: RequestId) -> bool:
        """A request rests while its listener is slow or its chunks find no room: each may end before the other."""
        return id in self._slow or id in self._full

    def tell(self, id: RequestId, scheduler: Scheduler) -> None:
        """Tell the scheduler whether the request rests."""
        if id in scheduler:
            scheduler.set_blocked(id, self.blocked(id))

    def close(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        self._slow.discard(id)
        if id not in self._open or (not purge and id in self._full):
            return  # its last chunks still wait for room; `flush` comes back to it
        box = self._boxes.get(id)
        self._forget(id)
        if box is not None:
            box.drop()
        if purge and self._courier is not None:
            self._courier.purge(id)

    def _offer(self, chunk: Chunk) -> bool:
        return self._courier is not None and self._courier.offer(chunk)

    def _forget(self, id: RequestId) -> None:
        del self._open[id]
        self._boxes.pop(id, None)
        self._slow.discard(id)
        self._full.pop(id, None)
