"""How many realtime sessions there may be, and what they share. One per server, on the event
loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stretto.server.openai.error_body import Refused
from stretto.server.realtime.vad import Batcher, Silero
from stretto.server.shares import Shares


@dataclass(slots=True)
class SessionSlots:
    """`limit_per_client`: 0 lets each client have its share, at most half. `memory`: bytes of what
    all sessions hold and of messages that are still arriving."""

    limit: int
    limit_per_client: int
    memory: Shares
    batcher: Batcher = field(default_factory=lambda: Batcher(Silero))
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    _open: Shares = field(init=False)

    def __post_init__(self) -> None:
        self._open = Shares(self.limit, floor=1)
        self.idle.set()

    @property
    def running(self) -> int:
        return self._open.held

    @contextmanager
    def slot(self, client: str) -> Iterator[None]:
        """A place, from before the handshake is answered to when all work of the session has
        ended."""
        if self.running >= self.limit:
            raise _full(f"{self.limit} realtime sessions are open already", "server_busy")
        own = self._open.of(client)
        if (
            own >= self.limit_per_client
            if self.limit_per_client
            else not self._open.fits(client, 1)
        ):
            raise _full(
                f"{own} realtime sessions of this client are open already", "rate_limit_exceeded"
            )
        self._open.add(client, 1)
        self.idle.clear()
        try:
            yield
        finally:
            self._open.give_back(client, 1)
            if not self.running:
                self.idle.set()

    def drain(self) -> None:
        """Each session ends when its running answers have."""
        self.draining.set()

    def close(self) -> None:
        self.batcher.close()


def _full(message: str, code: str) -> Refused:
    return Refused(429, f"{message}; try again soon", kind="rate_limit_error", code=code)
