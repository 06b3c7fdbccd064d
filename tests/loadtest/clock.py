"""Time that passes only when everybody waits."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

from stretto.loadtest.runner import SystemClock

T = TypeVar("T")
SETTLE = 50  # turns of the loop after which everything that can run has run


class FakeClock(SystemClock):
    def __init__(self) -> None:
        self.time = 0.0
        self.waiters: list[tuple[float, int, asyncio.Future[None]]] = []
        self.order = itertools.count()

    def now(self) -> float:
        return self.time

    async def sleep_until(self, at: float) -> None:
        if at <= self.time:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self.waiters, (at, next(self.order), future))
        await future

    async def drive(self, work: Coroutine[Any, Any, T], until: float = float("inf")) -> T:
        """Run `work`, jumping to the next moment somebody waits for; cancel it at `until`."""
        task = asyncio.create_task(work)
        while not task.done():
            for _ in range(SETTLE):
                await asyncio.sleep(0)
            if task.done():
                break
            at, _, future = heapq.heappop(self.waiters)
            if at > until:
                task.cancel()
                until = float("inf")
                continue
            self.time = max(self.time, at)
            if not future.done():
                future.set_result(None)
        return await task
