"""Time that passes only while everybody waits, for tests without processes, threads or sockets.

`run_virtual` runs a coroutine on an event loop whose clock is `Virtual`: when nothing is left to
run, the clock jumps to the next timer. `time.monotonic` is that clock too, so what measures time
and what sleeps agree, and minutes take no time. `Virtual.stand_still` is a call that blocks the
loop for a while. Other threads, such as that of a server which tests share, have the machine's
time: timers that they set by this clock could be due minutes later."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class Virtual(selectors.BaseSelector):
    """A clock, and the selector that moves it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self._selector = selectors.DefaultSelector()

    def stand_still(self, seconds: float) -> None:
        """Time passes, and the loop gives nobody a turn."""
        self.now += seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._selector.select(0)
        if not ready:
            assert timeout is not None, "all wait, and nothing would ever wake them"
            self.now += max(0.0, timeout)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector.get_map()

    def close(self) -> None:
        self._selector.close()


def run_virtual(work: Callable[[Virtual], Coroutine[Any, Any, T]], limit: float = 3600.0) -> T:
    """`work` is given its clock, and `limit` seconds of it."""
    clock = Virtual()
    own, real = threading.get_ident(), time.monotonic

    def monotonic() -> float:
        return clock.now if threading.get_ident() == own else real()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", monotonic)
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
            return runner.run(asyncio.wait_for(work(clock), limit))
