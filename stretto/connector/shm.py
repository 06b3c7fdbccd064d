"""The connector between processes of one machine: slots in shared memory, a unix socket as the doorbell.

Called by the two courier threads of a link; starts no thread. One memory file and one connection per link:

    sender                       memfd, slots x slot_bytes                      receiver
      encode chunk ───────────▶ [ slot 0 | slot 1 | ... ] ◀─────────── tensors are views
      CHUNK slot seq size ──────▶ unix stream socket ──▶ recv: note, or end of file
      recv: slot is free again ◀── RELEASE slot seq ◀──────────────── chunk.release()

**Nothing is left behind, at any moment.** The memory is a `memfd` and the listening socket has an abstract address:
neither has a name in any file system, so there is nothing to unlink and no window in set-up. The memory file is
handed over as a descriptor on the connection (SCM_RIGHTS); while it is on its way the kernel owns it and drops it
with the socket. When both processes are gone, so is everything.

**Wake-up.** A note is 32 bytes on the socket, and the other side waits in `recv`: one system call per side per
chunk, no polling, no CPU when idle; the death of the peer is the end of file of that same `recv`. Measured against
an event fd (with the poll that it needs to see a death as well) and a futex, the socket wakes a process fastest.
A receiver may look again and again for a few microseconds before it sleeps (`details`: `spin_us`). That saves the
wake-up where a core is free for it; it is off unless asked for, since every look takes the interpreter's lock from
the stage loop, and stops by itself on a link that is not busy. The kernel's queue lock orders
the slot's bytes before the note on any processor, and a note is whole or absent, even if its writer is killed.

**Trust.** Only processes of the same user are accepted (SO_PEERCRED, checked by both sides), and only with the
endpoint's nonce. The memory file's size is sealed, so that a peer cannot shrink it under us (a SIGBUS)."""

from __future__ import annotations

import array
import fcntl
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import ClassVar

from stretto.connector import wire
from stretto.connector.contract import Corrupt, Endpoint, LinkOptions, PeerDead
from stretto.connector.pinned import map_shared
from stretto.connector.slots import (
    NOTE_BYTES,
    Hangup,
    Kind,
    Note,
    SlotReceiver,
    SlotSender,
    check_endpoint,
    check_options,
    make_endpoint,
    new_nonce,
    pack_note,
    split_slots,
    stride_of,
    unpack_note,
    unpack_notes,
)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_UCRED = struct.Struct("3i")  # pid, uid, gid
_TIMEVAL = struct.Struct("@ll")
_CHUNK = int(Kind.CHUNK)
_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # flags as plain integers: an enum's `|` costs a microsecond
_NO_WAIT = int(socket.MSG_DONTWAIT)
_BATCH = 64  # notes read by one system call
_HELLO_S = 1.0  # for a guest to say hello; it is sent with the connection
_HELLO_BYTES = 63
_MOST_SPIN_US = 1000


class ShmConnector:
    name: ClassVar[str] = "shm"
    inline: ClassVar[bool] = False

    def listen(self, link: str, options: LinkOptions) -> SlotReceiver:
        check_options(link, options)
        spin_s = _spin_s(link, options)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        endpoint = make_endpoint(self.name, link, options, f"stretto-{secrets.token_hex(16)}", new_nonce())
        try:
            listener.bind("\0" + endpoint.address)
            listener.listen(4)
        except OSError:
            listener.close()
            raise
        return SlotReceiver(endpoint, ShmInward(endpoint, listener, spin_s))

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> SlotSender:
        check_endpoint(self.name, endpoint, options)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(options.connect_timeout_s)
            sock.connect("\0" + endpoint.address)
            if _peer_uid(sock) != os.geteuid():
                raise Corrupt("the listener runs as another user", link=endpoint.link)
            return SlotSender(endpoint, options, ShmOutward(endpoint, sock), checksum=False)
        except OSError as error:
            sock.close()
            raise PeerDead(f"nobody listens: {error}", link=endpoint.link) from error
        except Corrupt:
            sock.close()
            raise


class _Bell:
    """The notes on one connected socket, both ways."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint, spin_s: float = 0.0) -> None:
        sock.setblocking(True)
        # A queued note costs about 1 KiB of the buffer; ask for room for all that credits allow.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, endpoint.slots * 1024 + 4096)
        self._sock = sock
        self._send = sock.send
        self._receive = sock.recv_into
        self._generation = endpoint.generation
        self._buffer = bytearray(_BATCH * NOTE_BYTES)
        self._view = memoryview(self._buffer)
        self._rest = 0  # bytes of an incomplete note at the start of the buffer
        self._bound = -1.0  # how long the socket's own waits are
        self._spin_s = spin_s
        self._brisk = spin_s > 0  # whether the last wait was short enough to spin through the next one
        self._sending = threading.Lock()  # keeps the descriptor from being closed, and reused, under a send

    def ship(self, slot: int, seq: int, size: int) -> None:
        """For the courier alone, in whose turn nobody closes the descriptor."""
        try:
            self._send(pack_note(_CHUNK, slot, seq, size, self._generation), _AT_ONCE)
        except OSError as error:
            raise Hangup(f"the connection is gone: {error.strerror}") from error

    def reply(self, kind: int, slot: int, seq: int) -> None:
        """For any thread."""
        data = pack_note(kind, slot, seq, 0, self._generation)
        with self._sending:
            try:
                self._sock.send(data, _AT_ONCE)
            except OSError as error:
                raise Hangup(f"the connection is gone: {error.strerror}") from error

    def notes(self, timeout: float) -> list[Note]:
        """One read, so at most one wait; the caller comes again."""
        try:
            got = self._read(timeout)
        except BlockingIOError:
            return []
        except OSError as error:
            raise _broken(error) from error
        return self._split(got)

    def _read(self, timeout: float) -> int:
        room = self._view[self._rest :]
        if timeout <= 0:
            return self._receive(room, 0, _NO_WAIT)
        if timeout != self._bound:
            # Couriers ask for the same time again and again, so the option is rarely set anew.
            _bound_waits(self._sock, timeout)
            self._bound = timeout
        if self._spin_s:
            return self._spin(room, time.perf_counter())
        return self._receive(room)

    def _split(self, got: int) -> list[Note]:
        if not got:
            raise Hangup("the connection ended without a good-bye")
        stop = self._rest + got
        self._rest = stop % NOTE_BYTES
        whole = stop - self._rest
        notes = list(unpack_notes(self._view[:whole]))
        self._buffer[: self._rest] = self._buffer[whole:stop]
        return notes

    def _spin(self, room: memoryview, start: float) -> int:
        """Receive, asleep only after `spin_s`; not at all awake if the last wait took longer than that."""
        stop = start + self._spin_s
        while self._brisk and time.perf_counter() < stop:
            try:
                return self._sock.recv_into(room, 0, _NO_WAIT)
            except BlockingIOError:
                continue
        got = self._sock.recv_into(room)
        self._brisk = time.perf_counter() < stop + self._spin_s
        return got

    def wake(self) -> None:
        with suppress(Hangup):  # the peer went first
            self.reply(Kind.CLOSE, 0, 0)
        with self._sending:
            _shut(self._sock)

    def close(self) -> None:
        with self._sending:
            self._sock.close()


class _PagedBell(_Bell):
    """A receiver's, which finds the slot that a note names."""

    def __init__(self, sock: socket.socket, endpoint: Endpoint, spin_s: float, pages: list[wire.Page]) -> None:
        super().__init__(sock, endpoint, spin_s)
        self._pages = pages
        self._usual = -1.0  # how long the socket waits, while all there is to do is to wait for a note

    def arrivals(self, timeout: float) -> list[tuple[Note, wire.Page]]:
        """`slots.Inward.arrivals`. Its first lines are all that most chunks go through: one read of one note."""
        try:
            if timeout == self._usual:
                got = self._receive(self._view)
                if got == NOTE_BYTES:
                    note = unpack_note(self._view)
                    return [(note, self._pages[note[1]])]
            else:
                self._usual = -1.0
                got = self._read(timeout)
            notes = self._split(got)
            self._usual = self._bound if not self._rest and not self._spin_s else -1.0
            return [(note, self._pages[note[1]]) for note in notes]
        except BlockingIOError:
            return []
        except OSError as error:
            raise _broken(error) from error
        except IndexError:
            raise Hangup("the peer named a slot that does not exist") from None


class ShmOutward:
    """A sender's carrier: makes the memory and sends it along with the hello. `slots.Outward`."""

    ship_tells = True

    def __init__(self, endpoint: Endpoint, sock: socket.socket) -> None:
        memory = os.memfd_create("stretto", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(memory, 0o600)
            os.ftruncate(memory, _memory_bytes(endpoint))
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
            self._slots = _map_slots(memory, endpoint)
            _send_hello(sock, endpoint, memory)
        finally:
            os.close(memory)
        self._bell = _Bell(sock, endpoint)
        self.buffer = self._slots.__getitem__
        self.notes = self._bell.notes
        self.ship = self._bell.ship
        self.wake = self._bell.wake

    def close(self) -> None:
        self._bell.close()
        self._slots.clear()


class ShmInward:
    """A receiver's carrier: listens until the invited sender is there, then reads its notes. `slots.Inward`.

    Goes from listening (a listener) through greeting (a connection that has not said hello) to open (a bell)."""

    def __init__(self, endpoint: Endpoint, listener: socket.socket, spin_s: float) -> None:
        self._endpoint = endpoint
        self._spin_s = spin_s
        self._listener = listener
        self._guest: socket.socket | None = None
        self._guest_until = 0.0
        self._bell: _PagedBell | None = None
        self._slots: list[wire.Page] = []
        self.arrivals = self._greet  # until there is a bell

    def _greet(self, timeout: float) -> list[tuple[Note, wire.Page]]:
        """Nothing ever arrives: the caller comes again with the time that is left."""
        try:
            if self._guest is None:
                _bound_waits(self._listener, timeout)
                self._guest, _ = self._listener.accept()
                self._guest_until = time.monotonic() + _HELLO_S
            _bound_waits(self._guest, min(timeout, _HELLO_S))
            self._admit(self._guest)
        except BlockingIOError:
            if time.monotonic() >= self._guest_until:
                self._drop_guest()
        except OSError:  # the guest left before its hello, or `wake` shut the listener
            self._drop_guest()
        return []

    def _admit(self, guest: socket.socket) -> None:
        hello, fds = _receive_hello(guest)
        try:
            invited = hmac.compare_digest(hello, _hello(self._endpoint)) and _peer_uid(guest) == os.geteuid()
            if not invited or len(fds) != 1:
                raise ConnectionRefusedError("a stranger")
            self._slots = _map_slots(fds[0], self._endpoint)
        finally:
            for fd in fds:
                os.close(fd)
        self._bell, self._guest = _PagedBell(guest, self._endpoint, self._spin_s, self._slots), None
        self.arrivals = self._bell.arrivals
        self._listener.close()

    def _drop_guest(self) -> None:
        if self._guest is not None:
            self._guest.close()
            self._guest = None

    def reply(self, kind: int, slot: int, seq: int) -> None:
        assert self._bell is not None, "a chunk was taken, so a sender was there"
        self._bell.reply(kind, slot, seq)

    def wake(self) -> None:
        if self._bell is not None:
            self._bell.wake()
            return
        for sock in (self._guest, self._listener):
            if sock is not None:
                _shut(sock)

    def close(self) -> None:
        if self._bell is None:
            self._refuse_waiting()
            self._listener.close()
        else:
            self._bell.wake()  # again: the sender may have come in between `wake` and here
            self._bell.close()
        self._slots.clear()

    def _refuse_waiting(self) -> None:
        """A sender that connected but was never looked at is told good-bye too: it must not see a death."""
        try:
            self._listener.setblocking(False)
            guest = self._guest or self._listener.accept()[0]
        except OSError:
            return
        bell = _Bell(guest, self._endpoint)
        bell.wake()
        bell.close()


def _spin_s(link: str, options: LinkOptions) -> float:
    text = options.details.get("spin_us", "0")
    if not text.isdecimal() or int(text) > _MOST_SPIN_US:
        raise ValueError(f"link {link}: spin_us is a number of microseconds up to {_MOST_SPIN_US}, not {text!r}")
    return int(text) / 1e6


def _bound_waits(sock: socket.socket, timeout: float) -> None:
    """Let `recv` and `accept` wait for `timeout`, then raise BlockingIOError. Not by Python's own timeout: that takes
    a second system call each time, and does not notice that a listener was shut."""
    sock.setblocking(timeout > 0)
    if timeout > 0:  # a zero option would mean for ever
        seconds, micros = divmod(max(int(timeout * 1e6), 1), 1_000_000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(seconds, micros))


def _broken(error: OSError) -> Hangup:
    return Hangup(f"the connection broke: {error.strerror}")  # ECONNRESET: gone with our notes unread


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):  # not connected (any more)
        sock.shutdown(socket.SHUT_RDWR)


def _hello(endpoint: Endpoint) -> bytes:
    return f"stretto shm 1 {endpoint.generation:016x} {endpoint.nonce:>32.32}".encode()


def _send_hello(sock: socket.socket, endpoint: Endpoint, memory: int) -> None:
    fds = array.array("i", [memory])
    sock.sendmsg([_hello(endpoint)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])


def _receive_hello(sock: socket.socket) -> tuple[bytes, list[int]]:
    data, fds, _flags, _ = socket.recv_fds(sock, _HELLO_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    return data, fds


def _peer_uid(sock: socket.socket) -> int:
    _pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def _memory_bytes(endpoint: Endpoint) -> int:
    return stride_of(endpoint.slot_bytes) * endpoint.slots


def _map_slots(memory: int, endpoint: Endpoint) -> list[wire.Page]:
    size = _memory_bytes(endpoint)
    if os.fstat(memory).st_size != size or fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ConnectionRefusedError("not the memory that was agreed")
    return split_slots(map_shared(memory, size), endpoint.slots, endpoint.slot_bytes)
