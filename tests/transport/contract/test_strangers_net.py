"""Who may join a link over the network: the invited sender alone, and strangers neither hold it up
nor leave anything.

A stranger here does everything right but for one thing, so that one check alone stands between it
and the link."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import zmq

from stretto.transport import wire, zmq_auth, zmq_socket
from stretto.transport.contract import Corrupt, Endpoint, LinkClosed, PeerDead, Receiver
from stretto.transport.endpoint import hello_of, make_endpoint, new_nonce
from stretto.transport.slot_transport import MessageKind, pack_message
from stretto.transport.slots import SlotReceiver
from stretto.transport.tcp import TcpConnector
from tests.transport.contract.links import (
    KITS,
    LONG_S,
    SECRET,
    check_invited,
    check_numbered,
    eventually,
    numbered,
    take,
)

KIT = KITS["tcp"]
FOR_EVER = 1e6
OTHER_SECRET = bytes(32)
_SHUT = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is let go for being silent, neither by us nor by ZeroMQ (after half a minute without a
    handshake), so that it is for something else; a test may shorten our time."""
    encrypt = zmq_socket.encrypt

    def without_an_end(socket: zmq.Socket[bytes], key: bytes, **kind: bool) -> None:
        socket.setsockopt(zmq.HANDSHAKE_IVL, 0)
        encrypt(socket, key, **kind)

    monkeypatch.setattr(zmq_socket, "encrypt", without_an_end)
    monkeypatch.setattr(zmq_auth, "HELLO_S", FOR_EVER)


@pytest.fixture
def receiver() -> Iterator[SlotReceiver]:
    receiver = TcpConnector().listen("test-link.0", KIT.options)
    yield receiver
    receiver.close()


class Stranger:
    """A ZeroMQ connection to a listener, made by hand; with the listener's key if a secret is
    given."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, secret: bytes | None
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.reconnect_ivl = -1
        if secret is not None:
            zmq_socket.encrypt(self.socket, zmq_socket.key_of(secret, f"receiver {endpoint.nonce}"))
        self.monitor = self.socket.get_monitor_socket(_SHUT)
        self.socket.connect(f"tcp://{endpoint.address}")

    def says(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts)

    def shut(self) -> bool:
        return self.monitor.poll(0) != 0

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


@dataclass(slots=True)
class Street:
    """Where strangers come from, and are fetched back to."""

    context: zmq.Context[zmq.Socket[bytes]]
    made: list[Any]

    def stranger(self, endpoint: Endpoint, secret: bytes | None = SECRET) -> Stranger:
        self.made.append(stranger := Stranger(self.context, endpoint, secret))
        return stranger

    def caller(self, endpoint: Endpoint) -> socket.socket:
        """A bare connection."""
        host, _, port = endpoint.address.rpartition(":")
        self.made.append(sock := socket.create_connection((host, int(port))))
        sock.setblocking(False)
        return sock


@pytest.fixture
def street() -> Iterator[Street]:
    street = Street(zmq.Context(), [])
    yield street
    for stranger in street.made:
        stranger.close()
    street.context.term()


def is_shut(sock: socket.socket) -> bool:
    """Whether the listener has closed the connection. (It may have said its greeting first.)"""
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def listener_of(receiver: SlotReceiver) -> zmq_socket.ZmqListener:
    listener: zmq_socket.ZmqListener = receiver.transport.listener  # type: ignore[attr-defined]
    return listener


def hello(endpoint: Endpoint, secret: bytes = SECRET) -> list[bytes]:
    return [
        pack_message(MessageKind.HELLO, 0, 0, 0, endpoint.generation),
        hello_of(endpoint, secret),
    ]


def other_hello(endpoint: Endpoint, what: str) -> list[bytes]:
    """What would be right on a link that differs from this one in one thing."""
    if what == "silence about the secret":
        return hello(endpoint)[:1]
    if what == "a chunk":
        return [pack_message(MessageKind.CHUNK, 0, 0, 100, endpoint.generation), bytes(100)]
    if what == "more":
        return [*hello(endpoint), b""]
    generation = endpoint.generation + (what == "generation")
    nonce = new_nonce() if what == "nonce" else endpoint.nonce
    secret = OTHER_SECRET if what == "secret" else SECRET
    options = replace(KIT.options, generation=generation, secret=secret)
    other = hello(make_endpoint("tcp", endpoint.link, options, endpoint.address, nonce), secret)
    assert (other == hello(endpoint)) == (what == "nothing")
    return other


def pumped(receiver: Receiver, stranger: Stranger) -> bool:
    return receiver.take(0.0) is None and stranger.shut()


def test_the_hand_made_sender_does_everything_right(receiver: SlotReceiver, street: Street) -> None:
    """Else the others would be refused for the wrong reason."""
    stranger = street.stranger(receiver.endpoint)
    stranger.says(*other_hello(receiver.endpoint, "nothing"))
    data = wire.encode(numbered(0))
    generation = receiver.endpoint.generation
    stranger.says(pack_message(MessageKind.CHUNK, 0, 0, len(data), generation), data)
    check_numbered(take(receiver), 0)


@pytest.mark.parametrize(
    "what",
    ["generation", "nonce", "secret", "silence about the secret", "a chunk", "more"],
    ids=str,
)
def test_who_has_the_key_but_not_the_hello_is_refused(
    receiver: SlotReceiver, street: Street, what: str
) -> None:
    stranger = street.stranger(receiver.endpoint)
    stranger.says(*other_hello(receiver.endpoint, what))
    eventually(lambda: pumped(receiver, stranger))
    check_invited(KIT, receiver)


def test_another_key_is_refused(receiver: SlotReceiver, street: Street) -> None:
    stranger = street.stranger(receiver.endpoint, OTHER_SECRET)
    stranger.says(*hello(receiver.endpoint))
    eventually(lambda: pumped(receiver, stranger))
    check_invited(KIT, receiver)


def test_a_plaintext_peer_is_refused_whatever_it_says(
    receiver: SlotReceiver, street: Street
) -> None:
    stranger = street.stranger(receiver.endpoint, None)
    stranger.says(*hello(receiver.endpoint))
    eventually(lambda: pumped(receiver, stranger))
    check_invited(KIT, receiver)


@pytest.mark.parametrize("version", [1, 2])
def test_a_peer_of_an_older_protocol_is_refused(
    receiver: SlotReceiver, street: Street, version: int
) -> None:
    """ZeroMQ would still speak its first two versions, which know neither keys nor encryption."""
    message, digest = hello(receiver.endpoint)
    caller = street.caller(receiver.endpoint)
    if (
        version == 1
    ):  # frames: length with the flags, flags, data; the first is a name, of no length
        caller.sendall(b"\x01\x00" + b"\x21\x01" + message + b"\x21\x00" + digest)
    else:  # a signature, the version, a dealer; frames: flags, length, data
        caller.sendall(
            b"\xff"
            + bytes(8)
            + b"\x7f\x01\x05"
            + b"\x00\x00"
            + b"\x01\x20"
            + message
            + b"\x00\x20"
            + digest
        )
    eventually(lambda: receiver.take(0.0) is None and is_shut(caller))
    check_invited(KIT, receiver)


def test_who_never_says_hello_is_let_go_after_a_while(
    receiver: SlotReceiver, street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both who never begins the handshake and who ends it and then stays silent."""
    silent = street.caller(receiver.endpoint)
    stranger = street.stranger(receiver.endpoint)
    eventually(lambda: receiver.take(0.0) is None and len(listener_of(receiver).pending) == 2)
    monkeypatch.setattr(zmq_auth, "HELLO_S", 0.02)
    eventually(lambda: receiver.take(0.0) is None and is_shut(silent) and stranger.shut())
    monkeypatch.setattr(zmq_auth, "HELLO_S", FOR_EVER)
    check_invited(KIT, receiver)


def test_a_take_that_waits_lets_the_silent_go_too(
    receiver: SlotReceiver, street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_auth, "HELLO_S", 0.02)
    silent = street.caller(receiver.endpoint)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.take, 10 * LONG_S)
        try:
            eventually(lambda: is_shut(silent))
        finally:
            receiver.close()
        with pytest.raises(LinkClosed):
            waiting.result()


def test_a_crowd_is_bounded_and_does_not_keep_the_sender_out(
    receiver: SlotReceiver, street: Street
) -> None:
    crowd = [street.caller(receiver.endpoint) for _ in range(3 * zmq_auth.MAX_PENDING)]
    eventually(
        lambda: receiver.take(0.0) is None and sum(map(is_shut, crowd)) == 2 * zmq_auth.MAX_PENDING
    )
    check_invited(KIT, receiver)
    eventually(lambda: all(map(is_shut, crowd)))


def test_strangers_that_come_and_go_leave_nothing(receiver: SlotReceiver, street: Street) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(30):
        sock = street.caller(receiver.endpoint)
        with suppress(OSError):
            sock.sendall(bytes([number]) * 100)
        sock.close()
        receiver.take(0.0)
    eventually(lambda: receiver.take(0.0) is None and len(os.listdir("/proc/self/fd")) == before)
    check_invited(KIT, receiver)


def test_strangers_are_dropped_once_the_sender_is_connected(
    receiver: SlotReceiver, street: Street
) -> None:
    sender = TcpConnector().connect(receiver.endpoint, KIT.options)
    assert sender.put(numbered(0), LONG_S)
    take(receiver).release()
    late = street.stranger(receiver.endpoint)
    late.says(*hello(receiver.endpoint))
    late.says(pack_message(MessageKind.CHUNK, 0, 1, 100, receiver.endpoint.generation), bytes(100))
    eventually(lambda: zmq_socket.is_readable(listener_of(receiver).socket))
    eventually(lambda: pumped(receiver, late))
    assert sender.put(numbered(1), LONG_S)
    check_numbered(take(receiver), 1)
    sender.close()


# --- nothing is kept of a stranger
# -------------------------------------------------------------------------------

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
_COMMAND, _LONG, _MORE = 4, 2, 1


def frame(flags: int, size: int) -> bytes:
    """The head of a frame with a length of eight bytes."""
    return struct.pack(">BQ", flags | _LONG, size)


def test_a_message_larger_than_a_slot_is_refused_by_its_length(
    receiver: SlotReceiver, street: Street
) -> None:
    """Before any of it has come, and before its sender could prove anything."""
    caller = street.caller(receiver.endpoint)
    caller.sendall(
        _GREETING + frame(_COMMAND, receiver.endpoint.slot_bytes + zmq_socket.SLACK_BYTES + 1)
    )
    eventually(lambda: receiver.take(0.0) is None and is_shut(caller))
    check_invited(KIT, receiver)


def test_parts_of_a_message_do_not_pile_up(receiver: SlotReceiver, street: Street) -> None:
    """ZeroMQ keeps the parts of a message until its last has come, however many; of a stranger it
    takes none."""
    caller = street.caller(receiver.endpoint)
    caller.sendall(_GREETING + frame(_MORE, 1000) + bytes(1000))
    eventually(lambda: receiver.take(0.0) is None and is_shut(caller))
    check_invited(KIT, receiver)


# --- what is told of connections may be late
# ---------------------------------------------------------------------


class Frame:
    """As far as the listener looks at one."""

    def __init__(self, data: bytes, fd: int) -> None:
        self.bytes, self.fd = data, fd

    def __len__(self) -> int:
        return len(self.bytes)

    def get(self, what: int) -> int:
        assert what == zmq.SRCFD
        return self.fd


class Told:
    """Takes the place of what ZeroMQ tells a listener: messages and events, call by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, receiver: SlotReceiver) -> None:
        self.next: list[tuple[list[Any], list[tuple[int, int]]]] = []
        monkeypatch.setattr(
            listener_of(receiver),
            "_receive",
            lambda timeout: self.next.pop(0) if self.next else ([], []),
        )
        self.hello = [Frame(data, 999) for data in (b"who", *hello(receiver.endpoint))]


CAME, WENT = (int(zmq.EVENT_ACCEPTED), 999), (int(zmq.EVENT_DISCONNECTED), 999)


def test_a_stranger_on_a_reused_descriptor_does_not_end_the_link(
    receiver: SlotReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are read first: the sender's hello may come before the news of who was there
    earlier."""
    with monkeypatch.context() as patch:
        told = Told(patch, receiver)
        told.next = [([told.hello], []), ([], [CAME, WENT, CAME])]
        for _ in range(3):
            assert receiver.take(0.0) is None
        receiver.check()
        told.next = [([], [WENT])]
        with pytest.raises(PeerDead):
            receiver.take(0.0)


def test_a_sender_that_dies_right_after_its_hello_is_dead(
    receiver: SlotReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        told = Told(patch, receiver)
        told.next = [([told.hello], [CAME, WENT])]
        with pytest.raises(PeerDead):
            receiver.take(LONG_S)


# --- the link's messages
# --------------------------------------------------------------------------------------------


def test_a_chunk_of_another_generation_ends_the_link(
    receiver: SlotReceiver, street: Street
) -> None:
    stranger = street.stranger(receiver.endpoint)
    stranger.says(*hello(receiver.endpoint))
    data = wire.encode(numbered(0))
    stranger.says(pack_message(MessageKind.CHUNK, 0, 0, len(data), 1), data)
    with pytest.raises(PeerDead, match="generation 1, this link is 0"):
        receiver.take(LONG_S)


def test_a_release_of_another_generation_ends_the_link(receiver: SlotReceiver) -> None:
    sender = TcpConnector().connect(receiver.endpoint, KIT.options)
    assert sender.put(numbered(0), LONG_S)
    chunk = take(receiver)
    listener_of(receiver).generation += 1
    chunk.release()
    eventually(lambda: sender.credits() == 4 or sender.state is not sender.state.OPEN)
    with pytest.raises(PeerDead, match="generation 1, this link is 0"):
        sender.check()
    sender.close()


# --- the sender's side
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, OTHER_SECRET], ids=["plaintext", "another key"])
def test_a_wrong_listener_learns_nothing(street: Street, secret: bytes | None) -> None:
    nonce = new_nonce()
    impostor = street.context.socket(zmq.ROUTER)
    street.made.append(impostor)
    impostor.linger = 0
    if secret is not None:
        zmq_socket.encrypt(impostor, zmq_socket.key_of(secret, f"receiver {nonce}"), listens=True)
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    endpoint = make_endpoint("tcp", "test-link.0", KIT.options, f"127.0.0.1:{port}", nonce)
    with pytest.raises((Corrupt, PeerDead)):
        TcpConnector().connect(endpoint, replace(KIT.options, connect_timeout_s=2.0))
    assert not impostor.poll(0), "not even a hello"
