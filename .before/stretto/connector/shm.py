"""The connector between processes of one machine: slots in shared memory, a unix socket as the doorbell.

Called by the two courier threads of a link; starts no thread. One memory file and one connection per link:

    sender                       memfd, slots x slot_bytes                      receiver
      encode chunk ───────────▶ [ slot 0 | slot 1 | ... ] ◀─────────── tensors are views
      CHUNK slot seq size ──────▶ unix stream socket ──▶ recv: note, or end of file
      slot is free again ◀──────── its word, in memory ◀───────────── chunk.release()

**Nothing is left behind, at any moment.** The memory is a `memfd` and the listening socket has an abstract address:
neither has a name in any file system, so there is nothing to unlink and no window in set-up. The memory file is
handed over as a descriptor on the connection (SCM_RIGHTS); while it is on its way the kernel owns it and drops it
with the socket. When both processes are gone, so is everything.

**Wake-up.** A note is 32 bytes on the socket, and the other side waits in `recv`: one system call per side per
chunk, no polling, no CPU when idle; the death of the peer is the end of file of that same `recv`. Measured against
an event fd (with the poll that it needs to see a death as well) and a futex, the socket wakes a process fastest.
A receiver may look again and again for a moment before it sleeps: see `looking`. The kernel's queue lock orders the
slot's bytes before the note on any processor, and a note is whole or absent, even if its writer is killed. The way
back needs no wake-up and no system call as long as the sender has slots left: see `returns`.

**Trust.** Only processes of the same user are spoken to (SO_PEERCRED, checked by both sides before a word is said),
and only the sender that says the endpoint's hello is listened to. A stranger of another user is let go at once, one of
the same user that stays silent after `_HELLO_S`; nothing is mapped for either. The memory file's size is sealed, so
that a peer cannot shrink it under us (a SIGBUS)."""

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

from stretto.connector import wire
from stretto.connector.contract import Chunk, Corrupt, Endpoint, LinkOptions, PeerDead, PutFailed, VersionMismatch
from stretto.connector.doorbell import AT_ONCE, Bell, PagedBell, bound_connect, bound_waits, broken, gone, shut
from stretto.connector.endpoint import (
    MAX_SLOTS,
    check_endpoint,
    check_options,
    hello_of,
    make_endpoint,
    new_nonce,
    secret_of,
)
from stretto.connector.looking import read_look_s
from stretto.connector.notes import NOTE_BYTES, Hangup, Kind, Note, pack_note, split_slots, stride_of, unpack_note
from stretto.connector.pinned import map_shared
from stretto.connector.returns import ORDERED, RELOOK_S, Returns
from stretto.connector.slots import LARGE, Leaving, SlotLease, SlotReceiver, SlotSender, State
from stretto.types import RequestId

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_UCRED = struct.Struct("3i")  # pid, uid, gid
_CHUNK, _RING = int(Kind.CHUNK), int(Kind.RING)
_OPEN = State.OPEN
_HELLO_S = 5.0  # for a guest to say hello. It is sent right after connecting, but a busy machine has been seen to pause
_ASKED = 8  # questions after which the socket is read, well before their rings fill it
_WORDS_BYTES = stride_of(8 * (MAX_SLOTS + 1))  # of `Returns`


class ShmConnector:
    name: ClassVar[str] = "shm"
    inline: ClassVar[bool] = False

    def listen(self, link: str, options: LinkOptions) -> ShmReceiver:
        check_options(link, options)
        look_s = read_look_s(link, options.details, os.environ)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        endpoint = make_endpoint(self.name, link, options, f"stretto-{secrets.token_hex(16)}", new_nonce())
        try:
            listener.bind("\0" + endpoint.address)
            listener.listen(4)
        except OSError:
            listener.close()
            raise
        hello = hello_of(endpoint, secret_of(link, options))
        return ShmReceiver(endpoint, ShmInward(endpoint, hello, listener, look_s))

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> ShmSender:
        check_endpoint(self.name, endpoint, options)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            bound_connect(sock, options.connect_timeout_s)
            hello = hello_of(endpoint, secret_of(endpoint.link, options))
            return ShmSender(endpoint, options, ShmOutward(endpoint, hello, sock))
        except OSError as error:
            sock.close()
            raise PeerDead(f"nobody listens: {error}", link=endpoint.link) from error
        except Corrupt:
            sock.close()
            raise


class ShmSender(SlotSender):
    """With a shorter way for most chunks: rows on the host, nothing in front of them, a slot that is there.

    `put` is one flat piece of code, since every call, and everything that is made and dropped, is felt in a process
    that was asleep a moment ago: cold, Python takes several times as long. It finds the slot that was sent last by one
    look at its word. So a link with one chunk on its way at a time uses one slot, which is warm, and reads no notes."""

    def __init__(self, endpoint: Endpoint, options: LinkOptions, carrier: ShmOutward) -> None:
        super().__init__(endpoint, options, carrier, checksum=False)
        self._returns = carrier.returns
        self._returns.flight = self._flight
        self._send = carrier.send
        self._last = 0  # the slot that was sent last,
        self._awaited = -1  # and its word when it is back; -1: someone else has looked after the slots since

    def put(self, chunk: Chunk, timeout: float) -> bool:
        header = chunk.header
        self._turn.acquire()  # not `with`, which costs twice as much
        try:
            if (
                self._leaving
                or self._state is not _OPEN
                or not self._zero_copy
                or (self._floor and self._fences.stale(header))
            ):
                return self._put(chunk, timeout)
            slot = self._last
            is_back = self._returns.words[slot] == self._awaited
            if not is_back:
                if not self._free:
                    return self._put(chunk, timeout)
                slot = self._free[-1]
            page = self._pages[slot]
            landed = wire.write_blobs(page, chunk, self._copies)
            if landed is not None:
                if is_back:
                    del self._flight[slot]
                else:
                    self._free.pop()
                self._awaited = -1
                self._leaving.append(Leaving(slot, page, chunk, landed))
                return True
            size = wire.write_head(page, header, checksum=self._checksum)
            if not is_back:
                self._free.pop()
            seq = self._seq
            self._flight[slot] = (seq, header.request)
            self._seq = seq + 1
            self._last = slot
            self._awaited = 2 * seq + 2
            self._send(pack_note(_CHUNK, slot, seq, size, self._generation), AT_ONCE)
            if size > LARGE or not self._free:
                self._take_back()
        except PutFailed as failed:
            failed.link = self.link
            raise
        except OSError as error:
            self._not_sent(slot, gone(error))
        finally:
            self._turn.release()
        chunk.release()
        return True

    def _take_back(self) -> None:
        """As `_pump`, without a system call."""
        try:
            if news := self._returns.news():
                self._awaited = -1
                self._hear(news)
        except Hangup as hangup:
            self._finish(State.DEAD, str(hangup))

    def _pump(self, timeout: float) -> bool:
        came = super()._pump(timeout)
        if came:
            self._awaited = -1
        return came

    def _ship(self, slot: int, size: int, request: RequestId) -> None:
        self._awaited = -1
        super()._ship(slot, size, request)


class ShmReceiver(SlotReceiver):
    """With a shorter way for what most waits bring: one note, about the one chunk that is due."""

    def __init__(self, endpoint: Endpoint, carrier: ShmInward) -> None:
        super().__init__(endpoint, carrier)
        self._inward = carrier

    def take(self, timeout: float) -> Chunk | None:
        """Flat, for the reason that `ShmSender.put` is."""
        self._turn.acquire()
        seq = -1
        try:
            bell = self._inward.bell
            if bell is None or timeout != bell.usual or self._arrived or self._state is not _OPEN:
                return self._take(timeout)
            got = bell.wait(bell.view)
            if got == NOTE_BYTES:
                kind, slot, seq, size, generation = unpack_note(bell.view)
                if (
                    seq == self._next
                    and kind == _CHUNK
                    and generation == self._generation
                    and slot < self._slots
                    and len(self._held) < self._slots
                ):
                    self._held[seq] = slot
                    self._next = seq + 1
                    chunk = wire.read(bell.pages[slot], size, SlotLease(self, seq))
                    if not self._floor or not self._fences.stale(chunk.header):
                        return chunk
                    chunk.release()
                    return self._take(timeout)
            self._accept(bell.sort(got))
            return self._take_by(0.0)
        except BlockingIOError:
            return None  # it waited for as long as `usual`
        except (Corrupt, VersionMismatch) as error:
            self._refuse(seq, error)
            raise
        except Hangup as hangup:
            self._finish(State.DEAD, str(hangup))
        except OSError as error:
            self._finish(State.DEAD, str(broken(error)))
        finally:
            self._turn.release()
        return super().take(0.0)  # raises why it ended


class ShmOutward:
    """A sender's carrier: makes the memory, connects, and sends it along with the hello. `notes.Outward`."""

    ship_tells = True

    def __init__(self, endpoint: Endpoint, hello: bytes, sock: socket.socket) -> None:
        memory = os.memfd_create("stretto", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(memory, 0o600)
            os.ftruncate(memory, _memory_bytes(endpoint))
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
            self._slots, self.returns = _map_memory(memory, endpoint)
            # Not earlier: who has connected must say hello soon.
            sock.connect("\0" + endpoint.address)
            if not _is_ours(sock):
                raise Corrupt("the listener runs as another user", link=endpoint.link)
            _send_hello(sock, hello, memory)
        finally:
            os.close(memory)
        self._bell = Bell(sock, endpoint)
        self._asked = 0  # questions since the socket was read: each may have left a ring there, which takes room
        self.pages = self._slots
        self.send = self._bell.send
        self.ship = self._bell.ship
        self.wake = self._bell.wake

    def notes(self, timeout: float) -> list[Note]:
        returns = self.returns
        news = returns.news()
        if news or timeout <= 0:
            return news or self._read(0.0)[0]
        if self._asked >= _ASKED and (notes := self._read(0.0)[0]):
            return notes
        deadline, wait = time.monotonic() + timeout, min(timeout, RELOOK_S)
        try:
            while wait > 0:
                self._asked += 1
                returns.ask(True)
                if news := returns.news():
                    return news
                notes, rung = self._read(wait)
                if notes:
                    return notes
                left = deadline - time.monotonic()
                wait = min(left, RELOOK_S) if rung else left  # a ring took the question back
            return returns.news()
        finally:
            returns.ask(False)

    def _read(self, timeout: float) -> tuple[list[Note], bool]:
        """Notes, and whether there was a ring among them."""
        self._asked = 0
        notes = self._bell.notes(timeout)
        others = [note for note in notes if note[0] != _RING]
        return others, len(others) < len(notes)

    def close(self) -> None:
        self._bell.close()
        self._slots.clear()
        self.returns.let_go()


class ShmInward:
    """A receiver's carrier: listens until the invited sender is there, then reads its notes. `notes.Inward`.

    Goes from listening (a listener) through greeting (a connection that has not said hello) to open (a bell)."""

    def __init__(self, endpoint: Endpoint, hello: bytes, listener: socket.socket, look_s: float) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._look_s = look_s
        self._listener = listener
        self._guest: socket.socket | None = None
        self._guest_until = 0.0
        self.bell: PagedBell | None = None
        self._slots: list[wire.Page] = []
        self._returns: Returns | None = None
        self.arrivals = self._greet  # until there is a bell

    def _greet(self, timeout: float) -> list[tuple[Note, wire.Page]]:
        """Nothing ever arrives: the caller comes again with the time that is left."""
        try:
            if self._guest is None:
                bound_waits(self._listener, timeout)
                self._guest, _ = self._listener.accept()
                self._guest_until = time.monotonic() + _HELLO_S
                if not _is_ours(self._guest):
                    raise ConnectionRefusedError("a stranger")
            bound_waits(self._guest, min(timeout, _HELLO_S))
            self._admit(self._guest)
        except BlockingIOError:
            if time.monotonic() >= self._guest_until:
                self._drop_guest()
        except OSError:  # a stranger, or it left before its hello, or `wake` shut the listener
            self._drop_guest()
        return []

    def _admit(self, guest: socket.socket) -> None:
        said, fds = _receive_hello(guest, len(self._hello))
        try:
            if not hmac.compare_digest(said, self._hello) or len(fds) != 1:
                raise ConnectionRefusedError("a stranger")
            self._slots, self._returns = _map_memory(fds[0], self._endpoint)
        finally:
            for fd in fds:
                os.close(fd)
        self.bell, self._guest = PagedBell(guest, self._endpoint, self._look_s, self._slots), None
        self.arrivals = self.bell.arrivals
        self._listener.close()

    def _drop_guest(self) -> None:
        if self._guest is not None:
            self._guest.close()
            self._guest = None

    def reply(self, kind: int, slot: int, seq: int) -> None:
        bell, returns = self.bell, self._returns
        if bell is None or returns is None:
            return  # closed: there is nobody to use the slot
        if not ORDERED:
            bell.reply(kind, slot, seq)
        elif returns.give_back(kind, slot, seq):
            bell.reply(_RING, 0, 0)

    def wake(self) -> None:
        if self.bell is not None:
            self.bell.wake()
            return
        for sock in (self._guest, self._listener):
            if sock is not None:
                shut(sock)

    def close(self) -> None:
        if self.bell is None:
            self._refuse_waiting()
            self._listener.close()
        else:
            self.bell.wake()  # again: the sender may have come in between `wake` and here
            self.bell.close()
        self._slots.clear()
        self._returns = None

    def _refuse_waiting(self) -> None:
        """A sender that connected but was never looked at is told good-bye too: it must not see a death."""
        try:
            self._listener.setblocking(False)
            guest = self._guest or self._listener.accept()[0]
        except OSError:
            return
        bell = Bell(guest, self._endpoint)
        bell.wake()
        bell.close()


def _send_hello(sock: socket.socket, hello: bytes, memory: int) -> None:
    fds = array.array("i", [memory])
    sock.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])


def _receive_hello(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """What a guest says first, and the descriptors that it sends along; of those the kernel lets one through."""
    data, fds, _flags, _ = socket.recv_fds(sock, size, 1, socket.MSG_CMSG_CLOEXEC)
    return data, fds


def _is_ours(sock: socket.socket) -> bool:
    """Whether the other end is a process of our own user."""
    return _peer_uid(sock) == os.geteuid()


def _peer_uid(sock: socket.socket) -> int:
    _pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def _memory_bytes(endpoint: Endpoint) -> int:
    return stride_of(endpoint.slot_bytes) * endpoint.slots + _WORDS_BYTES


def _map_memory(memory: int, endpoint: Endpoint) -> tuple[list[wire.Page], Returns]:
    """The slots, and behind them a page of words. That one is mapped by itself, so that the words do not keep the slots
    (and their page locks) in memory."""
    size = _memory_bytes(endpoint)
    if os.fstat(memory).st_size != size or fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ConnectionRefusedError("not the memory that was agreed")
    slots = split_slots(map_shared(memory, size - _WORDS_BYTES), endpoint.slots, endpoint.slot_bytes)
    words = mmap.mmap(memory, _WORDS_BYTES, offset=size - _WORDS_BYTES)
    return slots, Returns(words, endpoint.slots, endpoint.generation)
