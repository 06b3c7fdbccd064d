"""Authentication of ZeroMQ sockets: CURVE keys from a shared secret, and connections that have not
sent their hello.

Used by links between machines (`zmq_socket`, on its courier's thread) and by the control channel to
hosts there (`engine/remote_host.py`).

**Keys.** Both ends derive the listener's key from their secret, so that connections are encrypted
and nobody else can answer.

**Pending connections** are few, for a short time, and then shut down. ZeroMQ accepts every
connection and has no call that closes one of many. But it reports the descriptor of each, and
closes a connection that was shut down underneath. A descriptor may be closed and reused for another
connection at any moment, so it is shut down only if its peer's address is still the one that
connected."""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

MAX_PENDING = 16
"""At a time. The oldest is shut down for the next, so that many silent ones do not keep the invited
sender out."""
HELLO_S = 5.0
"""For a connection to send its hello. The sender does so right after the handshake, but a busy
machine may pause it."""


def key_of(secret: bytes, purpose: str) -> bytes:
    """The listener's CURVE secret key, which only the two ends can derive. Any 32 bytes are a valid
    key. `purpose` holds a nonce, so that no two listeners have the same."""
    return z85.encode(hmac.digest(secret, f"stretto curve {purpose}".encode(), "sha256"))


def encrypt(socket: zmq.Socket[Any], key: bytes, *, listens: bool = False) -> None:
    """With the listener's secret key. A dialer has it too, and uses only its public half. The
    dialer's own key pair is random: its hello authenticates it."""
    if listens:
        socket.curve_server = True
        socket.curve_secretkey = key
    else:
        socket.curve_serverkey = zmq.curve_public(key)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


@dataclass(slots=True)
class PendingConnections:
    clock: Callable[[], float] = time.monotonic
    # by descriptor: when and from which address
    _since: dict[int, tuple[float, object]] = field(default_factory=dict)
    _refused: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._since)

    def add(self, fd: int) -> None:
        self._since.pop(fd, None)  # so that the newest is the last
        with (
            suppress(OSError),
            _borrowed(fd) as connection,
        ):  # if it is closed already, its end is reported next
            self._since[fd] = (self.clock(), connection.getpeername())

    def remove(self, fd: int) -> None:
        """It is closed, or it has sent its hello."""
        self._since.pop(fd, None)
        self._refused.discard(fd)

    def refuse(self, fd: int) -> None:
        """It sent something other than its hello. Shut down by the next `shut_down` after it was
        added."""
        self._refused.add(fd)

    def time_left(self) -> float:
        """How long until `shut_down` has something to do."""
        since = next((since for since, _ in self._since.values()), None)
        return float("inf") if since is None else max(since + HELLO_S - self.clock(), 0.0)

    def shut_down(self, all_pending: bool = False) -> None:
        """Shut down those that were refused, that have been silent for too long, and the oldest of
        too many."""
        for fd, (since, address) in list(self._since.items()):
            late = self.clock() - since >= HELLO_S
            if all_pending or late or len(self._since) > MAX_PENDING or fd in self._refused:
                self.remove(fd)
                with suppress(OSError), _borrowed(fd) as connection:  # it was closed by its peer
                    if connection.getpeername() == address:
                        connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor that ZeroMQ keeps."""
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()
