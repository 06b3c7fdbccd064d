"""Turns of the event loop for work that takes a millisecond or more: reading a large request, a
large event of a realtime session. One such piece is done in each pass of the loop, in the order in
which turns were asked for, so that everything else that is ready is served between two of them. One
`LoopTurns` per server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

HEAVY = 8 << 10  # bytes; what is shorter is read in a fraction of a millisecond, without a turn


@dataclass(slots=True)
class LoopTurns:
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take(self) -> None:
        """Wait for a turn: what the caller does until it next waits is the heavy work of this pass
        of the loop."""
        async with self._lock:
            await asyncio.sleep(0)
