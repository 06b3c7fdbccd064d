"""Connections to a network listener that have not said hello: few, for a short time, and then shut.

ZeroMQ accepts whoever connects and has no call that ends one connection of many. But it tells the descriptor of each,
and closes a connection that was shut under it. A descriptor may be closed and used again by another connection at any
moment, so it is shut only if the one at its other end is still the one that came.

Used by `netbell.NetListener`, on its courier's thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

MOST = 16
"""Guests at a time; the oldest makes room, so that a crowd that stays silent does not keep the invited one out."""
HELLO_S = 5.0
"""For a guest to say hello. The invited one does so right after the handshake, but busy machines pause."""


@dataclass(slots=True)
class Guests:
    clock: Callable[[], float] = time.monotonic
    _here: dict[int, tuple[float, object]] = field(default_factory=dict)  # by descriptor: since when, from where
    _refused: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._here)

    def came(self, fd: int) -> None:
        self._here.pop(fd, None)  # the last one comes last
        with suppress(OSError), _borrowed(fd) as connection:  # gone already: its end is told next
            self._here[fd] = (self.clock(), connection.getpeername())

    def left(self, fd: int) -> None:
        """It is gone, or the peer now."""
        self._here.pop(fd, None)
        self._refused.discard(fd)

    def refuse(self, fd: int) -> None:
        """It said something else than hello. Shut by the next `dismiss` that knows where it is from."""
        self._refused.add(fd)

    def patience(self) -> float:
        """How long until `dismiss` has something to do."""
        since = next((since for since, _ in self._here.values()), None)
        return float("inf") if since is None else max(since + HELLO_S - self.clock(), 0.0)

    def dismiss(self, everyone: bool = False) -> None:
        """Shut those that were refused, that have been silent for too long and that are too many."""
        for fd, (since, address) in list(self._here.items()):
            late = self.clock() - since >= HELLO_S
            if everyone or late or len(self._here) > MOST or fd in self._refused:
                self.left(fd)
                with suppress(OSError), _borrowed(fd) as connection:  # it left by itself
                    if connection.getpeername() == address:
                        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor that stays ZeroMQ's."""
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()
