"""The shm connector's messages: a connected unix socket that carries them both ways.

One system call per message and side. Called by the courier's thread, except `MessageSocket.reply`,
`wake` and `close`."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

from stretto.transport.contract import Endpoint
from stretto.transport.slot_transport import (
    MESSAGE_BYTES,
    Hangup,
    LinkMessage,
    MessageKind,
    pack_message,
    unpack_messages,
)

_TIMEVAL = struct.Struct("@ll")
_CHUNK = int(MessageKind.CHUNK)
_SEND_FLAGS = int(
    socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
)  # plain integers: an enum's `|` costs a microsecond
_NO_WAIT = int(socket.MSG_DONTWAIT)
_BATCH = 64  # messages read by one system call


class MessageSocket:
    """Messages on one connected socket, both ways."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint) -> None:
        sock.setblocking(True)
        # A queued message costs about 1 KiB of the buffer; ask for room for all that credits allow,
        # and the CLOSE message.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, endpoint.slots * 1024 + 16384)
        self._sock = sock
        self._receive = sock.recv_into  # waits for as long as the socket's own timeout
        self._generation = endpoint.generation
        self._buffer = bytearray(_BATCH * MESSAGE_BYTES)
        self._view = memoryview(self._buffer)
        self._rest = 0  # bytes of an incomplete message at the start of the buffer
        self._timeout = -1.0  # the socket's own
        # keeps the descriptor from being closed, and reused, during a send
        self._sending = threading.Lock()

    def send_chunk(self, slot: int, seq: int, size: int) -> None:
        """For the courier only, which holds the end's mutex: nobody closes the descriptor
        meanwhile."""
        try:
            self._sock.send(pack_message(_CHUNK, slot, seq, size, self._generation), _SEND_FLAGS)
        except OSError as error:
            raise _gone(error) from error

    def reply(self, kind: int, slot: int, seq: int) -> None:
        """For any thread."""
        data = pack_message(kind, slot, seq, 0, self._generation)
        with self._sending:
            try:
                self._sock.send(data, _SEND_FLAGS)
            except OSError as error:
                raise _gone(error) from error

    def messages(self, timeout: float) -> list[LinkMessage]:
        """One read, so at most one wait; the caller comes again."""
        try:
            return self._split(self._read(timeout))
        except BlockingIOError:
            return []
        except OSError as error:
            # ECONNRESET: it ended with our messages unread
            raise Hangup(f"the connection broke: {error.strerror}") from error

    def _read(self, timeout: float) -> int:
        room = self._view[self._rest :]
        if timeout <= 0:
            return self._receive(room, 0, _NO_WAIT)
        if timeout != self._timeout:
            # Couriers pass the same timeout again and again, so the option is rarely set anew.
            set_timeout(self._sock, timeout)
            self._timeout = timeout
        return self._receive(room)

    def _split(self, got: int) -> list[LinkMessage]:
        if not got:
            raise Hangup("the connection ended without a CLOSE message")
        stop = self._rest + got
        self._rest = stop % MESSAGE_BYTES
        whole = stop - self._rest
        messages = list(unpack_messages(self._view[:whole]))
        self._buffer[: self._rest] = self._buffer[whole:stop]
        return messages

    def wake(self) -> None:
        with suppress(Hangup):  # the peer went first
            self.reply(MessageKind.CLOSE, 0, 0)
        self.hang_up()

    def hang_up(self) -> None:
        """End the connection without a word, as the kernel does for a process that died."""
        with self._sending:
            shut_down(self._sock)

    def close(self) -> None:
        with self._sending:
            self._sock.close()


def set_timeout(sock: socket.socket, timeout: float) -> None:
    """Let `recv` and `accept` wait for `timeout`, then raise BlockingIOError. Python's own timeout
    would take a second system call each time, and does not notice that a listener was shut down."""
    sock.setblocking(timeout > 0)
    if timeout > 0:  # 0 in the option would mean for ever
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout))


def set_connect_timeout(sock: socket.socket, timeout: float) -> None:
    """Let `connect` wait for `timeout`. With Python's own timeout a socket does not wait for a
    place in a full backlog: it gives up at once, and strangers could keep the backlog full."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))


def _timeval(seconds: float) -> bytes:
    return _TIMEVAL.pack(*divmod(max(int(seconds * 1e6), 1), 1_000_000))


def _gone(error: OSError) -> Hangup:
    return Hangup(f"the connection is gone: {error.strerror}")


def shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # not connected (any more)
        sock.shutdown(socket.SHUT_RDWR)
