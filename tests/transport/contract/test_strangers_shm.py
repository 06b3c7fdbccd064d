"""Who may join a link of shared memory: the invited sender alone, and strangers neither hold it up
nor leave anything.

A stranger here does everything right but for one thing, so that one check alone stands between it
and the link. That there really are two users is tried where the tests may change theirs (as root);
everywhere else, and there too, with what the kernel says of a peer replaced."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest

from stretto.transport import shm
from stretto.transport.contract import Corrupt, Endpoint, PeerDead
from stretto.transport.endpoint import hello_of, make_endpoint, new_nonce
from stretto.transport.slot_transport import MessageKind, pack_message
from stretto.transport.slots import SlotReceiver, SlotSender
from tests.transport.contract.links import (
    KITS,
    LONG_S,
    SECRET,
    check_invited,
    eventually,
    listening,
    numbered,
    take,
)

KIT = KITS["shm"]
OTHERS = "stretto-test-stranger-"
FOR_EVER = 1e6


@pytest.fixture
def receiver() -> Iterator[SlotReceiver]:
    receiver = shm.ShmConnector().listen("test-link.0", KIT.options)
    yield receiver
    receiver.close()


@pytest.fixture
def two_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has an address of its own (`Stranger`'s `name`) is taken for another user's."""
    real = shm.peer_uid

    def uid_of(sock: socket.socket) -> int:
        return real(sock) + (OTHERS.encode() in bytes(sock.getpeername() or b""))

    monkeypatch.setattr(shm, "peer_uid", uid_of)


class Stranger:
    """A connection to a listener, made by hand."""

    def __init__(self, endpoint: Endpoint, name: str = "") -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        if name:
            self.sock.bind(f"\0{OTHERS}{name}-{os.getpid()}")
        try:
            self.sock.connect("\0" + endpoint.address)
        except OSError:
            self.sock.close()
            raise

    def says(self, hello: bytes, *fds: int) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([hello], ancillary)
        for fd in fds:
            os.close(fd)

    def shut(self) -> bool:
        """Whether the other side has closed the connection, and said nothing."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True
        except BlockingIOError:
            return False


@pytest.fixture
def strangers() -> Iterator[list[Stranger]]:
    made: list[Stranger] = []
    yield made
    for stranger in made:
        stranger.sock.close()


def memory(size: int, seals: int = shm.SEALS) -> int:
    fd = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def right_memory(endpoint: Endpoint) -> int:
    return memory(shm.memory_bytes(endpoint))


def other_hello(endpoint: Endpoint, what: str) -> bytes:
    """The hello of an endpoint that differs from this one in one thing."""
    generation = endpoint.generation + (what == "generation")
    nonce = new_nonce() if what == "nonce" else endpoint.nonce
    secret = bytes(32) if what == "secret" else SECRET
    options = replace(KIT.options, generation=generation, secret=secret)
    other = make_endpoint("shm", endpoint.link, options, endpoint.address, nonce)
    assert (hello_of(other, secret) == hello_of(endpoint, SECRET)) == (what == "nothing")
    return hello_of(other, secret)


def is_open(receiver: SlotReceiver) -> bool:
    assert isinstance(receiver.transport, shm.ShmReceiveTransport)
    return receiver.transport.socket is not None


def test_the_hand_made_sender_does_everything_right(
    receiver: SlotReceiver, strangers: list[Stranger], two_users: None
) -> None:
    """Else the others would be refused for the wrong reason."""
    strangers.append(stranger := Stranger(receiver.endpoint))
    stranger.says(other_hello(receiver.endpoint, "nothing"), right_memory(receiver.endpoint))
    assert receiver.take(0.0) is None
    assert is_open(receiver)


@pytest.mark.parametrize("what", ["generation", "nonce", "secret"])
def test_a_hello_of_another_link_is_refused(
    receiver: SlotReceiver, strangers: list[Stranger], what: str
) -> None:
    strangers.append(stranger := Stranger(receiver.endpoint))
    stranger.says(other_hello(receiver.endpoint, what), right_memory(receiver.endpoint))
    assert receiver.take(0.0) is None
    assert stranger.shut()
    check_invited(KIT, receiver)


def test_the_beginning_of_a_hello_is_none(
    receiver: SlotReceiver, strangers: list[Stranger]
) -> None:
    strangers.append(stranger := Stranger(receiver.endpoint))
    stranger.says(hello_of(receiver.endpoint, SECRET)[:-1], right_memory(receiver.endpoint))
    assert receiver.take(0.0) is None
    assert stranger.shut()
    check_invited(KIT, receiver)


def test_a_hello_without_memory_is_refused(
    receiver: SlotReceiver, strangers: list[Stranger]
) -> None:
    strangers.append(stranger := Stranger(receiver.endpoint))
    stranger.says(hello_of(receiver.endpoint, SECRET))
    assert receiver.take(0.0) is None
    assert stranger.shut()
    check_invited(KIT, receiver)


@pytest.mark.parametrize("fault", ["short", "long", "may shrink"])
def test_memory_that_was_not_agreed_is_refused(
    receiver: SlotReceiver, strangers: list[Stranger], fault: str
) -> None:
    size = shm.memory_bytes(receiver.endpoint) + {"short": -1, "long": 1}.get(fault, 0)
    seals = fcntl.F_SEAL_GROW if fault == "may shrink" else shm.SEALS
    strangers.append(stranger := Stranger(receiver.endpoint))
    stranger.says(hello_of(receiver.endpoint, SECRET), memory(size, seals))
    assert receiver.take(0.0) is None
    assert stranger.shut()
    check_invited(KIT, receiver)


def test_another_user_is_refused_whatever_it_says(
    receiver: SlotReceiver, strangers: list[Stranger], two_users: None
) -> None:
    strangers.append(stranger := Stranger(receiver.endpoint, "knows"))
    stranger.says(hello_of(receiver.endpoint, SECRET), right_memory(receiver.endpoint))
    assert receiver.take(0.0) is None
    assert stranger.shut()
    check_invited(KIT, receiver)


def test_another_user_that_says_nothing_is_not_waited_for(
    receiver: SlotReceiver,
    strangers: list[Stranger],
    two_users: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many come, and though the listener's queue is full of them."""
    monkeypatch.setattr(shm, "_HELLO_S", FOR_EVER)
    with suppress(BlockingIOError):
        while True:
            strangers.append(Stranger(receiver.endpoint, f"silent-{len(strangers)}"))
    assert len(strangers) > 2
    check_invited(KIT, receiver)
    assert all(stranger.shut() for stranger in strangers)


def test_who_never_says_hello_is_let_go_after_a_while(
    receiver: SlotReceiver, strangers: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "_HELLO_S", 0.02)
    strangers.extend(Stranger(receiver.endpoint) for _ in range(3))
    sender = shm.ShmConnector().connect(receiver.endpoint, KIT.options)
    assert sender.put(numbered(0), LONG_S)
    take(receiver).release()
    assert all(stranger.shut() for stranger in strangers)
    sender.close()


def test_a_sender_waits_for_its_place_in_a_full_queue(
    receiver: SlotReceiver, strangers: list[Stranger], two_users: None
) -> None:
    with suppress(BlockingIOError):
        while True:
            strangers.append(Stranger(receiver.endpoint, f"first-{len(strangers)}"))
    hasty = replace(KIT.options, connect_timeout_s=0.02)
    with pytest.raises(PeerDead, match="temporarily unavailable"):
        shm.ShmConnector().connect(receiver.endpoint, hasty)
    began = threading.Event()

    def connect() -> SlotSender:
        began.set()
        return shm.ShmConnector().connect(
            receiver.endpoint, replace(KIT.options, connect_timeout_s=LONG_S)
        )

    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect)
        assert began.wait(LONG_S)
        with pytest.raises(TimeoutError):
            connecting.result(0.05)
        eventually(lambda: receiver.take(0.0) is None and connecting.done())
        connecting.result().close()


def test_a_crowd_leaves_nothing_behind(receiver: SlotReceiver, strangers: list[Stranger]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(50):
        stranger = Stranger(receiver.endpoint)
        stranger.says(bytes([number]) * 32, right_memory(receiver.endpoint))
        assert receiver.take(0.0) is None
        assert stranger.shut()
        stranger.sock.close()
    assert (
        len(os.listdir("/proc/self/fd")) <= before
    )  # less, if an earlier test's library closed one late
    check_invited(KIT, receiver)


def test_when_the_sender_is_in_nobody_else_can_come(receiver: SlotReceiver) -> None:
    sender = shm.ShmConnector().connect(receiver.endpoint, KIT.options)
    assert receiver.take(0.0) is None
    with pytest.raises(ConnectionRefusedError):
        Stranger(receiver.endpoint)
    sender.close()


def test_a_chunk_of_another_generation_ends_the_link(
    receiver: SlotReceiver, strangers: list[Stranger]
) -> None:
    strangers.append(stranger := Stranger(receiver.endpoint))
    stranger.says(other_hello(receiver.endpoint, "nothing"), right_memory(receiver.endpoint))
    assert receiver.take(0.0) is None
    assert is_open(receiver)
    stranger.sock.send(pack_message(MessageKind.CHUNK, 0, 0, 64, receiver.endpoint.generation + 1))
    with pytest.raises(PeerDead, match="generation 1, this link is 0"):
        receiver.take(LONG_S)


# --- the sender's side
# -------------------------------------------------------------------------------------------


def test_a_listener_of_another_user_is_not_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "peer_uid", lambda sock: os.geteuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as impostor:
        endpoint = make_endpoint(
            "shm", "test-link.0", KIT.options, f"stretto-test-{new_nonce()}", new_nonce()
        )
        impostor.bind("\0" + endpoint.address)
        impostor.listen(1)
        with pytest.raises(Corrupt, match="another user"):
            shm.ShmConnector().connect(endpoint, KIT.options)
        heard, _ = impostor.accept()
        with heard:
            assert heard.recv(100) == b"", "not even a hello"


# --- two users for real
# ------------------------------------------------------------------------------------------

_TWO_USERS = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
_CHILD = """
import array, fcntl, os, socket, sys
role, address, hello, size, seals = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3]), *map(int, sys.argv[4:6])
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.settimeout(60)
if role == "send":
    memory = os.memfd_create("stranger", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, size)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    sock.connect("\\0" + address)
    try:
        sock.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))])
        print("shut" if sock.recv(1) == b"" else "heard")
    except (BrokenPipeError, ConnectionResetError):
        print("shut")
    except TimeoutError:
        print("open")
else:
    sock.bind("\\0" + address)
    sock.listen(1)
    print("listens", flush=True)
    print(len(sock.accept()[0].recv(100)))
"""  # noqa: E501


def other_user(role: str, endpoint: Endpoint) -> subprocess.Popen[str]:
    hello = hello_of(endpoint, SECRET).hex()
    arguments = [role, endpoint.address, hello, str(shm.memory_bytes(endpoint)), str(shm.SEALS)]
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, *arguments], stdout=subprocess.PIPE, text=True
    )


@_TWO_USERS
def test_a_process_of_another_user_is_refused(receiver: SlotReceiver) -> None:
    with other_user("send", receiver.endpoint) as child:
        eventually(lambda: receiver.take(0.0) is None and child.poll() is not None)
        assert child.stdout is not None
        assert child.stdout.read().strip() == "shut"
    check_invited(KIT, receiver)


@_TWO_USERS
def test_a_listening_process_of_another_user_is_refused() -> None:
    endpoint = make_endpoint(
        "shm", "test-link.0", KIT.options, f"stretto-test-{new_nonce()}", new_nonce()
    )
    with other_user("listen", endpoint) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "listens"
        assert listening(endpoint.address)
        with pytest.raises(Corrupt, match="another user"):
            shm.ShmConnector().connect(endpoint, KIT.options)
        assert child.stdout.read().strip() == "0", "not even a hello"
