"""Wakes a sleeping loop when the device has finished something: one thread waits for events in
order.

The loop cannot wait for an event and for messages at once, so this thread waits for the event
(asleep in the driver, without the interpreter's lock) and then wakes the loop like any other
message would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch


class Waiter:
    def __init__(self, wake: Callable[[], None], name: str) -> None:
        self._wake = wake
        self._events: SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] = (
            SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=f"{name}-waiter", daemon=True)
        self._thread.start()

    def watch(self, event: torch.cuda.Event, note: Callable[[], None] = lambda: None) -> None:
        """`note` is called on this thread when the event has fired, before the loop is woken up."""
        self._events.put((event, note))

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            event, note = item
            event.synchronize()
            note()
            self._wake()
