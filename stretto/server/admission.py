"""How many requests are answered at once, and whose turn it is. Used on the event loop, before
anything of a request is computed.

There are so many places. An owner (an API key or, without keys, an address) may have most of them
but not all, so that another owner's request finds one. When all are taken, requests wait, and the
next place goes to the owner that holds the fewest; of those that hold equally many to the one that
has gone without one for longest, and within an owner in order of arrival. The queue is bounded:
when it is full, the last request of the owner with the most requests in it makes room for one with
fewer."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stretto.server.openai.error_body import Refused
from stretto.server.shares import Shares


@dataclass(slots=True, eq=False)
class _Turn:
    """A request that waits for places."""

    owner: str
    weight: int  # places that it needs
    number: int  # of its arrival
    reading: bool  # it will hold one of the readings, and has none yet
    ready: asyncio.Future[None]


@dataclass(slots=True)
class Admission:
    """`limit`: places, of which an owner may have `share`. `limit_per_owner`: requests of an owner,
    with those that wait; 0: any number. `queue`: requests that may wait, each for `patience`
    seconds.

    Speech of a text that is still being written holds its request in the engine open for as long as
    its client likes, and with it what the engine has for a stream. Owners share `live` of such
    readings, so that others' requests always find room in the engine."""

    limit: int
    share: int
    limit_per_owner: int = 0
    queue: int = 0
    patience: float = 60.0
    live: int = 32
    running: int = 0  # places that are taken
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    readings: Shares = field(init=False)
    _places: Counter[str] = field(default_factory=Counter)  # taken, by owner
    _requests: Counter[str] = field(default_factory=Counter)  # with places and without, by owner
    _waiting: list[_Turn] = field(default_factory=list)  # in order of arrival
    _arrivals: int = 0
    _handed: int = 0  # turns that have come, in all
    _last: dict[str, int] = field(
        default_factory=dict
    )  # by owner: the count of these at its last turn

    def __post_init__(self) -> None:
        self.readings = Shares(self.live)
        self.idle.set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check(self, owner: str) -> None:
        """Refuse a request for which there is neither a place nor room in the queue."""
        waits = (
            self.running >= self.limit
            or self._places[owner] >= self.share
            or self._next() is not None
        )
        if waits and self._overfull(owner, 1) == owner:
            raise self._full()
        self.check_owner(owner, 1)

    @asynccontextmanager
    async def place(self, owner: str, *, reading: bool = False) -> AsyncIterator[Place]:
        """A place, once it is this request's turn. Whoever is cancelled while waiting leaves the
        queue. `reading`: of a text that is still being written."""
        self.check(owner)
        place = Place(self, owner, reading)
        self._requests[owner] += 1
        self._last.setdefault(
            owner, self._handed
        )  # it does not go before those who were here already
        try:
            await place.take()
            yield place
        finally:
            place.close()

    def check_owner(self, owner: str, more: int) -> None:
        if self.limit_per_owner and self._requests[owner] + more > self.limit_per_owner:
            words = f"{self.limit_per_owner} requests of this API key run already"
            raise _refused(words, "rate_limit_exceeded")

    # -- for places

    def weight(self, wanted: int) -> int:
        """How many places a request can ever have."""
        return min(wanted, self.share, self.limit_per_owner or self.share)

    def arrive(self) -> int:
        self._arrivals += 1
        return self._arrivals

    async def turn(
        self, owner: str, weight: int, number: int, reading: bool, back: int = 0
    ) -> None:
        """Until places are handed over. `back`: so many are given back for them."""
        turn = _Turn(owner, weight, number, reading, asyncio.get_running_loop().create_future())
        insort(self._waiting, turn, key=lambda t: t.number)
        self.give_back(owner, back, False)
        if not turn.ready.done() and (crowd := self._overfull(owner)):
            last = next(t for t in reversed(self._waiting) if t.owner == crowd)
            self._waiting.remove(last)
            last.ready.set_exception(self._full())
            self._hand_over()  # places may have been free for it, and too few
        try:
            async with asyncio.timeout(self.patience):
                await turn.ready
        except BaseException as e:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._hand_over()
            elif not turn.ready.cancelled() and turn.ready.exception() is None:
                self.give_back(owner, weight, reading)  # it came at the same moment
            if isinstance(e, TimeoutError):
                raise _refused(
                    f"no place came free within {self.patience:g} s", "server_busy"
                ) from None
            raise

    def give_back(self, owner: str, weight: int, reading: bool) -> None:
        """Places are free, and a reading if there was one: whoever is next has them."""
        self.running -= weight
        _subtract(self._places, owner, weight)
        if reading:
            self.readings.give_back(owner, 1)
        self._hand_over()
        if not self.running:
            self.idle.set()

    def count(self, owner: str, more: int) -> None:
        _subtract(self._requests, owner, -more)
        if owner not in self._requests:
            del self._last[owner]

    # -- whose turn it is

    def _hand_over(self) -> None:
        while (turn := self._next()) is not None and turn.weight <= self.limit - self.running:
            self._waiting.remove(turn)
            self._handed += 1
            self._last[turn.owner] = self._handed
            self.running += turn.weight
            self._places[turn.owner] += turn.weight
            if turn.reading:
                self.readings.add(turn.owner, 1)
            self.idle.clear()
            turn.ready.set_result(None)

    def _next(self) -> _Turn | None:
        """Places that are too few for it stay free until they are enough, so that a wide request is
        not overtaken for ever."""
        heads: dict[str, _Turn] = {}
        for turn in self._waiting:
            if turn.owner in heads or turn.ready.done():  # who was cancelled has not left yet
                continue
            if not turn.reading or self.readings.fits(turn.owner, 1):
                heads[turn.owner] = turn
        return min(
            (t for t in heads.values() if self._places[t.owner] + t.weight <= self.share),
            key=lambda t: (self._places[t.owner], self._last[t.owner], t.number),
            default=None,
        )

    def _overfull(self, owner: str, more: int = 0) -> str | None:
        """The owner whose last request must leave the queue, with so `more` of this owner's: the
        one with the most. None: there is room."""
        waiting = Counter(turn.owner for turn in self._waiting)
        waiting[owner] += more
        if waiting.total() <= self.queue:
            return None
        crowd = max(waiting, key=lambda other: waiting[other])
        return crowd if waiting[crowd] > waiting[owner] else owner

    def _full(self) -> Refused:
        more = f", and {self.queue} wait already" if self.queue else ""
        return _refused(
            f"the server answers {self.limit} requests at once, at most {self.share} of one "
            f"client{more}",
            "server_busy",
        )


@dataclass(slots=True, eq=False)
class Place:
    """What one request holds of an `Admission`. It may give its places back and take some again:
    `give_back`, `take`.

    A reading is held from the first place to the end, since what the engine has for it is too."""

    admission: Admission
    owner: str
    reading: bool
    weight: int = 0  # places that it holds
    waited: float = 0.0  # seconds, in all
    _number: int = 0
    _counted: int = 1  # among its owner's requests
    _reads: bool = False  # holds one of the readings

    async def take(self, weight: int = 1) -> None:
        """Wait for so many places, in place of those that it has."""
        loop, since = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        self._number = self._number or self.admission.arrive()
        back = self.weight
        self.weight = 0
        await self.admission.turn(
            self.owner, weight, self._number, self.reading and not self._reads, back
        )
        self.weight = weight
        self._reads = self.reading
        self.waited += loop.time() - since

    def give_back(self) -> None:
        if self.weight:
            weight = self.weight
            self.weight = 0
            self._number = 0  # the next time it arrives again
            self.admission.give_back(self.owner, weight, False)

    async def widen(self, weight: int) -> None:
        """So many places in place of one. Whoever must wait for them gives up the one that it has,
        or many such could hold all places and wait for more; its turn is still that of its
        arrival."""
        admission, weight = self.admission, self.admission.weight(weight)
        if weight <= self.weight:
            return
        admission.check_owner(self.owner, weight - self._counted)
        admission.count(self.owner, weight - self._counted)
        self._counted = weight
        await self.take(weight)

    def close(self) -> None:
        self.give_back()
        if self._reads:
            self._reads = False
            self.admission.give_back(self.owner, 0, True)
        self.admission.count(self.owner, -self._counted)
        self._counted = 0


def _subtract(counts: Counter[str], owner: str, size: int) -> None:
    counts[owner] -= size
    if not counts[owner]:
        del counts[owner]


def _refused(message: str, code: str) -> Refused:
    return Refused(429, f"{message}; try again soon", kind="rate_limit_error", code=code)
