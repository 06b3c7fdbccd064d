"""The connector between processes of one machine: slots in shared memory, messages on a unix
socket.

Called by the two courier threads of a link; starts no thread. One memory file and one connection
per link:

    sender                       memfd, slots x slot_bytes                      receiver
      encode chunk ───────────▶ [ slot 0 | slot 1 | ... ] ◀─────────── tensors are views
      CHUNK slot seq size ──────▶ unix stream socket ──▶ recv: message, or end of file
      slot is free again ◀───── unix stream socket ◀── RELEASE slot ── chunk.release()

**No leftovers.** The memory is a `memfd` and the listening socket has an abstract address: neither
has a name in a file system, so there is nothing to unlink. The memory file is passed as a
descriptor on the connection (SCM_RIGHTS); in transit the kernel owns it and frees it with the
socket. When both processes are gone, so is everything.

**Wake-up.** A message is 32 bytes on the socket, and the other side waits in `recv`: one system
call per side and chunk, no polling, no CPU time when idle. The death of the peer is the end of file
of the same `recv`. In measurements the socket woke a process faster than an event fd (which also
needs a poll to see a death) and than a futex. The kernel's queue lock orders the slot's bytes
before the message on any processor, and a message is whole or absent, even if its writer is killed.
The sender reads returned slots many at a time, when it has no free one left.

**Trust.** Both sides accept only a process of the same user (SO_PEERCRED, checked before anything
is sent), and the receiver only a sender with the endpoint's hello. A connection of another user is
closed at once, one of the same user after `_HELLO_S` without a hello; nothing is mapped for either.
The memory file's size is sealed, so that a peer cannot shrink it (which would be a SIGBUS here).

**Page locks.** In a process that uses CUDA the slots are page-locked for as long as their mapping
lives, so that a GPU copies to and from them at full speed. Otherwise a device copy would go through
the driver's staging buffer, at a fraction of the speed, and block the calling thread."""

from __future__ import annotations

import array
import fcntl
import hmac
import logging
import mmap
import os
import secrets
import socket
import struct
import time
from typing import Any, ClassVar

import torch

from stretto.transport import wire
from stretto.transport.contract import Corrupt, Endpoint, LinkOptions, PeerDead
from stretto.transport.endpoint import (
    check_endpoint,
    check_options,
    hello_of,
    make_endpoint,
    new_nonce,
    secret_of,
)
from stretto.transport.slot_transport import Hangup, LinkMessage, split_slots, stride_of
from stretto.transport.slots import SlotReceiver, SlotSender
from stretto.transport.unix_socket import MessageSocket, set_connect_timeout, set_timeout, shut_down

log = logging.getLogger(__name__)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_UCRED = struct.Struct("3i")  # pid, uid, gid
# for a connection to send its hello. It does so right after connecting, but a busy machine may
# pause it
_HELLO_S = 5.0


class ShmConnector:
    name: ClassVar[str] = "shm"

    def listen(self, link: str, options: LinkOptions) -> SlotReceiver:
        check_options(link, options)
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
        return SlotReceiver(endpoint, ShmReceiveTransport(endpoint, hello, listener))

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> SlotSender:
        check_endpoint(self.name, endpoint, options)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            set_connect_timeout(sock, options.connect_timeout_s)
            hello = hello_of(endpoint, secret_of(endpoint.link, options))
            transport = ShmSendTransport(endpoint, hello, sock)
            return SlotSender(endpoint, options, transport, checksum=False)
        except OSError as error:
            sock.close()
            raise PeerDead(f"nobody listens: {error}", link=endpoint.link) from error
        except Corrupt:
            sock.close()
            raise


class ShmSendTransport:
    """`slot_transport.SendTransport`: makes the memory, connects, and passes it along with the
    hello."""

    detects_hangup = True

    def __init__(self, endpoint: Endpoint, hello: bytes, sock: socket.socket) -> None:
        memory = os.memfd_create("stretto", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(memory, 0o600)
            os.ftruncate(memory, memory_bytes(endpoint))
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
            self._slots = _map_slots(memory, endpoint)
            # Not earlier: after connecting, the hello is due soon.
            sock.connect("\0" + endpoint.address)
            if not _is_ours(sock):
                raise Corrupt("the listener runs as another user", link=endpoint.link)
            _send_hello(sock, hello, memory)
        finally:
            os.close(memory)
        self.socket = MessageSocket(sock, endpoint)
        self.pages = self._slots
        self.send_chunk = self.socket.send_chunk
        self.messages = self.socket.messages
        self.wake = self.socket.wake

    def close(self) -> None:
        self.socket.close()
        self._slots.clear()


class ShmReceiveTransport:
    """`slot_transport.ReceiveTransport`: accepts connections until the invited sender is there,
    then reads its messages.

    Three states: listening; a pending connection that has not sent its hello; open (`socket` is
    set)."""

    def __init__(self, endpoint: Endpoint, hello: bytes, listener: socket.socket) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._listener = listener
        self._pending: socket.socket | None = None
        self._pending_until = 0.0
        self.socket: MessageSocket | None = None
        self._slots: list[wire.Page] = []

    def arrivals(self, timeout: float) -> list[tuple[LinkMessage, wire.Page]]:
        if self.socket is None:
            self._authenticate(timeout)
            return []  # the caller comes again with the time that is left
        try:
            return [(message, self._slots[message[1]]) for message in self.socket.messages(timeout)]
        except IndexError:
            raise Hangup("the peer named a slot that does not exist") from None

    def _authenticate(self, timeout: float) -> None:
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

    def _admit(self, sock: socket.socket) -> None:
        hello, fds = _receive_hello(sock, len(self._hello))
        try:
            if not hmac.compare_digest(hello, self._hello) or len(fds) != 1:
                raise ConnectionRefusedError("not the hello of this link")
            self._slots = _map_slots(fds[0], self._endpoint)
        finally:
            for fd in fds:
                os.close(fd)
        self.socket = MessageSocket(sock, self._endpoint)
        self._pending = None
        self._listener.close()

    def _drop_pending(self) -> None:
        if self._pending is not None:
            self._pending.close()
            self._pending = None

    def reply(self, kind: int, slot: int, seq: int) -> None:
        if self.socket is not None:
            self.socket.reply(kind, slot, seq)

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

    def _close_waiting(self) -> None:
        """Send CLOSE also to a sender that has connected and was not accepted yet: it must not see
        a death."""
        try:
            self._listener.setblocking(False)
            sock = self._pending or self._listener.accept()[0]
        except OSError:
            return
        waiting = MessageSocket(sock, self._endpoint)
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
    return peer_uid(sock) == os.geteuid()


def peer_uid(sock: socket.socket) -> int:
    _pid, uid, _gid = _UCRED.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return int(uid)


def memory_bytes(endpoint: Endpoint) -> int:
    return stride_of(endpoint.slot_bytes) * endpoint.slots


def _map_slots(memory: int, endpoint: Endpoint) -> list[wire.Page]:
    size = memory_bytes(endpoint)
    if os.fstat(memory).st_size != size or fcntl.fcntl(memory, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ConnectionRefusedError("memory of another size, or unsealed")
    return split_slots(map_shared(memory, size), endpoint.slots, endpoint.slot_bytes)


class SharedMap(mmap.mmap):
    """A shared mapping of a file, page-locked where there is CUDA. Views of it (a slot, a taken
    chunk's tensors) keep it, and its registration."""

    _address: int | None = None  # where it is registered, if it is

    def register(self) -> bool:
        """Lock and register the pages if this process uses CUDA. False: it does not, or the driver
        refused."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return False
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        error = int(_driver().cudaHostRegister(address, len(self), 0))
        if error:
            # Copies still work, slower: a limit on locked memory must not fail a request.
            log.warning("could not page-lock %d bytes of a link: CUDA error %d", len(self), error)
            return False
        self._address = address
        return True

    def __del__(self) -> None:
        # Before the pages are unmapped: the address may soon belong to another mapping.
        if self._address is not None:
            _driver().cudaHostUnregister(self._address)
            self._address = None


def map_shared(fd: int, size: int) -> SharedMap:
    """Map `size` bytes of `fd`, ready for device copies where there is a device."""
    mapping = SharedMap(fd, size)
    mapping.register()
    return mapping


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
