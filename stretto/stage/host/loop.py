"""One thread that drives the stages of a host.

Each round runs the messages that came, then polls the host. After a round in which nothing happened
the loop sleeps on its `Wakeup`: an event file descriptor that messages, chunks and the device's
waiter write to. A stage that holds something back says until when; the sleep ends then at the
latest. There is no timer thread and no busy waiting."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from stretto.errors import Busy, Gone
from stretto.messages.requests import ToHost
from stretto.preprocess.packed_prompt import Bytes

log = logging.getLogger(__name__)

TICK_NS = 1_000_000
"""Sleeps last whole ticks, so what is due within less than one is due now: the loop never wakes up
too early to find nothing to do."""


class Driven(Protocol):
    """What a loop drives: a `Host`, but for tests."""

    @property
    def due_ns(self) -> int | None:
        """When it must be polled again though nothing wakes the loop, by the loop's clock; at
        least a tick from its last poll."""
        ...

    def handle(self, message: ToHost, blob: Bytes) -> None: ...

    def poll(self) -> bool:
        """Do what can be done now, without waiting. True: something was."""
        ...


class Wakeup:
    """Any thread may call `wake`; one thread calls `sleep`. A wake before the sleep is not lost:
    the sleeper must look for work after each sleep and before the next."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._awake = False
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def wake(self) -> None:
        # One wake before a sleep is enough, and a flag costs no system call.
        if not self._awake:
            self._awake = True
            os.eventfd_write(self._fd, 1)

    def sleep(self, ticks: int | None = None) -> None:
        """Until `wake` is called, or for `ticks`."""
        if ticks is not None and not self._poll.poll(ticks):
            # in milliseconds, which ticks are
            return
        os.eventfd_read(self._fd)
        # After the read: a wake in between is dropped, but the sleeper looks for work next and
        # finds what it was for.
        self._awake = False

    def close(self) -> None:
        os.close(self._fd)


class Loop:
    def __init__(
        self,
        driven: Driven,
        wakeup: Wakeup | None = None,
        max_messages: int = 4096,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`clock` in nanoseconds is that of `driven` too."""
        self.driven = driven
        self.wakeup = wakeup or Wakeup()
        self.max_messages = max_messages
        self.clock = clock
        self.failure: BaseException | None = None
        self._on_failure: Callable[[], None] = lambda: None
        # asleep, since `run` began
        self.idle_ns = 0
        self._begun = time.monotonic()
        self._messages: deque[tuple[ToHost, Bytes]] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # -- any thread

    def post(self, message: ToHost, blob: Bytes = b"", *, spare: int = 0) -> None:
        """Have it handled on the loop thread, soon and in order. `spare` places are left to other
        messages."""
        if self._stopping:
            raise Gone("the loop has stopped")
        if len(self._messages) >= self.max_messages - spare:
            raise Busy(f"{len(self._messages)} messages are waiting already")
        self._messages.append((message, blob))
        self.wakeup.wake()

    def start(self, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called last, on the loop thread, if the loop dies."""
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self.run, name="stage-loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the round and leave; messages not taken by then are dropped."""
        self._stopping = True
        self.wakeup.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # -- the loop thread

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._begun

    def run(self) -> None:
        try:
            self._begun = time.monotonic()
            while not self._stopping:
                if not self.round():
                    self.sleep()
        except BaseException as e:
            # The boundary of the stage's world: whoever started the loop must learn of it.
            self.failure = e
            self._stopping = True
            log.exception("the stage loop died")
            self._on_failure()
            raise

    def round(self) -> bool:
        """One round. True: something happened, so there may be more to do."""
        progress = False
        for _ in range(len(self._messages)):
            self.driven.handle(*self._messages.popleft())
            progress = True
        return self.driven.poll() or progress

    def sleep(self) -> None:
        """After a round in which nothing happened: until something wakes it or a poll is due."""
        asleep = self.clock()
        due = self.driven.due_ns
        if due is None:
            self.wakeup.sleep()
        elif (ticks := (due - asleep) // TICK_NS) > 0:
            self.wakeup.sleep(ticks)
        self.idle_ns += self.clock() - asleep
