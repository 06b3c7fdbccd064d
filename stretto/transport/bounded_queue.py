"""The queue between a stage loop and a courier, and the event that it waits with."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class AutoResetEvent:
    """An event for one waiting thread that a successful `wait` clears. Setting it twice wakes the
    thread once.

    A bare lock that is held while the event is clear: several times faster than a condition
    variable, which is Python code over two locks. No wake-up is lost, because the event stays set
    until a wait: check the state, then wait, then check again."""

    __slots__ = ("_clear",)

    def __init__(self) -> None:
        self._clear = threading.Lock()
        self._clear.acquire()

    def set(self) -> None:
        try:
            self._clear.release()
        except RuntimeError:
            return  # it was set already

    def wait(self, timeout: float) -> bool:
        """False: it was not set in time."""
        return self._clear.acquire(timeout=timeout)


class BoundedQueue(Generic[T]):
    """A bounded queue between one producer and one consumer thread. Only methods with `wait` in the
    name wait.

    It needs no lock: a deque's append and pop are atomic, and each side does only one of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._filled = AutoResetEvent()
        self._emptied = AutoResetEvent()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def full(self) -> bool:
        """An offer would be refused now. For the producer, for whom False stays False until its
        next offer."""
        return self._closed or len(self._items) >= self._capacity

    def offer(self, item: T) -> bool:
        """Append, unless full or closed. For the producer."""
        if self.full:
            return False
        self._items.append(item)
        self._filled.set()
        return True

    def wait_room(self, timeout: float) -> None:
        """Until there may be room. For the producer."""
        if len(self._items) >= self._capacity and not self._closed:
            self._emptied.wait(timeout)

    def poll(self) -> T | None:
        """For the consumer (and for any thread once neither side runs any more)."""
        try:
            item = self._items.popleft()
        except IndexError:
            return None
        self._emptied.set()
        return item

    def wait_item(self, timeout: float) -> T | None:
        """For the consumer."""
        item = self.poll()
        # The event may still be set for an item that was polled without waiting; hence the loop.
        while item is None and not self._closed and self._filled.wait(timeout):
            item = self.poll()
        return item

    def close(self) -> None:
        """No more offers; waiting threads wake up. Queued items can still be polled."""
        self._closed = True
        self._filled.set()
        self._emptied.set()
