"""What passes between a stage loop and a courier: a bounded queue of work, and errors on their way back."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stretto.connector.metrics import LinkMetrics
from stretto.errors import Gone, StrettoError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Bell:
    """A wake-up for one waiting thread; rung any number of times before it looks, it wakes it once.

    A bare lock, released to ring: several times faster than a condition variable, which is Python code over two of
    them. Nothing gets lost, because a ring stays until it is heard: look at the state, then wait, then look again."""

    __slots__ = ("_silence",)

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        try:
            self._silence.release()
        except RuntimeError:
            return  # rung already, and not heard yet

    def wait(self, timeout: float) -> bool:
        """False: nobody rang in time."""
        return self._silence.acquire(timeout=timeout)


class Handoff(Generic[T]):
    """A bounded queue between one producing and one consuming thread. Only methods with `wait` in the name wait.

    Without a lock: appending to and popping from a deque are atomic, and each side only ever does one of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._filled = Bell()
        self._emptied = Bell()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def full(self) -> bool:
        """No offer would be taken now. The producer's: it stays False until the next offer."""
        return self._closed or len(self._items) >= self._capacity

    def offer(self, item: T) -> bool:
        """Append, unless full or closed. The producer's."""
        if self.full:
            return False
        self._items.append(item)
        self._filled.ring()
        return True

    def wait_room(self, timeout: float) -> None:
        """Until there may be room. The producer's."""
        if len(self._items) >= self._capacity and not self._closed:
            self._emptied.wait(timeout)

    def poll(self) -> T | None:
        """The consumer's (and anyone's, once neither side runs any more)."""
        try:
            item = self._items.popleft()
        except IndexError:
            return None
        self._emptied.ring()
        return item

    def wait_item(self, timeout: float) -> T | None:
        """The consumer's."""
        item = self.poll()
        # A ring may be left over from an item that was polled without waiting; hence the loop.
        while item is None and not self._closed and self._filled.wait(timeout):
            item = self.poll()
        return item

    def close(self) -> None:
        """No more offers; those who wait wake up. What is inside can still be polled."""
        self._closed = True
        self._filled.ring()
        self._emptied.ring()


@dataclass(slots=True)
class Faults:
    """Errors on their way to the stage loop, each counted, logged and followed by a wake-up."""

    metrics: LinkMetrics
    wake: Callable[[], None]
    _queue: deque[StrettoError] = field(default_factory=deque)

    def add(self, error: StrettoError) -> None:
        # A close in good order is told too, since requests may hang on it, but it is no news.
        level = logging.INFO if isinstance(error, Gone) else logging.WARNING
        log.log(level, "link %s: %s: %s", self.metrics.link, type(error).__name__, error)
        self.metrics.error(error)
        self._queue.append(error)
        self.wake()

    def take(self) -> list[StrettoError]:
        taken: list[StrettoError] = []
        while self._queue:
            taken.append(self._queue.popleft())
        return taken
