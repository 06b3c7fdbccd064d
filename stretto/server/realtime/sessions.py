"""How many realtime sessions there may be, and what they share. One per server, on the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stretto.server.failures import Refused
from stretto.server.realtime.vad import Batcher, Silero


@dataclass(slots=True)
class Sessions:
    limit: int
    limit_per_owner: int  # 0: none
    batcher: Batcher = field(default_factory=lambda: Batcher(Silero))
    running: int = 0
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _by_owner: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.idle.set()

    @contextmanager
    def slot(self, owner: str) -> Iterator[None]:
        """A place, from before the handshake is answered to when all work of the session has ended."""
        if self.running >= self.limit:
            raise _full(f"{self.limit} realtime sessions are open already", "server_busy")
        if self.limit_per_owner and self._by_owner[owner] >= self.limit_per_owner:
            words = f"{self.limit_per_owner} realtime sessions of this API key are open already"
            raise _full(words, "rate_limit_exceeded")
        self.running += 1
        self._by_owner[owner] += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            self._by_owner[owner] -= 1
            if not self._by_owner[owner]:
                del self._by_owner[owner]
            if not self.running:
                self.idle.set()

    def drain(self) -> None:
        """Each session ends when it has said what it is saying."""
        self.draining.set()

    def close(self) -> None:
        self.batcher.close()


def _full(message: str, code: str) -> Refused:
    return Refused(429, f"{message}; try again soon", kind="rate_limit_error", code=code)
