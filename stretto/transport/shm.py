"""The connector between processes of one machine: slots in shared memory, notes on a unix socket.

Called by the two courier threads of a link; starts no thread. One memory file and one connection
per link:

    sender                       memfd, slots x slot_bytes                      receiver
      encode chunk ───────────▶ [ slot 0 | slot 1 | ... ] ◀─────────── tensors are views
      CHUNK slot seq size ──────▶ unix stream socket ──▶ recv: note, or end of file
      slot is free again ◀──────── its word, in memory ◀───────────── chunk.release()

**No leftovers.** The memory is a `memfd` and the listening socket has an abstract address: neither
has a name in a file system, so there is nothing to unlink. The memory file is passed as a
descriptor on the connection (SCM_RIGHTS); in transit the kernel owns it and frees it with the
socket. When both processes are gone, so is everything.

**Wake-up.** A note is 32 bytes on the socket, and the other side waits in `recv`: one system call
per side and chunk, no polling, no CPU time when idle. The death of the peer is the end of file of
the same `recv`. In measurements the socket woke a process faster than an event fd (which also needs
a poll to see a death) and than a futex. A receiver may spin before it sleeps (`spinwait`). The
kernel's queue lock orders the slot's bytes before the note on any processor, and a note is whole or
absent, even if its writer is killed. Returning a slot takes neither a wake-up nor a system call
while the sender has free slots (`returns`).

**Trust.** Both sides accept only a process of the same user (SO_PEERCRED, checked before anything
is sent), and the receiver only a sender with the endpoint's hello. A connection of another user is
closed at once, one of the same user after `_HELLO_S` without a hello; nothing is mapped for either.
The memory file's size is sealed, so that a peer cannot shrink it (which would be a SIGBUS here)."""

from __future__ import annotations

import array
import fcntl
import hmac
import mmap
import os
import secrets
import socket
import struct
import time
from typing import ClassVar

from stretto.transport import wire
from stretto.transport.contract import (
    Chunk,
    Corrupt,
    Endpoint,
    LinkOptions,
    PeerDead,
    PutFailed,
    VersionMismatch,
)
from stretto.transport.endpoint import (
    MAX_SLOTS,
    check_endpoint,
    check_options,
    hello_of,
    make_endpoint,
    new_nonce,
    secret_of,
)
from stretto.transport.notes import (
    NOTE_BYTES,
    Hangup,
    Kind,
    Note,
    pack_note,
    split_slots,
    stride_of,
    unpack_note,
)
from stretto.transport.notesocket import (
    SEND_FLAGS,
    NoteSocket,
    ReceiverSocket,
    broken,
    gone,
    set_connect_timeout,
    set_timeout,
    shut_down,
)
from stretto.transport.pinned import map_shared
from stretto.transport.returns import ORDERED, RECHECK_S, Returns
from stretto.transport.slots import LARGE, EndState, Pending, SlotLease, SlotReceiver, SlotSender
from stretto.transport.spinwait import read_spin_s
from stretto.types import RequestId

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_UCRED = struct.Struct("3i")  # pid, uid, gid
_CHUNK, _WAKE = int(Kind.CHUNK), int(Kind.WAKE)
_OPEN = EndState.OPEN
# for a connection to send its hello. It does so right after connecting, but a busy machine may
# pause it
_HELLO_S = 5.0
_MAX_UNREAD = 8  # wake flags after which the socket is read, well before their notes fill it
_WORDS_BYTES = stride_of(8 * (MAX_SLOTS + 1))  # of `Returns`


class ShmConnector:
    name: ClassVar[str] = "shm"

    def listen(self, link: str, options: LinkOptions) -> ShmReceiver:
        check_options(link, options)
        spin_s = read_spin_s(link, options.details, os.environ)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        endpoint = make_endpoint(
            self.name, link, options, f"stretto-{secrets.token_hex(16)}", new_nonce()
        )
        try:
            listener.bind("\0" + endpoint.address)
            listener.listen(4)
        except OSError:
            listener.close()
            raise
        hello = hello_of(endpoint, secret_of(link, options))
        return ShmReceiver(endpoint, ShmReceiveTransport(endpoint, hello, listener, spin_s))

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> ShmSender:
        check_endpoint(self.name, endpoint, options)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            set_connect_timeout(sock, options.connect_timeout_s)
            hello = hello_of(endpoint, secret_of(endpoint.link, options))
            return ShmSender(endpoint, options, ShmSendTransport(endpoint, hello, sock))
        except OSError as error:
            sock.close()
            raise PeerDead(f"nobody listens: {error}", link=endpoint.link) from error
        except Corrupt:
            sock.close()
            raise


class ShmSender(SlotSender):
    """With a fast path for most chunks: host rows, no copies pending, a free slot.

    `put` is one flat function, since in a process that has just woken up Python runs several times
    slower, and every call and every temporary object counts. It finds out by one read of its word
    whether the slot that was sent last is back. So a link with one chunk in flight at a time uses
    one slot, which stays in the caches, and reads no notes."""

    def __init__(
        self, endpoint: Endpoint, options: LinkOptions, transport: ShmSendTransport
    ) -> None:
        super().__init__(endpoint, options, transport, checksum=False)
        self._returns = transport.returns
        self._returns.flight = self._flight
        self._send = transport.send
        self._last = 0  # the slot that was sent last,
        self._awaited = (
            -1
        )  # and its word when it is back; -1: slots were taken or returned by another path since

    def put(self, chunk: Chunk, timeout: float) -> bool:
        header = chunk.header
        self._mutex.acquire()  # not `with`, which costs twice as much
        try:
            if (
                self._pending
                or self._state is not _OPEN
                or not self._zero_copy
                or (self._over and self._fences.stale(header))
            ):
                return self._put(chunk, timeout)
            slot = self._last
            is_back = self._returns.words[slot] == self._awaited
            if not is_back:
                if not self._free:
                    return self._put(chunk, timeout)
                slot = self._free[-1]
            page = self._pages[slot]
            copied = wire.write_blobs(page, chunk, self._copies)
            if copied is not None:
                if is_back:
                    del self._flight[slot]
                else:
                    self._free.pop()
                self._awaited = -1
                self._pending.append(Pending(slot, page, chunk, copied))
                return True
            size = wire.write_head(page, header, checksum=self._checksum)
            if not is_back:
                self._free.pop()
            seq = self._seq
            self._flight[slot] = (seq, header.request)
            self._seq = seq + 1
            self._last = slot
            self._awaited = 2 * seq + 2
            self._send(pack_note(_CHUNK, slot, seq, size, self._generation), SEND_FLAGS)
            if size > LARGE or not self._free:
                self._read_returns()
        except PutFailed as failed:
            failed.link = self.link
            raise
        except OSError as error:
            self._not_sent(slot, gone(error))
        finally:
            self._mutex.release()
        chunk.release()
        return True

    def _read_returns(self) -> None:
        """As `_pump`, without a system call."""
        try:
            if notes := self._returns.returned():
                self._awaited = -1
                self._handle(notes)
        except Hangup as hangup:
            self._finish(EndState.DEAD, str(hangup))

    def _pump(self, timeout: float) -> bool:
        came = super()._pump(timeout)
        if came:
            self._awaited = -1
        return came

    def _announce(self, slot: int, size: int, request: RequestId) -> None:
        self._awaited = -1
        super()._announce(slot, size, request)


class ShmReceiver(SlotReceiver):
    """With a fast path for most waits: one note, that of the next chunk."""

    def __init__(self, endpoint: Endpoint, transport: ShmReceiveTransport) -> None:
        super().__init__(endpoint, transport)
        self._shm = transport

    def take(self, timeout: float) -> Chunk | None:
        """One flat function, as `ShmSender.put` is."""
        self._mutex.acquire()
        seq = -1
        try:
            sock = self._shm.socket
            if (
                sock is None
                or timeout != sock.ready_timeout
                or self._arrived
                or self._state is not _OPEN
            ):
                return self._take(timeout)
            got = sock.wait(sock.view)
            if got == NOTE_BYTES:
                kind, slot, seq, size, generation = unpack_note(sock.view)
                if (
                    seq == self._next
                    and kind == _CHUNK
                    and generation == self._generation
                    and slot < self._slots
                    and len(self._held) < self._slots
                ):
                    self._held[seq] = slot
                    self._next = seq + 1
                    chunk = wire.read(sock.pages[slot], size, SlotLease(self, seq))
                    if not self._over or not self._fences.stale(chunk.header):
                        return chunk
                    chunk.release()
                    return self._take(timeout)
            self._accept(sock.arrived(got))
            return self._take_by(0.0)
        except BlockingIOError:
            return None  # the timeout has passed
        except (Corrupt, VersionMismatch) as error:
            self._refuse(seq, error)
            raise
        except Hangup as hangup:
            self._finish(EndState.DEAD, str(hangup))
        except OSError as error:
            self._finish(EndState.DEAD, str(broken(error)))
        finally:
            self._mutex.release()
        return super().take(0.0)  # raises the reason


class ShmSendTransport:
    """`notes.SendTransport`: makes the memory, connects, and passes it along with the hello."""

    detects_hangup = True

    def __init__(self, endpoint: Endpoint, hello: bytes, sock: socket.socket) -> None:
        memory = os.memfd_create("stretto", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(memory, 0o600)
            os.ftruncate(memory, _memory_bytes(endpoint))
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
            self._slots, self.returns = _map_memory(memory, endpoint)
            # Not earlier: after connecting, the hello is due soon.
            sock.connect("\0" + endpoint.address)
            if not _is_ours(sock):
                raise Corrupt("the listener runs as another user", link=endpoint.link)
            _send_hello(sock, hello, memory)
        finally:
            os.close(memory)
        self._socket = NoteSocket(sock, endpoint)
        # wake flags set since the socket was read: each may have left a note there
        self._unread = 0
        self.pages = self._slots
        self.send = self._socket.send
        self.send_chunk = self._socket.send_chunk
        self.wake = self._socket.wake

    def notes(self, timeout: float) -> list[Note]:
        returns = self.returns
        returned = returns.returned()
        if returned or timeout <= 0:
            return returned or self._read(0.0)[0]
        if self._unread >= _MAX_UNREAD and (notes := self._read(0.0)[0]):
            return notes
        deadline, wait = time.monotonic() + timeout, min(timeout, RECHECK_S)
        try:
            while wait > 0:
                self._unread += 1
                returns.set_wake(True)
                if returned := returns.returned():
                    return returned
                notes, woken = self._read(wait)
                if notes:
                    return notes
                left = deadline - time.monotonic()
                wait = min(left, RECHECK_S) if woken else left  # a wake note has cleared the flag
            return returns.returned()
        finally:
            returns.set_wake(False)

    def _read(self, timeout: float) -> tuple[list[Note], bool]:
        """Notes, and whether there was a wake note among them."""
        self._unread = 0
        notes = self._socket.notes(timeout)
        others = [note for note in notes if note[0] != _WAKE]
        return others, len(others) < len(notes)

    def close(self) -> None:
        self._socket.close()
        self._slots.clear()
        self.returns.close()


class ShmReceiveTransport:
    """`notes.ReceiveTransport`: accepts connections until the invited sender is there, then reads
    its notes.

    Three states: listening; a pending connection that has not sent its hello; open (`socket` is
    set)."""

    def __init__(
        self, endpoint: Endpoint, hello: bytes, listener: socket.socket, spin_s: float
    ) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._spin_s = spin_s
        self._listener = listener
        self._pending: socket.socket | None = None
        self._pending_until = 0.0
        self.socket: ReceiverSocket | None = None
        self._slots: list[wire.Page] = []
        self._returns: Returns | None = None
        self.arrivals = self._authenticate  # until the sender is there

    def _authenticate(self, timeout: float) -> list[tuple[Note, wire.Page]]:
        """Returns nothing: the caller comes again with the time that is left."""
        try:
            if self._pending is None:
                set_timeout(self._listener, timeout)
                self._pending, _ = self._listener.accept()
                self._pending_until = time.monotonic() + _HELLO_S
                if not _is_ours(self._pending):
                    raise ConnectionRefusedError("another user")
            set_timeout(self._pending, min(timeout, _HELLO_S))
            self._admit(self._pending)
        except BlockingIOError:
            if time.monotonic() >= self._pending_until:
                self._drop_pending()
        except (
            OSError
        ):  # it was refused, or left before its hello, or `wake` shut down the listener
            self._drop_pending()
        return []

    def _admit(self, sock: socket.socket) -> None:
        hello, fds = _receive_hello(sock, len(self._hello))
        try:
            if not hmac.compare_digest(hello, self._hello) or len(fds) != 1:
                raise ConnectionRefusedError("not the hello of this link")
            self._slots, self._returns = _map_memory(fds[0], self._endpoint)
        finally:
            for fd in fds:
                os.close(fd)
        self.socket = ReceiverSocket(sock, self._endpoint, self._spin_s, self._slots)
        self._pending = None
        self.arrivals = self.socket.arrivals
        self._listener.close()

    def _drop_pending(self) -> None:
        if self._pending is not None:
            self._pending.close()
            self._pending = None

    def reply(self, kind: int, slot: int, seq: int) -> None:
        sock, returns = self.socket, self._returns
        if sock is None or returns is None:
            return  # closed: nobody uses the slot any more
        if not ORDERED:
            sock.reply(kind, slot, seq)
        elif returns.give_back(kind, slot, seq):
            sock.reply(_WAKE, 0, 0)

    def wake(self) -> None:
        if self.socket is not None:
            self.socket.wake()
            return
        for sock in (self._pending, self._listener):
            if sock is not None:
                shut_down(sock)

    def close(self) -> None:
        if self.socket is None:
            self._close_waiting()
            self._listener.close()
        else:
            self.socket.wake()  # again: the sender may have connected between `wake` and here
            self.socket.close()
        self._slots.clear()
        self._returns = None

    def _close_waiting(self) -> None:
        """Send CLOSE also to a sender that has connected and was not accepted yet: it must not see
        a death."""
        try:
            self._listener.setblocking(False)
            sock = self._pending or self._listener.accept()[0]
        except OSError:
            return
        waiting = NoteSocket(sock, self._endpoint)
        waiting.wake()
        waiting.close()


def _send_hello(sock: socket.socket, hello: bytes, memory: int) -> None:
    fds = array.array("i", [memory])
    sock.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])


def _receive_hello(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """The first bytes of a connection, and the descriptors that come with them (at most one)."""
    data, fds, _flags, _ = socket.recv_fds(sock, size, 1, socket.MSG_CMSG_CLOEXEC)
    return data, fds


def _is_ours(sock: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    return _peer_uid(sock) == os.geteuid()


def _peer_uid(sock: socket.socket) -> int:
    _pid, uid, _gid = _UCRED.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return int(uid)


def _memory_bytes(endpoint: Endpoint) -> int:
    return stride_of(endpoint.slot_bytes) * endpoint.slots + _WORDS_BYTES


def _map_memory(memory: int, endpoint: Endpoint) -> tuple[list[wire.Page], Returns]:
    """The slots, and behind them a page of words. The page has a mapping of its own, so that it
    does not keep the slots (and their page locks) alive."""
    size = _memory_bytes(endpoint)
    if (
        os.fstat(memory).st_size != size
        or fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS
    ):
        raise ConnectionRefusedError("memory of another size, or unsealed")
    slots = split_slots(
        map_shared(memory, size - _WORDS_BYTES), endpoint.slots, endpoint.slot_bytes
    )
    words = mmap.mmap(memory, _WORDS_BYTES, offset=size - _WORDS_BYTES)
    return slots, Returns(words, endpoint.slots, endpoint.generation)
