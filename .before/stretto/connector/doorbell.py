"""The shm connector's doorbell: notes on one connected unix socket, both ways, and how a receiver waits for them.

One system call per note and side. Called by the courier's thread, but for `Bell.reply`, `wake` and `close`."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from stretto.connector import wire
from stretto.connector.contract import Endpoint
from stretto.connector.looking import Lookout
from stretto.connector.notes import NOTE_BYTES, Hangup, Kind, Note, pack_note, unpack_notes

_TIMEVAL = struct.Struct("@ll")
_CHUNK = int(Kind.CHUNK)
AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # flags as plain integers: an enum's `|` costs a microsecond
_NO_WAIT = int(socket.MSG_DONTWAIT)
_BATCH = 64  # notes read by one system call


class Bell:
    """The notes on one connected socket, both ways."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint) -> None:
        sock.setblocking(True)
        # A queued note costs about 1 KiB of the buffer; ask for room for all that credits allow, and some rings.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, endpoint.slots * 1024 + 16384)
        self._sock = sock
        self.send = sock.send
        self._receive = sock.recv_into
        self.wait: Callable[[memoryview], int] = self._receive  # asleep, for as long as the socket is set to
        self._generation = endpoint.generation
        self._buffer = bytearray(_BATCH * NOTE_BYTES)
        self._view = memoryview(self._buffer)
        self._rest = 0  # bytes of an incomplete note at the start of the buffer
        self._bound = -1.0  # how long the socket's own waits are
        self._sending = threading.Lock()  # keeps the descriptor from being closed, and reused, under a send

    def ship(self, slot: int, seq: int, size: int) -> None:
        """For the courier alone, in whose turn nobody closes the descriptor."""
        try:
            self.send(pack_note(_CHUNK, slot, seq, size, self._generation), AT_ONCE)
        except OSError as error:
            raise gone(error) from error

    def reply(self, kind: int, slot: int, seq: int) -> None:
        """For any thread."""
        data = pack_note(kind, slot, seq, 0, self._generation)
        with self._sending:
            try:
                self._sock.send(data, AT_ONCE)
            except OSError as error:
                raise gone(error) from error

    def notes(self, timeout: float) -> list[Note]:
        """One read, so at most one wait; the caller comes again."""
        got = self._received(timeout)
        return [] if got is None else self._split(got)

    def _received(self, timeout: float) -> int | None:
        """Bytes of one read; None: nothing came."""
        try:
            return self._read(timeout)
        except BlockingIOError:
            return None
        except OSError as error:
            raise broken(error) from error

    def _read(self, timeout: float) -> int:
        room = self._view[self._rest :]
        if timeout <= 0:
            return self._receive(room, 0, _NO_WAIT)
        if timeout != self._bound:
            # Couriers ask for the same time again and again, so the option is rarely set anew.
            bound_waits(self._sock, timeout)
            self._bound = timeout
        return self.wait(room)

    def _split(self, got: int) -> list[Note]:
        if not got:
            raise Hangup("the connection ended without a good-bye")
        stop = self._rest + got
        self._rest = stop % NOTE_BYTES
        whole = stop - self._rest
        notes = list(unpack_notes(self._view[:whole]))
        self._buffer[: self._rest] = self._buffer[whole:stop]
        return notes

    def wake(self) -> None:
        with suppress(Hangup):  # the peer went first
            self.reply(Kind.CLOSE, 0, 0)
        with self._sending:
            shut(self._sock)

    def close(self) -> None:
        with self._sending:
            self._sock.close()


class PagedBell(Bell):
    """A receiver's, which finds the slot that a note names."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint, look_s: float, pages: list[wire.Page]) -> None:
        super().__init__(sock, endpoint)
        self.view = self._view
        self.pages = pages
        self._lookout = Lookout(look_s)
        if look_s:
            self.wait = self._look_and_wait
        self.usual = -1.0
        """How long `wait` takes at most, while all there is to do for such a wait is to receive the next note."""

    def arrivals(self, timeout: float) -> list[tuple[Note, wire.Page]]:
        """`notes.Inward.arrivals`."""
        self.usual = -1.0
        got = self._received(timeout)
        return [] if got is None else self.sort(got)

    def sort(self, got: int) -> list[tuple[Note, wire.Page]]:
        """The notes in what was just received."""
        notes = self._split(got)
        self.usual = -1.0 if self._rest else self._bound
        try:
            return [(note, self.pages[note[1]]) for note in notes]
        except IndexError:
            raise Hangup("the peer named a slot that does not exist") from None

    def _look_and_wait(self, room: memoryview) -> int:
        lookout = self._lookout
        lookout.begin()
        got = 0
        try:
            if lookout.looks:
                got = self._look(room)
            if not got:
                got = self._receive(room)
        finally:
            lookout.ended(got > 0)
        return got

    def _look(self, room: memoryview) -> int:
        """0: nothing came, or the peer has left, which the sleeping read says again. Each look is a system call, which
        lets go of the interpreter's lock: who waits for it gets it."""
        over = self._lookout.over
        while not over():
            try:
                return self._receive(room, 0, _NO_WAIT)
            except BlockingIOError:
                continue
        return 0


def bound_waits(sock: socket.socket, timeout: float) -> None:
    """Let `recv` and `accept` wait for `timeout`, then raise BlockingIOError. Not by Python's own timeout: that takes
    a second system call each time, and does not notice that a listener was shut."""
    sock.setblocking(timeout > 0)
    if timeout > 0:  # a zero option would mean for ever
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout))


def bound_connect(sock: socket.socket, timeout: float) -> None:
    """Let `connect` wait for `timeout`. Not by Python's own: a socket with one does not wait for a place in a full
    queue, it gives up at once, and strangers could keep that queue full."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))


def _timeval(seconds: float) -> bytes:
    return _TIMEVAL.pack(*divmod(max(int(seconds * 1e6), 1), 1_000_000))


def gone(error: OSError) -> Hangup:
    return Hangup(f"the connection is gone: {error.strerror}")


def broken(error: OSError) -> Hangup:
    return Hangup(f"the connection broke: {error.strerror}")  # ECONNRESET: gone with our notes unread


def shut(sock: socket.socket) -> None:
    with suppress(OSError):  # not connected (any more)
        sock.shutdown(socket.SHUT_RDWR)
