"""Turns for work that takes long and would delay everything else on the event loop. `Service` has
one of each.

`LoopTurns`: for work of a millisecond or more on the loop itself, such as reading a large request
or a large event of a realtime session. One piece of it is done in each pass of the loop, in the
order in which the turns were requested, so that everything else that is ready runs between two of
them. With a rest between two turns, such work never has the whole of the loop, nor of a core that
the process may share with a stage.

`ThreadTurns`: for Python code in threads, such as the conversion of an item with many sounds. The
loop waits for the interpreter a millisecond for each thread that computes, so only a few may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stretto.preprocess.pool.fair_queue import FairQueue

HEAVY = 8 << 10  # bytes; what is shorter is read in a fraction of a millisecond, without a turn


@dataclass(slots=True)
class LoopTurns:
    rest_s: float = 0.0  # before each turn; 0: until the next pass of the loop
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take(self) -> None:
        """Wait for a turn: what the caller does until it next waits is the heavy work of this pass
        of the loop."""
        async with self._lock:
            await asyncio.sleep(self.rest_s)


@dataclass(slots=True)
class ThreadTurns:
    """Two at once, of different clients."""

    _queue: FairQueue = field(default_factory=lambda: FairQueue(2))

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        await self._queue.enter(client)
        try:
            yield
        finally:
            self._queue.leave(client)
