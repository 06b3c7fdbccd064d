"""The admission queue: how many requests are answered at once, and whose turn it is. Used on the
event loop, before anything of a request is computed.

There are so many places. A client (an API key or, without keys, an address) may have most of them
but not all, so that another client's request finds one. When all are taken, requests wait, and the
next place goes to the client that holds the fewest; of those that hold equally many to the one that
has gone without one for longest, and within a client in order of arrival. The queue is bounded:
when it is full, the last request of the client with the most requests in it makes room for one with
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
from stretto.server.tasks import shutting_down


@dataclass(slots=True)
class Admission:
    """Hands out `max_places`, of which a client may have `places_per_client`. A client may have
    `requests_per_client` requests, with those that wait (0: any number). `max_queue` requests may
    wait, each for `queue_timeout` seconds.

    Speech of a text that is still being written (a live text) holds its request in the engine open
    for as long as its client likes, and with it what the engine has for a stream. Clients share
    `max_live` of these, so that others' requests always find room in the engine."""

    max_places: int
    places_per_client: int
    requests_per_client: int = 0
    max_queue: int = 0
    queue_timeout: float = 60.0
    max_live: int = 32
    draining: bool = False  # nobody waits any more
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # no place is taken
    live: Shares = field(init=False)
    _requests: set[Place] = field(default_factory=set)  # with places and without
    _waiting: list[Place] = field(default_factory=list)  # of these, in order of arrival
    _num_arrived: int = 0
    _num_turns: int = 0  # that have come
    _last_turn: dict[str, int] = field(default_factory=dict)  # by client: its number

    def __post_init__(self) -> None:
        self.live = Shares(self.max_live)
        self.idle.set()

    @property
    def running(self) -> int:
        """Places that are taken."""
        return sum(place.weight for place in self._requests)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check(self, client: str) -> None:
        """Refuse a request for which there is neither a place nor room in the queue."""
        own = sum(place.weight for place in self._requests if place.client == client)
        waits = (
            self.running >= self.max_places
            or own >= self.places_per_client
            or self._next() is not None
        )
        if waits and self._overfull(client, 1) == client:
            raise self._full()
        self._check_client(client, 1)

    @asynccontextmanager
    async def place(self, client: str, *, live: bool = False) -> AsyncIterator[Place]:
        """A place, once it is this request's turn. Whoever is cancelled while waiting leaves the
        queue. `live`: the request is the speech of a text that is still being written."""
        self._check_client(client, 1)
        place = Place(self, client, needs_live=live)
        # it does not go before those who were here already
        self._last_turn.setdefault(client, self._num_turns)
        self._requests.add(place)
        try:
            await place.take()
            yield place
        finally:
            self._remove(place)

    def _remove(self, place: Place) -> None:
        """The request is over."""
        if place.holds_live:
            self.live.give_back(place.client, 1)
        self._requests.remove(place)
        if not any(other.client == place.client for other in self._requests):
            del self._last_turn[place.client]
        self.hand_over()

    def drain(self) -> None:
        """Refuse those that wait, and those that would have to: the server stops. Live texts that
        have begun still get their turns."""
        self.draining = True
        for place in list(self._waiting):
            self._refuse_if_new(place)

    def _refuse_if_new(self, place: Place) -> None:
        if not place.holds_live and not place.turn.done():
            self._waiting.remove(place)
            place.turn.set_exception(shutting_down())

    # -- for places

    def enqueue(self, place: Place) -> None:
        """Let it wait for the places that it has requested, in the order of its arrival."""
        if not place.arrival:
            self._num_arrived += 1
            place.arrival = self._num_arrived
        insort(self._waiting, place, key=attrgetter("arrival"))
        self.hand_over()
        if self.draining:
            self._refuse_if_new(place)
        elif not place.turn.done():
            self._bound_queue(place.client)

    def dequeue(self, place: Place) -> None:
        """It waits no longer, whether or not its turn has come."""
        if place in self._waiting:
            self._waiting.remove(place)
            self.hand_over()

    def allow_weight(self, place: Place, weight: int) -> int:
        """The places that one for so many requests can have. It counts as so many of its client's
        from now on."""
        weight = min(weight, self.places_per_client, self.requests_per_client or weight)
        more = max(0, weight - place.requests)
        self._check_client(place.client, more)
        place.requests += more
        return weight

    def _check_client(self, client: str, more: int) -> None:
        if not self.requests_per_client:
            return
        own = sum(place.requests for place in self._requests if place.client == client)
        if own + more > self.requests_per_client:
            words = f"{self.requests_per_client} requests of this API key run already"
            raise _refusal(words, "rate_limit_exceeded")

    # -- whose turn it is

    def hand_over(self) -> None:
        """Give free places to those whose turn it is."""
        while (place := self._next()) is not None:
            if place.requested > self.max_places - self.running:
                break
            self._waiting.remove(place)
            self._num_turns += 1
            self._last_turn[place.client] = self._num_turns
            place.weight = place.requested
            if place.needs_live:
                self.live.add(place.client, 1)
                place.needs_live = False
                place.holds_live = True
            place.turn.set_result(None)
        if self.running:
            self.idle.clear()
        else:
            self.idle.set()

    def _next(self) -> Place | None:
        """Places that are too few for it stay free until they are enough, so that a wide request is
        not overtaken for ever."""
        weights: Counter[str] = Counter()
        for place in self._requests:
            weights[place.client] += place.weight
        heads: dict[str, Place] = {}
        for place in self._queued():
            if place.client in heads:
                continue
            if not place.needs_live or self.live.fits(place.client, 1):
                heads[place.client] = place
        most = self.places_per_client
        return min(
            (p for p in heads.values() if weights[p.client] + p.requested <= most),
            key=lambda p: (weights[p.client], self._last_turn[p.client], p.arrival),
            default=None,
        )

    def _bound_queue(self, client: str) -> None:
        """With this client's new request in it, the last one of the client with the most may have
        to leave."""
        if (crowd := self._overfull(client)) is not None:
            last = next(p for p in reversed(self._queued()) if p.client == crowd)
            self._waiting.remove(last)
            last.turn.set_exception(self._full())
            self.hand_over()  # places may have been free for it, and too few

    def _overfull(self, client: str, more: int = 0) -> str | None:
        """The client whose last request must leave the queue if this client had `more` further
        requests in it: the one with the most. None: there is room."""
        waiting = Counter(place.client for place in self._queued())
        waiting[client] += more
        if waiting.total() <= self.max_queue:
            return None
        crowd = max(waiting, key=lambda other: waiting[other])
        return crowd if waiting[crowd] > waiting[client] else client

    def _queued(self) -> list[Place]:
        """Those that wait. One that was cancelled may not have left yet, and waits no more."""
        return [place for place in self._waiting if not place.turn.done()]

    def _full(self) -> Refused:
        more = f", and {self.max_queue} wait already" if self.max_queue else ""
        return _refusal(
            f"the server answers {self.max_places} requests at once, at most "
            f"{self.places_per_client} of one client{more}",
            "server_busy",
        )


@dataclass(slots=True, eq=False)
class Place:
    """What one request holds of an `Admission`. It may give its places back and take some again.

    A live text counts among `Admission.live` from its first place to its end, since what the engine
    has for it is held as long."""

    admission: Admission
    client: str
    needs_live: bool = False  # when its turn comes, it is counted among the live texts
    holds_live: bool = False  # it is
    weight: int = 0  # places that it holds
    waited: float = 0.0  # seconds, in all
    # of the admission
    requested: int = 0  # places that it waits for
    turn: asyncio.Future[None] = field(init=False)  # to have them
    arrival: int = 0  # its number; 0: the next time that it waits it has a new one
    requests: int = 1  # of its client's that it counts as

    async def take(self, weight: int = 1) -> None:
        """Wait for so many places. Those that it has are given back: many such requests could hold
        all places and wait for more."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        self.turn = loop.create_future()
        self.requested = weight
        self.weight = 0
        try:
            self.admission.enqueue(self)
            async with asyncio.timeout(self.admission.queue_timeout):
                await self.turn
        except TimeoutError:
            words = f"no place came free within {self.admission.queue_timeout:g} s"
            raise _refusal(words, "server_busy") from None
        finally:
            self.admission.dequeue(self)
        self.waited += loop.time() - since

    def give_back(self) -> None:
        self.arrival = 0
        self.weight = 0
        self.admission.hand_over()

    async def widen(self, weight: int) -> None:
        """Wait for so many places in place of one; its turn is still that of its arrival."""
        allowed = self.admission.allow_weight(self, weight)
        if allowed > self.weight:
            await self.take(allowed)


def _refusal(message: str, code: str) -> Refused:
    return Refused(429, f"{message}; try again soon", kind="rate_limit_error", code=code)
