"""Places for work that takes long, shared fairly between those who ask. On the event loop; imports
no torch."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class FairQueue:
    """`places` at once. Senders take turns, however many requests each has waiting, and where there
    are several places one sender never has all of them: somebody else's work can always begin."""

    places: int
    running: int = 0
    _by_sender: Counter[str] = field(default_factory=Counter)
    _waiting: dict[str, deque[asyncio.Future[None]]] = field(
        default_factory=dict
    )  # the next in turn first

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def enter(self, sender: str) -> None:
        """Wait for a place. Whoever enters must `leave`."""
        if self._free(sender) and sender not in self._waiting:
            self._take(sender)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(sender, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave(sender)  # the place came at the same moment
            elif turn in self._waiting.get(sender, ()):
                self._forget(sender, turn)
            raise

    def leave(self, sender: str) -> None:
        self.running -= 1
        self._by_sender[sender] -= 1
        if not self._by_sender[sender]:
            del self._by_sender[sender]
        self._next()

    def _free(self, sender: str) -> bool:
        share = max(1, self.places - 1)
        return self.running < self.places and self._by_sender[sender] < share

    def _take(self, sender: str) -> None:
        self.running += 1
        self._by_sender[sender] += 1

    def _next(self) -> None:
        for sender in list(self._waiting):
            turns = self._waiting[sender]
            while turns and turns[0].cancelled():  # who waited has left, and has not been told yet
                turns.popleft()
            if turns and self._free(sender):
                self._take(sender)
                turns.popleft().set_result(None)
                self._waiting[sender] = self._waiting.pop(sender)  # behind the others
            if not turns:
                del self._waiting[sender]

    def _forget(self, sender: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting[sender]
        turns.remove(turn)
        if not turns:
            del self._waiting[sender]
