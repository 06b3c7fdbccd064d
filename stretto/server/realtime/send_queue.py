"""The events that wait to be sent to one client: bounded, in order, written by a task of its own.
On the event loop.

Events are encoded when they are put in. A response waits for room before it adds sound, so only
answers to a client's own events can pile up; a client that sends events and does not read is
closed, and so is one whose sessions hold all the memory that they may."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from stretto.server.realtime.server_events import ServerEvent
from stretto.server.shares import Holding

HIGH_WATER_BYTES = 512 << 10  # bytes in the queue at which a response waits
MAX_BYTES = 8 << 20
_encode = msgspec.json.Encoder().encode


class SlowClient(Exception):
    """The client does not read what it is sent."""


@dataclass(slots=True)
class SendQueue:
    timeout: float  # seconds that one message may take
    held: Holding  # of the memory of all sessions
    num_sent: int = 0  # messages
    overflowed: bool = False
    _waiting: deque[bytes] = field(default_factory=deque)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _has_space: asyncio.Event = field(default_factory=asyncio.Event)
    _finished: bool = False

    def __post_init__(self) -> None:
        self._has_space.set()

    def put(self, event: ServerEvent) -> None:
        if self._finished or self.overflowed:
            return
        event.event_id = f"event_{secrets.token_hex(10)}"
        data = _encode(event)
        self._waiting.append(data)
        size = self.size + len(data)
        if size > MAX_BYTES or (size > HIGH_WATER_BYTES and not self.held.fits(size)):
            self.overflowed = True
            self._waiting.clear()
        self.held.resize(size)
        if size > HIGH_WATER_BYTES:
            self._has_space.clear()
        self._changed.set()

    @property
    def size(self) -> int:
        """Bytes in the queue."""
        return self.held.size

    async def wait_for_space(self) -> None:
        """Wait until the client has taken enough of the queue."""
        await self._has_space.wait()

    def finish(self) -> None:
        """Nothing more is put in; `run` ends when all has been sent."""
        self._finished = True
        self._changed.set()

    def close(self) -> None:
        """Nothing is sent any more."""
        self._finished = True
        self._waiting.clear()
        self.held.close()

    async def run(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send until finished. Raises `SlowClient`."""
        while True:
            if self.overflowed:
                raise SlowClient("too many events wait for the client")
            if not self._waiting:
                if self._finished:
                    return
                self._changed.clear()
                await self._changed.wait()
                continue
            data = self._waiting.popleft()
            try:
                async with asyncio.timeout(self.timeout):
                    await send(data)
            except TimeoutError:
                raise SlowClient(f"no message was taken for {self.timeout:g} s") from None
            self.held.resize(self.size - len(data))
            self.num_sent += 1
            if self.size <= HIGH_WATER_BYTES:
                self._has_space.set()
