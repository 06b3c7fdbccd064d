"""Virtual time is that of the test alone."""

from __future__ import annotations

import asyncio
import threading
import time

from tests.virtual import Virtual, run_virtual


def test_other_threads_keep_their_clock() -> None:
    """A server that runs in one would set its timers by a clock which is gone when they are due."""
    found: list[float] = []

    async def work(clock: Virtual) -> float:
        await asyncio.sleep(1e6)
        other = threading.Thread(target=lambda: found.append(time.monotonic()))
        other.start()
        other.join()
        return time.monotonic()

    before = time.monotonic()
    assert run_virtual(work, limit=1e7) == Virtual().now + 1e6
    assert before <= found[0] <= time.monotonic()
