"""The connection of a link between machines: one ZeroMQ socket per end. `mooncake` sends its
messages on it, `tcp` its chunks too.

The receiver binds a ROUTER, the sender connects a DEALER, once. There is no reconnection: a link
that broke starts again with a new generation. ZeroMQ's own I/O thread does the handshake, the
heartbeats and the reading, so a busy interpreter on one side does not look like a death to the
other.

**Death.** The end of a connection is an event of the socket's monitor: immediate when the peer's
kernel closes it (the process died), after `heartbeat_s` without an answer when the machine or the
network is gone. A CLOSE message precedes the end of a connection that is closed in good order.

**Authentication.** The connection is CURVE: encrypted and authenticated. The receiver's key pair is
derived from the link's secret and the endpoint's nonce, so only the invited listener can answer,
and a peer without the secret does not complete the handshake, during which at most one message of
it is held. The sender's first message then carries the endpoint's hello. Until then a connection is
pending (`pending`): few at a time, shut down when it sends anything else or nothing for too long,
or when the sender is connected.

**Threads.** A ZeroMQ socket must not be used by two threads at once, but `release` may come from
any thread while the courier waits. So every call on the socket is short and under a lock, and the
courier waits outside the lock, on file descriptors. Those are edge-triggered: another thread that
uses the socket may consume the edge, and then wakes the courier."""

from __future__ import annotations

import hmac
import logging
import os
import select
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import zmq

from stretto.transport.contract import Corrupt, Endpoint, LinkOptions, PeerDead
from stretto.transport.endpoint import hello_of, secret_of
from stretto.transport.slot_transport import (
    MESSAGE_BYTES,
    Hangup,
    LinkMessage,
    MessageKind,
    pack_message,
    unpack_message,
)
from stretto.transport.zmq_auth import PendingConnections, encrypt, key_of

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
_LINGER_MS = 2000  # for the last chunks of a closed sender to be delivered
_NEVER_MS = (
    24 * 3600 * 1000
)  # until a reconnection. -1 would mean never, but drops what the first connection received
_TERM_S = _LINGER_MS / 1000 + 1.0
_UNBIND_S = 0.5
_LAST_HELLO_S = 0.1  # for a hello in transit when its listener closes
SLACK_BYTES = 4096  # for a message and a hello beside a chunk, in the bound on a message's size
_EVENT = struct.Struct("<HI")
# Plain integers: operations on ZeroMQ's enums cost a microsecond each.
_EVENTS, _POLLIN, _NOBLOCK, _MORE = (
    int(zmq.EVENTS),
    int(zmq.POLLIN),
    int(zmq.NOBLOCK),
    int(zmq.NOBLOCK | zmq.SNDMORE),
)
_ZERO_COPY = 64 << 10  # bytes from which sending without a copy is cheaper
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(slots=True)
class _Contexts:
    """The process's ZeroMQ context, which exists as long as any link does. Its two threads serve
    all links."""

    _context: zmq.Context[zmq.Socket[bytes]] | None = None
    _users: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def acquire(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if self._context is None:
                self._context = zmq.Context()
                self._context.max_sockets = 4096
            self._users += 1
            return self._context

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users or self._context is None:
                return
            context = self._context
            self._context = None
        # Waits for lingering messages, so that the last chunks of a process that ends now are not
        # lost. In a thread, since ZeroMQ's wait has no timeout.
        closer = threading.Thread(target=context.term, daemon=True, name="stretto-zmq-term")
        closer.start()
        closer.join(_TERM_S)
        if closer.is_alive():
            log.warning("ZeroMQ did not stop within %s s; leaving it behind", _TERM_S)


_contexts = _Contexts()


class _ZmqSocket:
    """One socket with its monitor, shared by the threads of an end."""

    def __init__(self, kind: int, slots: int, most_bytes: int, options: LinkOptions) -> None:
        heartbeat_ms = 1000 * float(options.details.get("heartbeat_s", HEARTBEAT_S))
        self._lock = threading.Lock()
        self.socket = _contexts.acquire().socket(kind)
        self.socket.set_hwm(2 * slots + 8)  # above what credits allow, so that a send never waits
        self.socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        # One every quarter of the time, so that one lost heartbeat is not a death.
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, max(int(heartbeat_ms / 4), 1))
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(int(heartbeat_ms * 3 / 4), 1))
        self._monitor = self.socket.get_monitor_socket(
            _GONE | _REFUSED | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for fd in (self.socket.FD, self._monitor.FD, self._wake_fd):
            self._poll.register(fd, select.POLLIN)
        self._waiting = False
        self._signalled = False
        self._woken = False
        self._lost = ""  # the reason, when the peer is gone

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Any thread; never waits."""
        with self._lock:
            if self.socket.closed:
                raise Hangup("this end is closed")
            try:
                for part in parts[:-1]:
                    self.socket.send(part, _MORE)
                last = parts[-1]
                self.socket.send(last, _NOBLOCK, copy=len(last) < _ZERO_COPY)
            except zmq.ZMQError as error:
                raise Hangup(f"nobody to send to: {error}") from error
            if self._waiting and is_readable(self.socket):
                self._signal()

    def _receive(self, timeout: float) -> tuple[list[list[zmq.Frame]], list[tuple[int, int]]]:
        """Messages, as frames, and events of connections with their descriptors.

        Events are only read when no message is left, so the end of a connection is seen after its
        last message."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                messages = self._read_messages()
                events = [] if messages else self._read_events()
                if events:
                    messages = self._read_messages()  # those that came just before the event
                left = 0.0 if messages or events else deadline - time.monotonic()
                self._waiting = left > 0
            if left <= 0 or self._woken:
                return messages, events
            self._poll.poll(left * 1000)
            with self._lock:
                self._waiting = False
                if self._signalled:
                    self._signalled = False
                    os.eventfd_read(self._wake_fd)

    def _read_messages(self) -> list[list[zmq.Frame]]:
        messages = []
        while is_readable(self.socket):
            messages.append(self.socket.recv_multipart(_NOBLOCK, copy=False))
        return messages

    def _read_events(self) -> list[tuple[int, int]]:
        events = []
        while is_readable(self._monitor):
            event, _address = self._monitor.recv_multipart(_NOBLOCK)
            events.append(_EVENT.unpack(event))
        return events

    def _may_linger(self) -> bool:
        """Whether the peer is there to receive what was sent last."""
        return not self._lost

    def _raise_if_lost(self) -> None:
        if self._lost:
            raise Hangup(self._lost)

    def _wake(self) -> None:
        with self._lock:
            self._woken = True
            self._signal()

    def _signal(self) -> None:
        """Make a poll return. With the lock held; one signal suffices until it has been read."""
        if not self._signalled:
            self._signalled = True
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        with self._lock:
            if self.socket.closed:
                return
            self.socket.disable_monitor()
            self._monitor.close(0)
            self.socket.close(_LINGER_MS if self._may_linger() else 0)
            os.close(self._wake_fd)
        _contexts.release()


class ZmqDialer(_ZmqSocket):
    """The sender's side: connects, sends the hello, then sends messages and reads those that come
    back."""

    def __init__(self, endpoint: Endpoint, options: LinkOptions) -> None:
        secret = secret_of(endpoint.link, options)
        super().__init__(zmq.DEALER, endpoint.slots, SLACK_BYTES, options)
        self.generation = endpoint.generation
        try:
            encrypt(self.socket, key_of(secret, f"receiver {endpoint.nonce}"))
            self.socket.connect(f"tcp://{endpoint.address}")
            self._await_handshake(endpoint, options.connect_timeout_s)
            self._send(
                [
                    pack_message(MessageKind.HELLO, 0, 0, 0, self.generation),
                    hello_of(endpoint, secret),
                ]
            )
        except (zmq.ZMQError, Hangup) as error:
            self._lost = str(error)
            self.close()
            raise PeerDead(f"cannot connect: {error}", link=endpoint.link) from error
        except (PeerDead, Corrupt):
            self._lost = "no handshake"
            self.close()
            raise

    def _await_handshake(self, endpoint: Endpoint, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            for event, _fd in self._receive(left)[1]:
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return
                if event & _REFUSED:
                    raise Corrupt("the listener refused the handshake", link=endpoint.link)
                raise PeerDead("nobody listens", link=endpoint.link)
        raise PeerDead(f"no answer within {timeout} s", link=endpoint.link)

    def send_message(
        self, kind: int, slot: int = 0, seq: int = 0, size: int = 0, blob: memoryview | None = None
    ) -> None:
        message = pack_message(kind, slot, seq, size, self.generation)
        self._send([message] if blob is None else [message, blob])

    def messages(self, timeout: float) -> list[LinkMessage]:
        self._raise_if_lost()
        messages, events = self._receive(timeout)
        if any(event & (_GONE | _REFUSED) for event, _fd in events):
            self._lost = "the connection ended without a CLOSE message"
        if not messages:
            self._raise_if_lost()
        return [self._parse(frames) for frames in messages]

    def _parse(self, frames: list[zmq.Frame]) -> LinkMessage:
        if len(frames) != 1 or len(frames[0]) != MESSAGE_BYTES:
            raise Hangup("the peer sent something that is not a message")
        message = unpack_message(frames[0].buffer)
        if message[0] == MessageKind.CLOSE:
            self._lost = "the listener closed"
        return message

    def wake(self) -> None:
        if not self._lost:
            with suppress(Hangup):
                self.send_message(MessageKind.CLOSE)
        self._wake()

    def close(self) -> None:
        with suppress(Hangup):
            self.messages(0.0)  # do not linger for a peer that is gone
        super().close()


class ZmqListener(_ZmqSocket):
    """The receiver's side: binds, waits for the invited sender's hello, then reads its messages and
    chunks."""

    def __init__(self, link: str, options: LinkOptions, most_bytes: int) -> None:
        self._secret = secret_of(link, options)
        super().__init__(zmq.ROUTER, options.slots, most_bytes + SLACK_BYTES, options)
        self._options = options
        self._bound = ""
        self._hello: list[bytes] = []
        self.pending = PendingConnections()
        self._peer = b""
        self._peer_fd = -1

    def bind(self, nonce: str) -> str:
        """The address that senders use. `advertise` names this machine where the bound host does
        not."""
        host = self._options.host
        try:
            # a send to a peer that left is an error, not a loss
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            encrypt(self.socket, key_of(self._secret, f"receiver {nonce}"), listens=True)
            self.socket.ipv6 = ":" in host
            self.socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot bind {host}: {error}") from error
        self._bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        port = self._bound.rpartition(":")[2]
        shown = self._options.details.get("advertise", host)
        return f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"

    def expect(self, endpoint: Endpoint) -> None:
        """Sets the hello to wait for. Called once, before anything is received."""
        self.generation = endpoint.generation
        self._hello = [
            pack_message(MessageKind.HELLO, 0, 0, 0, endpoint.generation),
            hello_of(endpoint, self._secret),
        ]

    def arrivals(self, timeout: float) -> list[tuple[LinkMessage, zmq.Frame | None]]:
        self._raise_if_lost()
        arrived = [self._open(frames) for frames in self._poll_peer(timeout)]
        if not arrived:
            self._raise_if_lost()
        return arrived

    def _poll_peer(self, timeout: float) -> list[list[zmq.Frame]]:
        """The peer's messages. The right hello makes a pending connection the peer."""
        messages, events = self._receive(min(timeout, self.pending.time_left()))
        of_peer = [frames for frames in messages if self._is_peer(frames)]
        # After the messages: the peer may have sent its hello and left since the last poll.
        self._handle_events(events)
        self.pending.shut_down(all_pending=bool(self._peer))
        return of_peer

    def _handle_events(self, events: Sequence[tuple[int, int]]) -> None:
        left = False
        for event, fd in events:
            if event == zmq.EVENT_ACCEPTED:
                if fd == self._peer_fd:
                    # the one that left was pending, and the peer has its descriptor now
                    left = False
                else:
                    self.pending.add(fd)
            elif event & (_GONE | _REFUSED):
                left = left or fd == self._peer_fd
                self.pending.remove(fd)
        if left:
            self._lost = "the connection ended without a CLOSE message"

    def _is_peer(self, frames: list[zmq.Frame]) -> bool:
        who = frames[0].bytes
        if self._peer:
            return who == self._peer
        fd = frames[-1].get(zmq.SRCFD)
        hello = [frame.bytes for frame in frames[1:3] if len(frame) <= SLACK_BYTES]
        if (
            len(frames) == 3
            and len(hello) == 2
            and hmac.compare_digest(b"".join(hello), b"".join(self._hello))
        ):
            self._peer = who
            self._peer_fd = fd
            self.pending.remove(fd)
        else:
            self.pending.refuse(fd)
        return False

    def _open(self, frames: list[zmq.Frame]) -> tuple[LinkMessage, zmq.Frame | None]:
        if len(frames) not in (2, 3) or len(frames[1]) != MESSAGE_BYTES:
            raise Hangup("the peer sent something that is not a message")
        message = unpack_message(frames[1].buffer)
        if message[0] == MessageKind.CLOSE:
            self._lost = "the sender closed"
        return message, frames[2] if len(frames) == 3 else None

    def reply(self, kind: int, slot: int = 0, seq: int = 0) -> None:
        self._send([self._peer, pack_message(kind, slot, seq, 0, self.generation)])

    def wake(self) -> None:
        self._send_close()
        self._wake()

    def close(self) -> None:
        self._woken = False
        if not self._peer and not self._lost:
            self._await_hello()
        self._send_close()
        self._stop_listening()
        super().close()

    def _may_linger(self) -> bool:
        return bool(self._peer) and not self._lost

    def _stop_listening(self) -> None:
        """Until the port is closed. ZeroMQ does it asynchronously, and meanwhile would accept
        connections."""
        if not self._bound:
            return
        self.socket.unbind(self._bound)
        deadline = time.monotonic() + _UNBIND_S
        while (left := deadline - time.monotonic()) > 0:
            if any(event == zmq.EVENT_CLOSED for event, _fd in self._receive(left)[1]):
                return

    def _send_close(self) -> None:
        if self._peer and not self._lost:
            with suppress(Hangup):
                self.reply(MessageKind.CLOSE)

    def _await_hello(self) -> None:
        """Send CLOSE also to a sender that has connected and was not accepted yet: it must not see
        a death."""
        deadline = time.monotonic() + _LAST_HELLO_S
        self._poll_peer(0.0)
        while not self._peer and self.pending and (left := deadline - time.monotonic()) > 0:
            self._poll_peer(left)


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    events = socket.getsockopt(_EVENTS)
    assert isinstance(events, int)
    return events & _POLLIN != 0
