"""What only the shm connector promises: how long its one system call waits, and how slots come
back."""

from __future__ import annotations

import os
import random

import pytest
import torch

from stretto.transport import shm, unix_socket, wire
from stretto.transport.contract import Chunk, LinkOptions
from stretto.transport.shm import map_shared
from stretto.types import Mark, RequestId, Span
from tests.transport.contract.links import SECRET


def test_a_wait_is_as_long_as_asked_whatever_was_asked_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The socket's own timeout is set only when it changes: it must be the one of this call, also
    after a wait of another length that brought nothing."""
    bounds: list[float] = []
    set_timeout = unix_socket.set_timeout

    def record(sock: object, timeout: float) -> None:
        bounds.append(timeout)
        set_timeout(sock, timeout)  # type: ignore[arg-type]

    options = LinkOptions(slots=2, slot_bytes=4096, secret=SECRET)
    connector = shm.ShmConnector()
    receiver = connector.listen("a-b", options)
    sender = connector.connect(receiver.endpoint, options)
    monkeypatch.setattr(unix_socket, "set_timeout", record)
    chunk = wire.chunk(RequestId("r"), Span(0, 1), Mark.MORE, {"rows": torch.ones(1)})

    def take(timeout: float, sends: bool) -> float:
        """The socket's timeout when the call began to wait first."""
        if sends:
            assert sender.put(
                wire.chunk(RequestId("r"), Span(0, 1), Mark.MORE, {"rows": torch.ones(1)}), 0.0
            )
        before, bounds[:] = bounds[-1:], []
        taken = receiver.take(timeout)
        assert (taken is not None) == sends
        if taken is not None:
            taken.release()
        first = (bounds or before)[0]
        bounds[:] = (before + bounds)[-1:]
        return first

    try:
        assert sender.put(chunk, 0.0)
        first = receiver.take(60.0)
        assert first is not None
        first.release()
        for timeout, sends in [
            (60.0, True),
            (0.03, False),
            (60.0, True),
            (60.0, True),
            (0.01, False),
            (60.0, True),
        ]:
            assert take(timeout, sends) == timeout
    finally:
        sender.close()
        receiver.close()


def numbered(number: int) -> Chunk:
    tensors = {"rows": torch.full((64,), number, dtype=torch.int64)}
    return wire.chunk(
        RequestId(f"r{number % 3}"), Span(number, number + 1), Mark.MORE, tensors, seq=number
    )


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_a_slot_is_used_again_only_when_it_is_back(seed: int, slots: int) -> None:
    """In any order of puts, takes and releases no chunk that is still held changes, and credits add
    up."""
    chance = random.Random(seed)
    options = LinkOptions(slots=slots, slot_bytes=4096, secret=SECRET)
    receiver = shm.ShmConnector().listen("a-b", options)
    sender = shm.ShmConnector().connect(receiver.endpoint, options)
    held: list[tuple[int, Chunk]] = []
    sent = taken = 0
    try:
        for _ in range(400):
            action = chance.choice(
                ["put", "put", "take", "take", "release", "release", "look", "purge"]
            )
            if action == "put":
                accepted = sender.put(numbered(sent), 0.0)
                assert accepted == (sent - taken + len(held) < slots)
                sent += accepted
            elif action == "take" and sent > taken:
                chunk = receiver.take(chance.choice([60.0, 61.0]))
                assert chunk is not None
                assert chunk.header.seq == taken
                held.append((taken, chunk))
                taken += 1
            elif action == "release" and held:
                held.pop(chance.randrange(len(held)))[1].release()
            elif action == "look":
                assert sender.credits() == slots - len(held) - (sent - taken)
            elif action == "purge":
                sender.purge(RequestId("someone else"))
            for number, chunk in held:
                assert bool((chunk.tensors["rows"] == number).all())
    finally:
        sender.close()
        receiver.close()


# --- page-locked memory


@pytest.fixture
def file() -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 16)
    return fd


def test_two_mappings_share_their_bytes(file: int) -> None:
    ours, theirs = map_shared(file, 1 << 16), map_shared(file, 1 << 16)
    os.close(file)
    tensor = torch.frombuffer(memoryview(theirs)[4096:], dtype=torch.int32, count=4)
    ours[4096:4100] = b"\x07\0\0\0"
    del ours, theirs
    assert tensor.tolist() == [7, 0, 0, 0], "the view keeps the mapping"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_cuda_nothing_is_registered(file: int) -> None:
    mapping = map_shared(file, 1 << 16)
    os.close(file)
    assert not mapping.register()
