"""Pending connections of a network listener, with a clock by hand and real connections: which are
shut down."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from stretto.transport.zmq_auth import HELLO_S, MAX_PENDING, PendingConnections


class Door:
    """Accepts, as ZeroMQ would: `PendingConnections` only sees descriptors."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.callers: list[socket.socket] = []
        self.accepted: list[socket.socket] = []

    def knock(self) -> int:
        """A new connection's number."""
        self.callers.append(caller := socket.create_connection(self.listener.getsockname()))
        caller.setblocking(False)
        self.accepted.append(self.listener.accept()[0])
        return len(self.callers) - 1

    def fd(self, number: int) -> int:
        return self.accepted[number].fileno()

    def shut(self) -> list[int]:
        """Whose connections have ended."""
        return [number for number, caller in enumerate(self.callers) if self._ended(caller)]

    @staticmethod
    def _ended(caller: socket.socket) -> bool:
        try:
            return caller.recv(1) == b""
        except BlockingIOError:
            return False


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    for sock in (door.listener, *door.callers, *door.accepted):
        sock.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_who_says_nothing_is_shut_when_its_time_is_over(door: Door, clock: Clock) -> None:
    here = PendingConnections(clock)
    assert here.time_left() == float("inf")
    first = door.knock()
    here.add(door.fd(first))
    clock.now = 1.0
    second = door.knock()
    here.add(door.fd(second))
    assert here.time_left() == HELLO_S - 1.0
    here.shut_down()
    assert door.shut() == []
    clock.now = HELLO_S
    assert here.time_left() == 0.0
    here.shut_down()
    assert door.shut() == [first]
    assert here.time_left() == 1.0
    assert len(here) == 1


def test_the_oldest_make_room(door: Door, clock: Clock) -> None:
    here = PendingConnections(clock)
    for _ in range(MAX_PENDING + 3):
        here.add(door.fd(door.knock()))
    here.shut_down()
    assert door.shut() == [0, 1, 2]
    assert len(here) == MAX_PENDING


def test_who_was_refused_is_shut_as_soon_as_it_is_known(door: Door, clock: Clock) -> None:
    """What it said may be read before the news that it came."""
    here = PendingConnections(clock)
    first, second = door.knock(), door.knock()
    here.refuse(door.fd(second))
    here.shut_down()
    assert door.shut() == []
    here.add(door.fd(first))
    here.add(door.fd(second))
    here.shut_down()
    assert door.shut() == [second]


def test_a_refusal_ends_with_its_connection(door: Door, clock: Clock) -> None:
    here = PendingConnections(clock)
    number = door.knock()
    here.refuse(door.fd(number))
    here.add(door.fd(number))
    here.remove(door.fd(number))
    here.add(door.fd(number))  # as if another had the descriptor now
    here.shut_down()
    assert door.shut() == []


def test_another_connection_with_the_same_descriptor_is_left_alone(
    door: Door, clock: Clock
) -> None:
    here = PendingConnections(clock)
    old, new = door.knock(), door.knock()
    fd = door.fd(old)
    here.add(fd)
    os.dup2(door.fd(new), fd)  # the old one is closed, and its descriptor is the new one's
    here.shut_down(all_pending=True)
    assert door.shut() == [old], "closed by itself, and the other not"
    assert len(here) == 0


def test_descriptors_that_are_none_any_more_are_no_matter(clock: Clock) -> None:
    here = PendingConnections(clock)
    inside, outside = os.pipe()
    here.add(inside)  # not a connection
    os.close(inside)
    here.add(inside)
    assert len(here) == 0
    os.close(outside)
    a, b = socket.socketpair()
    here.add(a.fileno())
    fd = a.fileno()
    a.close()
    here.shut_down(all_pending=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    b.close()
