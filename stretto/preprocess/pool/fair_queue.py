"""Places for work that takes long, shared fairly between those who ask. On the event loop; imports
no torch."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class FairQueue:
    """`places` at once. Clients take turns, however many requests each has waiting, and where there
    are several places one client never has all of them: somebody else's work can always begin."""

    places: int
    running: int = 0
    _by_client: Counter[str] = field(default_factory=Counter)
    _waiting: dict[str, deque[asyncio.Future[None]]] = field(
        default_factory=dict
    )  # the next in turn first

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def enter(self, client: str) -> None:
        """Wait for a place. Whoever enters must `leave`."""
        if self._free(client) and client not in self._waiting:
            self._take(client)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave(client)  # the place came at the same moment
            elif turn in self._waiting.get(client, ()):
                self._forget(client, turn)
            raise

    def leave(self, client: str) -> None:
        self.running -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]
        self._next()

    def _free(self, client: str) -> bool:
        share = max(1, self.places - 1)
        return self.running < self.places and self._by_client[client] < share

    def _take(self, client: str) -> None:
        self.running += 1
        self._by_client[client] += 1

    def _next(self) -> None:
        for client in list(self._waiting):
            turns = self._waiting[client]
            while turns and turns[0].cancelled():  # who waited has left, and has not been told yet
                turns.popleft()
            if turns and self._free(client):
                self._take(client)
                turns.popleft().set_result(None)
                self._waiting[client] = self._waiting.pop(client)  # behind the others
            if not turns:
                del self._waiting[client]

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting[client]
        turns.remove(turn)
        if not turns:
            del self._waiting[client]
