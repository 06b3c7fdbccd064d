"""How many requests are answered at once, and whose turn it is. Used on the event loop, before
anything of a request is computed.

There are so many places. A sender (an API key or, without keys, an address) may have most of them
but not all, so that another sender's request finds one. When all are taken, requests wait, and the
next place goes to the sender that holds the fewest; of those that hold equally many to the one that
has gone without one for longest, and within a sender in order of arrival. The queue is bounded:
when it is full, the last request of the sender with the most requests in it makes room for one with
fewer."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from operator import attrgetter

from stretto.server.openai.error_body import Refused
from stretto.server.shares import Shares


@dataclass(slots=True)
class Admission:
    """`limit`: places, of which a sender may have `share`. `limit_per_sender`: requests of a
    sender, with those that wait; 0: any number. `queue`: requests that may wait, each for
    `patience` seconds.

    Speech of a text that is still being written holds its request in the engine open for as long as
    its client likes, and with it what the engine has for a stream. Senders share `live` of such
    readings, so that others' requests always find room in the engine."""

    limit: int
    share: int
    limit_per_sender: int = 0
    queue: int = 0
    patience: float = 60.0
    live: int = 32
    running: int = 0  # places that are taken
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    readings: Shares = field(init=False)
    _places: Counter[str] = field(default_factory=Counter)  # taken, by sender
    _requests: Counter[str] = field(default_factory=Counter)  # with places and without, by sender
    _waiting: list[Place] = field(default_factory=list)  # in order of arrival
    _arrivals: int = 0
    _handed: int = 0  # turns that have come, in all
    # by sender: the count of these at its last turn
    _last: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.readings = Shares(self.live)
        self.idle.set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check(self, sender: str) -> None:
        """Refuse a request for which there is neither a place nor room in the queue."""
        waits = (
            self.running >= self.limit
            or self._places[sender] >= self.share
            or self._next() is not None
        )
        if waits and self._overfull(sender, 1) == sender:
            raise self._full()
        self._check_sender(sender, 1)

    @asynccontextmanager
    async def place(self, sender: str, *, reading: bool = False) -> AsyncIterator[Place]:
        """A place, once it is this request's turn. Whoever is cancelled while waiting leaves the
        queue. `reading`: of a text that is still being written."""
        self.check(sender)
        place = Place(self, sender, reading)
        # it does not go before those who were here already
        self._last.setdefault(sender, self._handed)
        self._requests[sender] += 1
        try:
            await place.take()
            yield place
        finally:
            self._leave(place)

    # -- for places

    async def wait(self, place: Place, weight: int) -> None:
        """Until it has so many places, for which those that it has are given back."""
        place.wanted = weight
        place.turn = asyncio.get_running_loop().create_future()
        if not place.arrival:
            self._arrivals += 1
            place.arrival = self._arrivals
        insort(self._waiting, place, key=attrgetter("arrival"))
        self.give_back(place)
        if not place.turn.done():
            self._bound_queue(place.sender)
        try:
            async with asyncio.timeout(self.patience):
                await place.turn
        except TimeoutError:
            words = f"no place came free within {self.patience:g} s"
            raise _refused(words, "server_busy") from None
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
                self._hand_over()

    def give_back(self, place: Place) -> None:
        """Its places are free: whoever is next has them."""
        self.running -= place.weight
        _subtract(self._places, place.sender, place.weight)
        place.weight = 0
        self._hand_over()
        if not self.running:
            self.idle.set()

    def widen(self, place: Place, wanted: int) -> int:
        """The places that one for so many requests can have. It counts as so many of its sender's
        from now on."""
        weight = min(wanted, self.share, self.limit_per_sender or self.share)
        more = max(0, weight - place.requests)
        self._check_sender(place.sender, more)
        self._requests[place.sender] += more
        place.requests += more
        return weight

    def _leave(self, place: Place) -> None:
        if place.reads:
            self.readings.give_back(place.sender, 1)
        self.give_back(place)
        _subtract(self._requests, place.sender, place.requests)
        if place.sender not in self._requests:
            del self._last[place.sender]

    def _check_sender(self, sender: str, more: int) -> None:
        if self.limit_per_sender and self._requests[sender] + more > self.limit_per_sender:
            words = f"{self.limit_per_sender} requests of this API key run already"
            raise _refused(words, "rate_limit_exceeded")

    # -- whose turn it is

    def _hand_over(self) -> None:
        while (place := self._next()) is not None and place.wanted <= self.limit - self.running:
            self._waiting.remove(place)
            self._handed += 1
            self._last[place.sender] = self._handed
            self.running += place.wanted
            self._places[place.sender] += place.wanted
            self.idle.clear()
            place.weight = place.wanted
            if place.needs_reading:
                self.readings.add(place.sender, 1)
                place.reads = True
            place.turn.set_result(None)

    def _next(self) -> Place | None:
        """Places that are too few for it stay free until they are enough, so that a wide request is
        not overtaken for ever."""
        heads: dict[str, Place] = {}
        for place in self._waiting:
            if place.sender in heads or place.turn.done():  # who was cancelled has not left yet
                continue
            if not place.needs_reading or self.readings.fits(place.sender, 1):
                heads[place.sender] = place
        return min(
            (p for p in heads.values() if self._places[p.sender] + p.wanted <= self.share),
            key=lambda p: (self._places[p.sender], self._last[p.sender], p.arrival),
            default=None,
        )

    def _bound_queue(self, sender: str) -> None:
        """With this sender's new request in it, the last one of the sender with the most may have
        to leave."""
        if crowd := self._overfull(sender):
            last = next(p for p in reversed(self._waiting) if p.sender == crowd)
            self._waiting.remove(last)
            last.turn.set_exception(self._full())
            self._hand_over()  # places may have been free for it, and too few

    def _overfull(self, sender: str, more: int = 0) -> str | None:
        """The sender whose last request must leave the queue, with so `more` of this sender's: the
        one with the most. None: there is room."""
        waiting = Counter(place.sender for place in self._waiting)
        waiting[sender] += more
        if waiting.total() <= self.queue:
            return None
        crowd = max(waiting, key=lambda other: waiting[other])
        return crowd if waiting[crowd] > waiting[sender] else sender

    def _full(self) -> Refused:
        more = f", and {self.queue} wait already" if self.queue else ""
        return _refused(
            f"the server answers {self.limit} requests at once, at most {self.share} of one "
            f"client{more}",
            "server_busy",
        )


@dataclass(slots=True, eq=False)
class Place:
    """What one request holds of an `Admission`. It may give its places back and take some again.

    A reading is held from the first place to the end, since what the engine has for it is too."""

    admission: Admission
    sender: str
    reading: bool
    weight: int = 0  # places that it holds
    waited: float = 0.0  # seconds, in all
    # of the admission
    wanted: int = 0  # places that it waits for
    turn: asyncio.Future[None] = field(init=False)  # to have them
    arrival: int = 0  # its number; 0: the next time that it waits it has a new one
    requests: int = 1  # of its sender's that it counts as
    reads: bool = False  # holds one of the readings

    @property
    def needs_reading(self) -> bool:
        return self.reading and not self.reads

    async def take(self, weight: int = 1) -> None:
        """Wait for so many places, in place of those that it has."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        await self.admission.wait(self, weight)
        self.waited += loop.time() - since

    def give_back(self) -> None:
        self.arrival = 0
        self.admission.give_back(self)

    async def widen(self, wanted: int) -> None:
        """So many places in place of one. Whoever must wait for them gives up the one that it has,
        or many such could hold all places and wait for more; its turn is still that of its
        arrival."""
        weight = self.admission.widen(self, wanted)
        if weight > self.weight:
            await self.take(weight)


def _subtract(counts: Counter[str], sender: str, size: int) -> None:
    counts[sender] -= size
    if not counts[sender]:
        del counts[sender]


def _refused(message: str, code: str) -> Refused:
    return Refused(429, f"{message}; try again soon", kind="rate_limit_error", code=code)
