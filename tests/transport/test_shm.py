"""What only the shm connector promises: how long its one system call waits, and how slots come
back."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from stretto.transport import notesocket, shm, wire
from stretto.transport.contract import Chunk, LinkClosed, LinkOptions
from stretto.transport.notes import Note
from stretto.transport.returns import Returns
from stretto.types import Mark, RequestId, Span
from tests.contract.links import SECRET


@pytest.mark.parametrize("spin_us", ["0", "5"])
def test_a_wait_is_as_long_as_asked_whatever_was_asked_before(
    monkeypatch: pytest.MonkeyPatch, spin_us: str
) -> None:
    """The socket's own timeout is set only when it changes: it must be the one of this call, also
    after a wait of another length that brought nothing."""
    bounds: list[float] = []
    set_timeout = notesocket.set_timeout

    def record(sock: object, timeout: float) -> None:
        bounds.append(timeout)
        set_timeout(sock, timeout)  # type: ignore[arg-type]

    options = LinkOptions(slots=2, slot_bytes=4096, secret=SECRET, details={"look_us": spin_us})
    connector = shm.ShmConnector()
    receiver = connector.listen("a-b", options)
    sender = connector.connect(receiver.endpoint, options)
    monkeypatch.setattr(notesocket, "set_timeout", record)
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
    """The sender finds a slot in three ways: the one sent last, a free one, one that comes back as
    it looks. In any mixture of them no chunk that is still held changes, and credits add up."""
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


def test_one_chunk_at_a_time_stays_in_one_slot_and_needs_no_notes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = LinkOptions(slots=4, slot_bytes=4096, secret=SECRET)
    receiver = shm.ShmConnector().listen("a-b", options)
    sender = shm.ShmConnector().connect(receiver.endpoint, options)
    places = set()
    try:
        for number in range(50):
            assert sender.put(numbered(number), 0.0)
            if (
                number == 0
            ):  # from here on nothing may be read by the sender, or be sent by the receiver
                monkeypatch.setattr(notesocket.NoteSocket, "notes", None)
                monkeypatch.setattr(notesocket.NoteSocket, "reply", None)
            chunk = receiver.take(60.0)
            assert chunk is not None
            places.add(chunk.tensors["rows"].data_ptr())
            chunk.release()
        assert len(places) == 1
    finally:
        monkeypatch.undo()
        sender.close()
        receiver.close()


def test_where_memory_is_not_ordered_slots_come_back_by_notes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shm, "ORDERED", False)
    options = LinkOptions(slots=2, slot_bytes=4096, secret=SECRET)
    receiver = shm.ShmConnector().listen("a-b", options)
    sender = shm.ShmConnector().connect(receiver.endpoint, options)
    try:
        for number in range(20):
            assert sender.put(numbered(number), 60.0)
            chunk = receiver.take(60.0)
            assert chunk is not None
            chunk.release()
        assert not any(sender._returns.words[:2])
        assert sender.credits() == 2
    finally:
        sender.close()
        receiver.close()


def test_wake_notes_that_came_too_late_do_not_pile_up() -> None:
    """A sender that sets its wake flag and then finds slots at once leaves the note in the socket.
    However often that happens, there is room for the CLOSE note."""
    options = LinkOptions(slots=2, slot_bytes=4096, secret=SECRET)
    receiver = shm.ShmConnector().listen("a-b", options)
    sender = shm.ShmConnector().connect(receiver.endpoint, options)
    transport = sender._transport
    assert isinstance(transport, shm.ShmSendTransport)
    read = transport.returns.returned

    def release_in_between() -> list[Note]:
        """What happens when the receiver releases between the sender's flag and its read of the
        words."""
        notes = read()
        if not notes and transport.returns.words[2]:
            while held:
                held.pop().release()
            notes = read()
        return notes

    held: list[Chunk] = []
    try:
        assert sender.put(numbered(0), 0.0)
        assert sender.put(numbered(1), 0.0)
        sender._returns = transport.returns = Between(transport.returns, release_in_between)  # type: ignore[assignment]
        for number in range(2, 500, 2):
            for chunk in (receiver.take(60.0), receiver.take(60.0)):
                assert chunk is not None
                held.append(chunk)
            assert sender.put(numbered(number), 60.0)
            assert sender.put(numbered(number + 1), 60.0)
        assert receiver._shm.socket is not None
        receiver.close()
        with pytest.raises(LinkClosed):
            sender.put(numbered(500), 60.0)
    finally:
        sender.close()
        receiver.close()


class Between:
    """`Returns` with another `returned`."""

    def __init__(self, returns: Returns, returned: Callable[[], list[Note]]) -> None:
        self.returned = returned
        self.words, self.flight = returns.words, returns.flight
        self.set_wake, self.close = returns.set_wake, returns.close
