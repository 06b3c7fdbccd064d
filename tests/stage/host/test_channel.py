"""The host's end of the control channel: nothing is lost, reordered or waited for, whatever the
reader does."""

import socket
import threading

from stretto.messages.hosts import Loading, Ping
from stretto.messages.requests import PREFIX, FromHost, Pcm, Text, decode_from_host, encode, lengths
from stretto.stage.host.channel import Channel
from stretto.types import RequestId

ID = RequestId("r")


def read(sock: socket.socket, count: int) -> list[tuple[FromHost, bytes]]:
    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += sock.recv(size - len(data))
        return data

    found = []
    for _ in range(count):
        header, blob = lengths(exactly(PREFIX.size))
        found.append((decode_from_host(exactly(header)), exactly(blob)))
    return found


def test_reports_leave_together_when_they_are_pushed() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    channel.post(Text(ID, (1, 2)))
    channel.post(Pcm(ID, 0, 1), b"abc")
    theirs.setblocking(False)
    try:
        theirs.recv(1)
        raise AssertionError("sent before the push")
    except BlockingIOError:
        pass
    channel.push()
    whole = encode(Text(ID, (1, 2))) + encode(Pcm(ID, 0, 1), b"abc") + b"abc"
    assert theirs.recv(1 << 16) == whole, "in one piece"
    theirs.setblocking(True)
    theirs.sendall(encode(Ping(3)))
    assert channel.read() == (Ping(3), b"")
    channel.flush()


def test_a_reader_that_is_slow_gets_everything_in_order() -> None:
    """Far more than the socket holds, from two threads: the senders never wait, and each one's
    order is kept."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    blob, many = bytes(60_000), 60

    def other() -> None:
        for i in range(many):
            channel.send(Loading("other", str(i)))

    thread = threading.Thread(target=other)
    thread.start()
    for i in range(many):  # nobody reads yet
        channel.post(Pcm(ID, i, 0), blob)
        channel.post(Text(ID, (i,)))
        channel.push()
    thread.join()
    found = read(theirs, 3 * many)
    assert [m.start for m, b in found if isinstance(m, Pcm) and b == blob] == list(range(many))
    assert [m.ids for m, _ in found if isinstance(m, Text)] == [(i,) for i in range(many)]
    assert [m.what for m, _ in found if isinstance(m, Loading)] == [str(i) for i in range(many)]
    channel.send(Text(ID, (99,)))  # and then it is direct again
    assert read(theirs, 1) == [(Text(ID, (99,)), b"")]
    channel.flush()


def test_an_engine_that_has_gone_stops_nobody() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.close()
    for i in range(10):
        channel.send(Text(ID, (i,)), bytes(100_000))
    assert channel.read() is None
    channel.flush()
