"""How many requests are answered at once. Used on the event loop, before anything of a request is computed."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from stretto.server.failures import Refused


@dataclass(slots=True)
class Admission:
    """Counts requests that are being answered. Those beyond the limit wait in a bounded queue, first
    come, first served; the rest is refused. On the event loop."""

    limit: int
    limit_per_owner: int  # 0: none
    queue: int = 0  # how many may wait
    patience: float = 60.0  # seconds that each of them does
    running: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _by_owner: Counter[str] = field(default_factory=Counter)
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check(self, owner: str) -> None:
        """Refuse a request for which there is neither a slot nor a place in the queue."""
        if self.running >= self.limit and self.waiting >= self.queue:
            more = f", and {self.queue} wait already" if self.queue else ""
            raise self._full(f"the server answers {self.limit} requests at once, and does{more}", "server_busy")
        if self.limit_per_owner and self._by_owner[owner] >= self.limit_per_owner:
            raise self._full(f"{self.limit_per_owner} requests of this API key run already", "rate_limit_exceeded")

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[float]:
        """One of the slots, once it is this request's turn; gives the seconds that it waited. Whoever is cancelled
        while waiting leaves the queue."""
        self.check(owner)
        with self._counted(owner):
            waited = await self._turn() if self.running >= self.limit else self._take()
            try:
                yield waited
            finally:
                self._pass_on()

    @contextmanager
    def slot(self, owner: str) -> Iterator[None]:
        """One of the slots now, or none at all."""
        if self.running >= self.limit:
            raise self._full(f"the server answers {self.limit} requests at once, and does", "server_busy")
        self.check(owner)
        with self._counted(owner):
            self._take()
            try:
                yield
            finally:
                self._pass_on()

    @contextmanager
    def _counted(self, owner: str) -> Iterator[None]:
        self._by_owner[owner] += 1
        try:
            yield
        finally:
            self._by_owner[owner] -= 1
            if not self._by_owner[owner]:
                del self._by_owner[owner]

    def _take(self) -> float:
        self.running += 1
        self.idle.clear()
        return 0.0

    async def _turn(self) -> float:
        """Wait until a slot is handed over. It stays counted meanwhile, so that no other request can take it."""
        loop = asyncio.get_running_loop()
        turn, since = loop.create_future(), loop.time()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self.patience):
                await turn
        except BaseException as e:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it came at the same moment
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(e, TimeoutError):
                raise self._full(f"no slot came free within {self.patience:g} s", "server_busy") from None
            raise
        return loop.time() - since

    def _pass_on(self) -> None:
        """A slot is free: hand it to the next in the queue, if there is one."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1
        if not self.running:
            self.idle.set()

    @staticmethod
    def _full(message: str, code: str) -> Refused:
        return Refused(429, f"{message}; try again soon", kind="rate_limit_error", code=code)
