"""Memory that large requests and sessions have freed goes back to the system. `Service.start` sets
this up: one `Trimmer` per server, a task on the event loop.

The C library keeps what is freed, in an arena for each thread, so that after many large sessions a
server would hold their memory for ever. Large blocks are therefore mappings of their own, which go
back when they are freed (`map_large_blocks`). For the others there is `malloc_trim`: it takes about
a millisecond for each 8 MiB, so it runs in a thread, and who allocates from that arena waits
meanwhile."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import dataclass

QUIET_BYTES = 1 << 20  # freed since the last trim, when no more is being freed
BUSY_BYTES = 32 << 20  # freed since the last trim
POLL_S = 0.5
LARGE = 256 << 10  # bytes
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def map_large_blocks() -> None:
    """Of this process, from now on. Left alone, glibc keeps blocks of up to 32 MiB in its arenas
    once one of that size was freed, and `malloc_trim` then stops the event loop for 0.1 s for each
    GiB of them. Does nothing where the C library is not glibc."""
    library = ctypes.CDLL(None)
    try:
        library.mallopt(_M_MMAP_THRESHOLD, LARGE)
    except AttributeError:
        return


def trim() -> None:
    """Of all arenas. Does nothing where the C library is not glibc."""
    library = ctypes.CDLL(None)
    try:
        library.malloc_trim(0)
    except AttributeError:
        return


@dataclass(slots=True)
class Trimmer:
    freed: Callable[[], int]  # bytes, since the server began
    trim: Callable[[], None] = trim
    _trimmed: int = 0  # freed at the last trim
    _before: int = 0  # freed at the last poll

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self.due():
                await asyncio.to_thread(self.trim)

    def due(self) -> bool:
        """Whether much was freed, or something was and no more is being freed."""
        freed = self.freed()
        before = self._before
        self._before = freed
        if freed - self._trimmed < (QUIET_BYTES if freed == before else BUSY_BYTES):
            return False
        self._trimmed = freed
        return True
