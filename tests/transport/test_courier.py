"""The couriers: nothing blocks the loop, every fault arrives typed, named and counted, and closing
leaves nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stretto.errors import Gone, StrettoError, WireError
from stretto.stage.links.copies import HostToDevice
from stretto.transport import courier, wire
from stretto.transport.bounded_queue import BoundedQueue
from stretto.transport.contract import (
    Chunk,
    ChunkRefused,
    Corrupt,
    Endpoint,
    LinkClosed,
    LinkOptions,
    PeerDead,
    PutFailed,
    VersionMismatch,
)
from stretto.transport.courier import CourierBug, Incoming, LinkMetrics, Outgoing
from stretto.transport.shm import ShmConnector, ShmReceiveTransport, ShmSendTransport
from stretto.transport.slots import SlotReceiver, SlotSender
from stretto.types import SECRET_BYTES, Mark, RequestId, Span
from tests.transport.contract.links import eventually

R = RequestId("r-1")
PATIENCE_S = 60.0  # only a hung courier takes this long


class Loop:
    """Stands for a stage loop: the test waits here for what a courier brings."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def wake(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def until(self, done: Callable[[], bool]) -> None:
        """Sleep, and check at each wake-up, until `done`."""
        while True:
            with self._changed:
                seen = self._count
            if done():
                return
            with self._changed:
                woken = self._changed.wait_for(lambda n=seen: self._count != n, PATIENCE_S)
            assert woken, "the loop was never woken"


@dataclass
class Lease:
    """Counts how often a chunk was released."""

    released: int = 0

    def release(self) -> None:
        self.released += 1


def numbered(seq: int = 0, request: RequestId = R) -> tuple[Chunk, Lease]:
    lease = Lease()
    tensors = {"n": torch.tensor([seq])}
    return wire.chunk(request, Span(seq, seq + 1), Mark.MORE, tensors, seq=seq, lease=lease), lease


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("stretto-")] == []


def ends(slots: int = 4) -> tuple[SlotSender, SlotReceiver]:
    options = LinkOptions(slots=slots, slot_bytes=1 << 16, secret=bytes(SECRET_BYTES))
    receiver = ShmConnector().listen("a-b", options)
    return ShmConnector().connect(receiver.endpoint, options), receiver


def uploads() -> HostToDevice:
    return HostToDevice(torch.device("cpu"))


def hang_up(end: SlotSender | SlotReceiver) -> None:
    """End the connection as the kernel does for a process that died: without a CLOSE message."""
    assert isinstance(end.transport, ShmSendTransport | ShmReceiveTransport)
    assert end.transport.socket is not None
    end.transport.socket.hang_up()


def started(
    slots: int = 4, capacity: int = 64, max_taken: int = 64
) -> tuple[Outgoing, Incoming, Loop, SlotSender, SlotReceiver]:
    """Both couriers of a link. `kept` chunks may wait for the receiving loop."""
    sender, receiver = ends(slots)
    assert receiver.take(0.0) is None  # accepts the sender
    loop = Loop()
    out = Outgoing(sender, "a-b", loop.wake, capacity=capacity)
    into = Incoming(receiver, "a-b", loop.wake, uploader=uploads(), capacity=max_taken)
    out.start()
    into.start()
    return out, into, loop, sender, receiver


def collect(into: Incoming, loop: Loop, count: int) -> list[int]:
    got: list[int] = []

    def enough() -> bool:
        while len(got) < count and (chunk := into.poll()) is not None:
            got.append(chunk.header.seq)
            chunk.release()
        return len(got) == count

    loop.until(enough)
    return got


def faults(courier: Outgoing | Incoming, loop: Loop, count: int = 1) -> list[StrettoError]:
    found: list[StrettoError] = []

    def enough() -> bool:
        found.extend(courier.faults())
        return len(found) >= count

    loop.until(enough)
    return found


def test_order_and_numbers_on_both_sides() -> None:
    out, into, loop, *_ = started(slots=2)
    chunks = [numbered(seq) for seq in range(200)]
    sizes = sum(wire.blob_bytes(chunk.header) for chunk, _ in chunks)
    sent, got = 0, []

    def pump() -> bool:
        nonlocal sent
        while sent < len(chunks) and out.offer(chunks[sent][0]):
            sent += 1
        while (chunk := into.poll()) is not None:
            got.append(chunk.header.seq)
            assert chunk.tensors["n"].tolist() == [chunk.header.seq]
            chunk.release()
        return len(got) == len(chunks)

    loop.until(pump)
    out.close()
    into.close()
    assert got == list(range(200))
    assert all(lease.released == 1 for _, lease in chunks)
    for metrics in (out.metrics, into.metrics):
        assert (metrics.chunks, metrics.bytes, metrics.queue.count, metrics.queued) == (
            200,
            sizes,
            200,
            0,
        )
    assert (out.metrics.put.count, into.metrics.take.count) == (200, 200)
    assert out.metrics.put.total_s > 0
    assert not out.metrics.errors
    assert set(into.metrics.errors) <= {"LinkClosed"}


def test_a_full_queue_is_reported_and_ends() -> None:
    """The receiving loop does not poll: queues fill, offers are refused, the loop is woken when
    there is room again."""
    out, into, loop, *_ = started(slots=1, capacity=2, max_taken=2)
    chunks = [numbered(seq)[0] for seq in range(12)]
    sent = 0

    def stalled() -> bool:
        nonlocal sent
        while out.offer(chunks[sent]):
            sent += 1
        return min(out.metrics.stalls, into.metrics.stalls) > 0

    eventually(stalled)
    assert sent <= 7, (
        "2 there, 1 in that courier's hands, 1 in the slot, 1 in this courier's hands, 2 here"
    )
    rest: list[int] = []

    def pump() -> bool:
        nonlocal sent
        while sent < len(chunks) and out.offer(chunks[sent]):
            sent += 1
        while (chunk := into.poll()) is not None:
            rest.append(chunk.header.seq)
            chunk.release()
        return len(rest) == len(chunks)

    loop.until(pump)
    assert rest == list(range(12))
    out.close()
    into.close()


def test_purge_catches_what_is_on_its_way() -> None:
    out, into, loop, *_ = started(slots=1, capacity=8, max_taken=1)
    chunks = [numbered(seq) for seq in range(6)]
    for chunk, _ in chunks:
        assert out.offer(chunk)
    loop.until(
        lambda: into.metrics.chunks >= 1
    )  # the first waits for the loop, the others behind it
    out.purge(R)
    into.purge(R)
    fresh, lease = numbered(9, RequestId("r-2"))
    assert out.offer(fresh)
    assert collect(into, loop, 1) == [9]
    out.close()  # a sender announces a chunk before it releases it: ask after its thread has ended
    into.close()
    assert lease.released == 1
    assert all(lease.released == 1 for _, lease in chunks)


def test_a_request_that_is_over() -> None:
    out, into, loop, *_ = started()
    out.purge(R)
    (stale, lease), (other, _) = numbered(0), numbered(5, RequestId("r-2"))
    assert out.offer(stale)
    assert out.offer(other)
    assert collect(into, loop, 1) == [5]
    assert lease.released == 1
    assert out.metrics.purged == 1
    out.close()
    into.close()


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_peer_dies(victim: str) -> None:
    out, into, loop, sender, receiver = started()
    if victim == "receiver":
        hang_up(receiver)
        (fault,) = faults(out, loop)
        loop.until(lambda: out.ended)
        lost, lease = numbered()
        assert not out.offer(lost)
        assert lease.released == 0, "it is still the caller's"
        assert out.metrics.errors == {"PeerDead": 1}
    else:
        hang_up(sender)
        (fault,) = faults(into, loop)
        loop.until(lambda: into.ended)
        assert into.metrics.errors == {"PeerDead": 1}
    assert isinstance(fault, PeerDead)
    assert fault.link == "a-b"
    out.close()
    into.close()


def test_a_death_names_all_who_had_something_on_its_way() -> None:
    sender, receiver = ends(slots=1)
    loop = Loop()
    out = Outgoing(sender, "a-b", loop.wake)
    chunks = [
        numbered(seq, RequestId(request))
        for seq, request in enumerate(("r-0", "r-1", "r-2", "r-1"))
    ]
    for chunk, _ in chunks:
        assert out.offer(chunk)
    assert receiver.take(0.0) is None
    hang_up(receiver)
    out.start()
    loop.until(lambda: out.ended)
    out.close()
    found = out.faults()
    assert {type(fault) for fault in found} == {PeerDead}
    assert {fault.request for fault in found if isinstance(fault, PeerDead)} == {
        "r-0",
        "r-1",
        "r-2",
    }
    assert all(lease.released == 1 for _, lease in chunks)
    receiver.close()


def test_a_clean_end() -> None:
    out, into, loop, *_ = started()
    for seq in range(3):
        assert out.offer(numbered(seq)[0])
    out.close()  # drains first
    assert collect(into, loop, 3) == [0, 1, 2]
    (fault,) = faults(into, loop)
    assert isinstance(fault, LinkClosed)
    into.close()
    into.close()
    out.close()


def test_what_was_offered_just_before_the_end_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The courier has found the queue empty; the offer and the close come before it asks whether
    that was the end."""
    sender, loop = Scripted([]), Loop()
    chunk, lease = numbered(7)

    class LateQueue(BoundedQueue[Any]):
        def wait_item(self, timeout: float) -> Any:
            item = self.poll()
            if item is None and not self.closed:
                assert out.offer(chunk)
                self.close()
            return item

    monkeypatch.setattr(courier, "BoundedQueue", LateQueue)
    out = Outgoing(sender, "a-b", loop.wake)
    out.start()
    loop.until(lambda: sender.closed)
    out.close()
    assert sender.sent == [7]
    assert lease.released == 1


def test_closing_without_sending_the_rest() -> None:
    sender, receiver = ends(slots=1)
    out = Outgoing(sender, "a-b", lambda: None)
    chunks = [numbered(seq) for seq in range(5)]
    for chunk, _ in chunks:
        out.offer(chunk)
    out.start()
    out.close(drain=False)
    assert all(lease.released == 1 for _, lease in chunks)
    assert out.faults() == []
    receiver.close()


@pytest.mark.parametrize("courier", ["out", "in"])
def test_never_started(courier: str) -> None:
    sender, receiver = ends()
    chunk, lease = numbered()
    if courier == "out":
        out = Outgoing(sender, "a-b", lambda: None)
        out.offer(chunk)
        out.close()
        assert lease.released == 1
        with pytest.raises(LinkClosed):
            receiver.take(PATIENCE_S)
        receiver.close()
    else:
        sender.put(chunk, 0)
        Incoming(receiver, "a-b", lambda: None, uploader=uploads()).close()
        assert lease.released == 1
        with pytest.raises(LinkClosed):
            sender.check()
        sender.close()


class Scripted:
    """A sender that does what the test says for each put; stands for a transport with troubles."""

    def __init__(self, script: list[StrettoError | Exception | None]) -> None:
        self.endpoint = Endpoint("test", "a-b", "", 0, "", 1, 1)
        self.script = script
        self.sent: list[int] = []
        self.refused: list[ChunkRefused] = []
        self.closed = False

    def put(self, chunk: Chunk, timeout: float) -> bool:
        trouble = self.script.pop(0) if self.script else None
        if trouble is not None:
            raise trouble
        self.sent.append(chunk.header.seq)
        chunk.release()
        return True

    def progress(self, *, wait: bool) -> int:
        return 0

    def credits(self) -> int:
        return 7

    def refusals(self) -> list[ChunkRefused]:
        refused, self.refused = self.refused, []
        return refused

    def purge(self, request: RequestId) -> None:
        pass

    def check(self) -> None:
        if self.closed:
            raise LinkClosed("closed")

    def close(self) -> None:
        self.closed = True


def test_a_failed_put_fails_its_request_and_no_other() -> None:
    sender, loop = Scripted([None, PutFailed("no buffer")]), Loop()
    out = Outgoing(sender, "a-b", loop.wake)
    ok = RequestId("ok")
    chunks = [numbered(0, ok), numbered(0), numbered(1), numbered(1, ok), numbered(2)]
    for chunk, _ in chunks:
        assert out.offer(chunk)
    out.start()
    (fault,) = faults(out, loop)
    assert isinstance(fault, PutFailed)
    assert (fault.request, fault.link) == (R, "a-b")
    out.close()
    assert sender.sent == [0, 1], "its later chunks would be gaps"
    assert [lease.released for _, lease in chunks] == [1] * 5
    assert out.metrics.purged == 2
    assert out.metrics.errors == {"PutFailed": 1}
    assert out.metrics.credits == 7


def test_room_in_the_queue_wakes_a_loop_that_was_refused() -> None:
    """Nothing comes in on this side, so only the courier itself can wake the loop."""
    gate = threading.Event()

    class Gated(Scripted):
        def put(self, chunk: Chunk, timeout: float) -> bool:
            return gate.wait(timeout) and super().put(chunk, timeout)

    sender, loop = Gated([]), Loop()
    out = Outgoing(sender, "a-b", loop.wake, capacity=2)
    out.start()
    sent = 0
    while out.offer(numbered(sent)[0]):
        sent += 1
    assert 2 <= sent <= 3
    gate.set()
    loop.until(lambda: out.offer(numbered(sent)[0]))
    out.close()
    assert sender.sent == list(range(sent + 1))


def test_a_refusal_comes_back_with_its_request() -> None:
    sender, loop = Scripted([]), Loop()
    sender.refused.append(ChunkRefused("blob checksum does not match", request=R))
    out = Outgoing(sender, "a-b", loop.wake)
    out.start()
    (fault,) = faults(out, loop)
    assert isinstance(fault, ChunkRefused)
    assert fault.request == R
    assert not out.ended
    out.close()


def test_a_bug_in_the_transport_ends_the_link_aloud() -> None:
    sender, loop = Scripted([RuntimeError("index out of range")]), Loop()
    out = Outgoing(sender, "a-b", loop.wake)
    out.start()
    out.offer(numbered()[0])
    (fault,) = faults(out, loop)
    assert isinstance(fault, CourierBug)
    assert "index out of range" in str(fault)
    loop.until(lambda: out.ended and sender.closed)
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

    def purge(self, request: RequestId) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_bad_chunks_are_reported_and_the_link_goes_on() -> None:
    loop = Loop()
    script: list[Chunk | Exception] = [
        Corrupt("blob", request=R),
        VersionMismatch("2"),
        numbered(3)[0],
    ]
    into = Incoming(ScriptedReceiver(script), "a-b", loop.wake, uploader=uploads())
    into.start()
    found = faults(into, loop, 3)
    assert [type(fault) for fault in found] == [Corrupt, VersionMismatch, LinkClosed]
    assert getattr(found[0], "request", None) == R
    assert collect(into, loop, 1) == [3]
    assert into.metrics.errors == {"Corrupt": 1, "VersionMismatch": 1, "LinkClosed": 1}
    into.close()


def test_a_bug_while_receiving_is_not_silent() -> None:
    loop, receiver = Loop(), ScriptedReceiver([RuntimeError("?")])
    into = Incoming(receiver, "a-b", loop.wake, uploader=uploads())
    into.start()
    (fault,) = faults(into, loop)
    assert isinstance(fault, CourierBug)
    into.close()
    assert receiver.closed


class SlowUploads:
    """Uploads that finish only when someone waits: the source must be given back by then, not
    earlier."""

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
    loop = Loop()
    out = Outgoing(sender, "a-b", loop.wake)
    into = Incoming(receiver, "a-b", loop.wake, uploader=SlowUploads())
    out.start()
    into.start()
    chunks = [numbered(seq) for seq in range(20)]
    for chunk, _ in chunks:
        assert out.offer(chunk)
    assert collect(into, loop, 20) == list(range(20))
    out.close()
    into.close()
    assert all(lease.released == 1 for _, lease in chunks)


def test_errors_by_kind() -> None:
    metrics = LinkMetrics("a-b")
    for error in (WireError("x"), Gone("y"), WireError("z")):
        metrics.error(error)
    assert metrics.errors == {"WireError": 2, "Gone": 1}
