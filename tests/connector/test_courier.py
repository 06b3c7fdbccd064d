"""The couriers: nothing blocks the loop, every fault arrives typed, named and counted, and closing leaves nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from stretto.connector import wire
from stretto.connector.contract import (
    EVERY_EPOCH,
    Chunk,
    Corrupt,
    Endpoint,
    LinkClosed,
    LinkOptions,
    PeerDead,
    PutFailed,
    Refused,
    VersionMismatch,
)
from stretto.connector.courier import CourierBug, Incoming, Outgoing
from stretto.connector.inline import InlineIn, InlineOut
from stretto.connector.local import LocalConnector, LocalReceiver, LocalSender
from stretto.errors import StrettoError
from stretto.types import Mark, RequestId, Span

R = RequestId("r-1")
PATIENCE_S = 20.0  # only a hung courier takes this long


class Bell:
    """The loop's wake-up: tests wait here for what a courier brings, as a stage loop would."""

    def __init__(self) -> None:
        self._rung = threading.Condition()
        self._count = 0

    def ring(self) -> None:
        with self._rung:
            self._count += 1
            self._rung.notify_all()

    def until(self, done: Callable[[], bool]) -> None:
        """Wait, waking with each ring, until `done`."""
        while True:
            with self._rung:
                seen = self._count
            if done():
                return
            with self._rung:
                assert self._rung.wait_for(lambda: self._count != seen, PATIENCE_S), "the loop was never woken"  # noqa: B023


@dataclass
class Box:
    """A parcel around a plain chunk."""

    seq: int = 0
    request: RequestId = R
    epoch: int = 0
    fate: list[str] = field(default_factory=list)
    broken: bool = False

    def pack(self) -> Chunk:
        if self.broken:
            raise RuntimeError("rows are gone")
        return wire.chunk(
            self.request,
            Span(self.seq, self.seq + 1),
            Mark.MORE,
            {"n": torch.tensor([self.seq])},
            seq=self.seq,
            epoch=self.epoch,
            lease=self,
        )

    def drop(self) -> None:
        self.fate.append("dropped")

    def release(self) -> None:
        self.fate.append("released")


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("stretto-")] == []


def ends(slots: int = 4) -> tuple[LocalSender, LocalReceiver]:
    connector = LocalConnector()
    receiver = connector.listen("a-b", LinkOptions(slots=slots, slot_bytes=1 << 16))
    return connector.connect(receiver.endpoint, LinkOptions()), receiver


def started(slots: int = 4, capacity: int = 64) -> tuple[Outgoing, Incoming, Bell, LocalSender, LocalReceiver]:
    sender, receiver = ends(slots)
    bell = Bell()
    out, into = (
        Outgoing(sender, "a-b", bell.ring, capacity=capacity),
        Incoming(receiver, "a-b", bell.ring, capacity=capacity),
    )
    out.start()
    into.start()
    return out, into, bell, sender, receiver


def collect(into: Incoming | InlineIn, bell: Bell, count: int) -> list[int]:
    got: list[int] = []

    def enough() -> bool:
        while len(got) < count and (chunk := into.poll()) is not None:
            got.append(chunk.header.seq)
            chunk.release()
        return len(got) == count

    bell.until(enough)
    return got


def faults(courier: Outgoing | Incoming, bell: Bell, count: int = 1) -> list[StrettoError]:
    found: list[StrettoError] = []

    def enough() -> bool:
        found.extend(courier.faults())
        return len(found) >= count

    bell.until(enough)
    return found


def test_order_and_numbers_on_both_sides() -> None:
    out, into, bell, *_ = started(slots=2)
    boxes = [Box(seq) for seq in range(200)]
    sent, got = 0, []

    def pump() -> bool:
        nonlocal sent
        while sent < len(boxes) and out.offer(boxes[sent]):
            sent += 1
        while (chunk := into.poll()) is not None:
            got.append(chunk.header.seq)
            chunk.release()
        return len(got) == len(boxes)

    bell.until(pump)
    out.close()
    into.close()
    assert got == list(range(200))
    assert all(box.fate == ["released"] for box in boxes)
    size = sum(wire.blob_bytes(Box(seq).pack().header) for seq in range(200))
    for metrics in (out.metrics, into.metrics):
        assert (metrics.chunks, metrics.bytes, metrics.queue.count, metrics.queued) == (200, size, 200, 0)
    assert (out.metrics.put.count, into.metrics.take.count) == (200, 200)
    assert out.metrics.put.total_s > 0
    assert not out.metrics.errors
    assert set(into.metrics.errors) <= {"LinkClosed"}


def test_a_full_queue_is_told_and_ends() -> None:
    """No credit: the queue fills, offers are refused, the loop is woken when there is room again."""
    out, into, bell, *_ = started(slots=1, capacity=2)
    boxes = [Box(seq) for seq in range(6)]
    sent = 0
    while out.offer(boxes[sent]):
        sent += 1
        assert sent < 6, "1 on the link, 1 in the courier's hands, 2 queued here, at most 1 there"
    assert out.metrics.refused_offers >= 1
    rest: list[int] = []

    def pump() -> bool:
        nonlocal sent
        while sent < len(boxes) and out.offer(boxes[sent]):
            sent += 1
        while (chunk := into.poll()) is not None:
            rest.append(chunk.header.seq)
            chunk.release()
        return len(rest) == len(boxes)

    bell.until(pump)
    assert rest == list(range(6))
    assert out.metrics.stalls >= 1
    out.close()
    into.close()


def test_purge_catches_what_is_on_its_way() -> None:
    out, into, bell, *_ = started(slots=1, capacity=8)
    boxes = [Box(seq) for seq in range(4)]
    for box in boxes:
        assert out.offer(box)
    bell.until(lambda: into.metrics.chunks == 1)  # the first is with the loop, unreleased; the others wait for it
    out.purge(R, 1)
    into.purge(R, 1)
    fresh = Box(0, epoch=1)
    assert out.offer(fresh)
    assert collect(into, bell, 1) == [0]
    assert fresh.fate == ["released"]
    assert all(len(box.fate) == 1 for box in boxes), "each was dropped, or released, once"
    out.close()
    into.close()


def test_a_request_that_is_over() -> None:
    out, into, bell, *_ = started()
    out.purge(R, EVERY_EPOCH)
    stale, other = Box(0), Box(5, RequestId("r-2"))
    assert out.offer(stale)
    assert out.offer(other)
    assert collect(into, bell, 1) == [5]
    assert stale.fate == ["dropped"]
    assert out.metrics.purged == 1
    out.close()
    into.close()


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_peer_dies(victim: str) -> None:
    out, into, bell, sender, receiver = started()
    if victim == "receiver":
        receiver.die()
        (fault,) = faults(out, bell)
        bell.until(lambda: out.ended)
        lost = Box()
        assert not out.offer(lost)
        assert lost.fate == []
        assert out.metrics.errors == {"PeerDead": 1}
    else:
        sender.die()
        (fault,) = faults(into, bell)
        bell.until(lambda: into.ended)
        assert into.metrics.errors == {"PeerDead": 1}
    assert isinstance(fault, PeerDead)
    assert fault.link == "a-b"
    out.close()
    into.close()


def test_a_death_names_all_who_had_something_on_its_way() -> None:
    sender, receiver = ends(slots=1)
    bell = Bell()
    out = Outgoing(sender, "a-b", bell.ring)
    boxes = [Box(0, RequestId("r-0")), Box(1, RequestId("r-1")), Box(2, RequestId("r-2")), Box(3, RequestId("r-1"))]
    for box in boxes:
        assert out.offer(box)
    out.start()
    receiver.die()
    bell.until(lambda: out.ended)
    out.close()
    found = out.faults()
    assert {type(fault) for fault in found} == {PeerDead}
    assert {fault.request for fault in found if isinstance(fault, PeerDead)} >= {"r-1", "r-2"}
    assert all(len(box.fate) == 1 for box in boxes), [box.fate for box in boxes]


def test_a_clean_end() -> None:
    out, into, bell, *_ = started()
    boxes = [Box(seq) for seq in range(3)]
    for box in boxes:
        assert out.offer(box)
    out.close()  # drains first
    assert collect(into, bell, 3) == [0, 1, 2]
    (fault,) = faults(into, bell)
    assert isinstance(fault, LinkClosed)
    into.close()
    into.close()
    out.close()


def test_closing_without_sending_the_rest() -> None:
    sender, _receiver = ends(slots=1)
    bell = Bell()
    out = Outgoing(sender, "a-b", bell.ring)
    boxes = [Box(seq) for seq in range(5)]
    for box in boxes:
        out.offer(box)
    out.start()
    out.close(drain=False)
    assert all(len(box.fate) == 1 for box in boxes[1:])
    assert out.faults() == []


@pytest.mark.parametrize("courier", ["out", "in"])
def test_never_started(courier: str) -> None:
    sender, receiver = ends()
    box = Box()
    if courier == "out":
        out = Outgoing(sender, "a-b", lambda: None)
        out.offer(box)
        out.close()
        assert box.fate == ["dropped"]
        with pytest.raises(LinkClosed):
            receiver.take(0)
    else:
        sender.put(box.pack(), 0)
        Incoming(receiver, "a-b", lambda: None).close()
        assert box.fate == ["released"]
        with pytest.raises(LinkClosed):
            sender.check()


class Scripted:
    """A sender that does what the test says for each put; stands for a transport with troubles."""

    def __init__(self, script: list[StrettoError | Exception | None]) -> None:
        self.script = script
        self.sent: list[int] = []
        self.refused: list[Refused] = []
        self.closed = False

    def put(self, chunk: Chunk, timeout: float) -> bool:
        trouble = self.script.pop(0) if self.script else None
        if trouble is not None:
            raise trouble
        self.sent.append(chunk.header.seq)
        chunk.release()
        return True

    def settle(self, *, wait: bool) -> int:
        return 0

    def credits(self) -> int:
        return 7

    def refusals(self) -> list[Refused]:
        refused, self.refused = self.refused, []
        return refused

    def purge(self, request: RequestId, epoch: int) -> None:
        pass

    def check(self) -> None:
        if self.closed:
            raise LinkClosed("closed")

    def close(self) -> None:
        self.closed = True


def test_a_failed_put_fails_its_request_and_no_other() -> None:
    sender, bell = Scripted([None, PutFailed("no buffer")]), Bell()
    out = Outgoing(sender, "a-b", bell.ring)
    boxes = [Box(0, RequestId("ok")), Box(0), Box(1), Box(1, RequestId("ok")), Box(0, epoch=1)]
    for box in boxes:
        assert out.offer(box)
    out.start()
    (fault,) = faults(out, bell)
    assert isinstance(fault, PutFailed)
    assert (fault.request, fault.link) == (R, "a-b")
    out.close()
    assert sender.sent == [0, 1, 0], "its later chunks would be gaps; a new epoch starts afresh"
    assert [box.fate for box in boxes] == [["released"], ["released"], ["dropped"], ["released"], ["released"]]
    assert out.metrics.errors == {"PutFailed": 1}
    assert out.metrics.credits == 7


def test_room_in_the_queue_wakes_a_loop_that_was_refused() -> None:
    """Nothing comes in on this side, so only the courier itself can wake the loop."""
    gate = threading.Event()

    class Gated(Scripted):
        def put(self, chunk: Chunk, timeout: float) -> bool:
            return gate.wait(timeout) and super().put(chunk, timeout)

    sender, bell = Gated([]), Bell()
    out = Outgoing(sender, "a-b", bell.ring, capacity=2)
    out.start()
    boxes = iter([Box(seq) for seq in range(8)])
    sent, next_box = 0, next(boxes)
    while out.offer(next_box):
        sent, next_box = sent + 1, next(boxes)
    assert 2 <= sent <= 3
    gate.set()
    bell.until(lambda: out.offer(next_box))
    out.close()
    assert sender.sent == list(range(sent + 1))


def test_a_refusal_comes_back_with_its_request() -> None:
    sender, bell = Scripted([]), Bell()
    sender.refused.append(Refused("blob checksum does not match", request=R))
    out = Outgoing(sender, "a-b", bell.ring)
    out.start()
    (fault,) = faults(out, bell)
    assert isinstance(fault, Refused)
    assert fault.request == R
    assert not out.ended
    out.close()


def test_rows_that_cannot_be_packed() -> None:
    sender, bell = Scripted([]), Bell()
    out = Outgoing(sender, "a-b", bell.ring)
    broken = Box(0, broken=True)
    out.offer(broken)
    out.offer(Box(0, RequestId("ok")))
    out.start()
    (fault,) = faults(out, bell)
    assert isinstance(fault, CourierBug)
    assert fault.request == R
    out.close()
    assert sender.sent == [0]
    assert broken.fate == ["dropped"]


def test_a_bug_in_the_transport_ends_the_link_aloud() -> None:
    sender, bell = Scripted([RuntimeError("index out of range")]), Bell()
    out = Outgoing(sender, "a-b", bell.ring)
    out.start()
    out.offer(Box())
    (fault,) = faults(out, bell)
    assert isinstance(fault, CourierBug)
    assert "index out of range" in str(fault)
    bell.until(lambda: out.ended and sender.closed)
    out.close()


class ScriptedReceiver:
    """A receiver that yields or raises what the test says, then closes."""

    def __init__(self, script: list[Chunk | Exception]) -> None:
        self.script = script
        self.closed = False
        self.endpoint = Endpoint("test", "a-b", "", 0, "", 1, 1)

    def take(self, timeout: float) -> Chunk | None:
        if not self.script:
            raise LinkClosed("the sender closed")
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def credits(self) -> int:
        return 5

    def purge(self, request: RequestId, epoch: int) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_bad_chunks_are_reported_and_the_link_goes_on() -> None:
    bell = Bell()
    script: list[Chunk | Exception] = [Corrupt("blob", request=R), VersionMismatch("2"), Box(3).pack()]
    into = Incoming(ScriptedReceiver(script), "a-b", bell.ring)
    into.start()
    found = faults(into, bell, 3)
    assert [type(fault) for fault in found] == [Corrupt, VersionMismatch, LinkClosed]
    assert getattr(found[0], "request", None) == R
    assert collect(into, bell, 1) == [3]
    assert into.metrics.errors == {"Corrupt": 1, "VersionMismatch": 1, "LinkClosed": 1}
    into.close()


def test_a_bug_while_receiving_is_not_silent() -> None:
    bell, receiver = Bell(), ScriptedReceiver([RuntimeError("?")])
    into = Incoming(receiver, "a-b", bell.ring)
    into.start()
    (fault,) = faults(into, bell)
    assert isinstance(fault, CourierBug)
    into.close()
    assert receiver.closed


class SlowUploads:
    """Uploads that finish only when someone waits: the source must be given back by then, not earlier."""

    def __init__(self) -> None:
        self.running: list[Chunk] = []

    def upload(self, chunk: Chunk) -> Chunk:
        self.running.append(chunk)
        return Chunk(chunk.header, dict(chunk.tensors))

    def reap(self) -> int:
        return len(self.running)

    def wait_one(self) -> None:
        if self.running:
            self.running.pop(0).release()

    def wait(self) -> None:
        while self.running:
            self.wait_one()


def test_an_idle_courier_gives_uploaded_slots_back() -> None:
    """With one slot, the second chunk can only come if the first one's upload is waited for."""
    sender, receiver = ends(slots=1)
    bell = Bell()
    out = Outgoing(sender, "a-b", bell.ring)
    into = Incoming(receiver, "a-b", bell.ring, uploader=SlowUploads())
    out.start()
    into.start()
    boxes = [Box(seq) for seq in range(20)]
    for box in boxes:
        assert out.offer(box)
    assert collect(into, bell, 20) == list(range(20))
    out.close()
    into.close()
    assert all(box.fate == ["released"] for box in boxes)


def test_inline_links_do_the_same_without_threads() -> None:
    sender, receiver = ends(slots=2)
    bell = Bell()
    out, into = InlineOut(sender, "a-b", bell.ring), InlineIn(receiver, "a-b", bell.ring)
    boxes = [Box(seq) for seq in range(4)]
    assert [out.offer(box) for box in boxes[:3]] == [True, True, False]
    assert out.metrics.stalls == 1
    assert collect(into, bell, 2) == [0, 1]
    assert out.offer(boxes[2])
    out.purge(R, 1)
    into.purge(R, 1)
    assert out.offer(boxes[3])
    assert into.poll() is None
    assert [box.fate for box in boxes] == [["released"], ["released"], ["released"], ["dropped"]]
    assert (out.metrics.chunks, into.metrics.chunks) == (3, 2)
    receiver.die()
    assert not out.offer(Box(0, RequestId("r-2")))
    (fault,) = out.faults()
    assert isinstance(fault, PeerDead)
    assert fault.request == "r-2"
    assert out.ended
    assert out.faults() == []


def test_inline_faults() -> None:
    sender, receiver = ends()
    out, into = InlineOut(sender, "a-b", lambda: None), InlineIn(receiver, "a-b", lambda: None)
    out.close()
    assert into.poll() is None
    (fault,) = into.faults()
    assert isinstance(fault, LinkClosed)
    assert into.ended
    into.close()
