"""The two sides of a link as a node sees them: an outlet that it sends on, an inlet that it receives on. Loop thread.

Between stages of one host a payload is handed over as it is: `send` ends in the receiving node's `read`. Between hosts
it goes as chunks: `away.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from stretto.connector.contract import Chunk
from stretto.errors import StrettoError
from stretto.stage.away import Arrivals, Departures
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
        self.away = Arrivals(self._unpack, fail, self._open.discard)  # of a sender in another host

    def __len__(self) -> int:
        """Requests that it holds anything for."""
        return len(self._open) + self.away.num_early

    def open(self, id: RequestId) -> None:
        """Announce a request, and take what came for it early."""
        self._open.add(id)
        if not self.within:
            self.away.open(id)

    def close(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        self._open.discard(id)
        if not self.within:
            self.away.close(id, purge)

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
        """Take what has arrived from another host. True: something had."""
        return not self.within and self.away.turn()

    def _unpack(self, id: RequestId, chunk: Chunk) -> None:
        self._read(id, Arrival(unpack(self.kind, chunk), chunk.header.mark, chunk.event))


class Outlet(Generic[P]):
    """The sending side: how much of each request was sent, and which requests must rest."""

    def __init__(self, link: str, kind: type[P]) -> None:
        self.link, self.kind = link, kind
        self.handed = 0  # payloads, to a receiver in this host
        self.away = Departures()  # to one in another host
        self._inlet: Inlet[P] | None = None
        self._open: dict[RequestId, int] = {}  # rows sent
        self._slow: set[RequestId] = set()  # whose listener does not keep up

    def __len__(self) -> int:
        """Requests that it holds anything for."""
        return len(self._open)

    @property
    def within(self) -> bool:
        """The receiver is in this host."""
        return self._inlet is not None

    def join(self, inlet: Inlet[P] | None) -> None:
        """The receiver is in this host: there is nothing in between. None: it is not."""
        self._inlet = inlet
        if inlet is not None:
            inlet.within = True

    def open(self, id: RequestId) -> None:
        self._open[id] = 0
        if self._inlet is None:
            self.away.open(id)

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
        sent = self.away.send(id, payload, mark, event)
        if sent and mark is Mark.REQUEST_END:
            self._forget(id)
        return sent

    def flush(self) -> list[RequestId]:
        """Send what waited. Returns the requests of which nothing waits any more."""
        freed = self.away.flush() if self.away.full else []
        for id in freed:
            if self.away.ended(id):
                self._forget(id)
        return freed

    def throttle(self, id: RequestId, on: bool) -> None:
        if on and id in self._open:
            self._slow.add(id)
        else:
            self._slow.discard(id)

    def blocked(self, id: RequestId) -> bool:
        """A request rests while its listener is slow or its chunks find no room: each may end before the other."""
        return id in self._slow or id in self.away.full

    def tell(self, id: RequestId, scheduler: Scheduler) -> None:
        """Tell the scheduler whether the request rests."""
        if id in scheduler:
            scheduler.set_blocked(id, self.blocked(id))

    def close(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        self._slow.discard(id)
        if id in self._open and (purge or id not in self.away.full):  # else its last chunks still wait for room
            self._forget(id, purge)

    def _forget(self, id: RequestId, purge: bool = False) -> None:
        del self._open[id]
        self._slow.discard(id)
        self.away.forget(id, purge)
