"""The sender's copies from a device, without one: tensors that are nowhere (`meta`), and copies and
events that do their work when the test says so. Chunks leave in order however their copies finish,
and neither a slot nor a source is let go of before its copy is done, however the link ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from stretto.transport import wire
from stretto.transport.contract import (
    Chunk,
    Endpoint,
    LinkClosed,
    LinkOptions,
    PeerDead,
    PutFailed,
    Receiver,
)
from stretto.transport.courier import Outgoing
from stretto.transport.registry import Registry
from stretto.transport.slot_transport import SendTransport
from stretto.transport.slots import SlotSender
from stretto.types import Mark, RequestId, Span
from tests.transport.contract.links import SECRET, eventually

PATIENCE_S = 60.0
OPTIONS = LinkOptions(
    slots=6, slot_bytes=1 << 15, secret=SECRET, copies=3, connect_timeout_s=PATIENCE_S
)
R = RequestId("r")


@dataclass
class Copy:
    """A copy that has been started, and the event behind it. Done when the test says so, or when
    someone waits."""

    number: int
    place: torch.Tensor
    device: Device
    done: threading.Event = field(default_factory=threading.Event)
    waited: threading.Event = field(default_factory=threading.Event)

    def finish(self) -> None:
        if not self.done.is_set():
            assert self.number in self.device.alive, "its source was let go of under it"
            self.place.fill_(self.number)
            self.done.set()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        self.waited.set()
        if self.device.by_hand:
            assert self.done.wait(PATIENCE_S), "the test never finished it"
        self.finish()


@dataclass
class Device:
    """`wire.Copies` that the test drives. Chunk n is to arrive as rows of n."""

    by_hand: bool = False
    started: list[Copy] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)  # chunks that were not released

    def start(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]], after: torch.cuda.Event | None
    ) -> Copy:
        ((place, source),) = pairs
        assert source.is_meta
        copy = Copy(int(source.shape[1]), place, self)
        assert all(
            c.done.is_set() or c.place.data_ptr() != place.data_ptr() for c in self.started
        ), "slot in use"
        self.started.append(copy)
        return copy

    def chunk(self, number: int, request: str = "r", *, far: bool = True) -> Chunk:
        self.alive.add(number)
        rows = (
            torch.empty(8, number, device="meta", dtype=torch.int32)
            if far
            else torch.full((8, number), number)
        )
        span = Span(number, number + 1)
        return wire.chunk(
            RequestId(request), span, Mark.MORE, {"x": rows}, seq=number, lease=Held(self, number)
        )


@dataclass
class Held:
    device: Device
    number: int

    def release(self) -> None:
        copies = [copy for copy in self.device.started if copy.number == self.number]
        assert all(copy.done.is_set() for copy in copies), "released while it is being read"
        self.device.alive.remove(self.number)


@dataclass
class Ends:
    sender: SlotSender
    receiver: Receiver
    device: Device

    def got(self, count: int) -> list[int]:
        return [self.one() for _ in range(count)]

    def one(self) -> int:
        chunk = self.receiver.take(PATIENCE_S)
        assert chunk is not None
        number = chunk.header.seq
        assert chunk.tensors["x"].eq(number).all(), "sent before it was there"
        chunk.release()
        return number


def is_over(sender: SlotSender) -> bool:
    """Whether the sender knows that the link is over: a network takes its time to say so."""
    try:
        sender.check()
    except (LinkClosed, PeerDead):
        return True
    return False


def sender_over(transport: SendTransport, endpoint: Endpoint, device: Device) -> SlotSender:
    return SlotSender(endpoint, OPTIONS, transport, checksum=False, copies=device)


@pytest.fixture(params=["shm", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    connector = Registry().get(request.param)
    receiver = connector.listen("a-b", OPTIONS)
    connected = connector.connect(receiver.endpoint, OPTIONS)
    assert isinstance(connected, SlotSender)
    device = Device()
    sender = sender_over(connected.transport, receiver.endpoint, device)
    assert receiver.take(0.01) is None
    yield Ends(sender, receiver, device)
    device.by_hand = False
    sender.close()
    receiver.close()
    assert not device.alive, "everything was released in the end"


def test_copies_run_one_behind_the_other_and_leave_in_order(ends: Ends) -> None:
    sender, device = ends.sender, ends.device
    for n in (1, 2, 3):
        assert sender.put(device.chunk(n), 0.0)
    assert [copy.done.is_set() for copy in device.started] == [False] * 3, (
        "put waits for none of them"
    )
    assert sender.progress(wait=False) == 3
    device.started[2].finish()
    device.started[1].finish()
    assert sender.progress(wait=False) == 3, "the first has not landed"
    assert ends.receiver.take(0.01) is None
    device.started[0].finish()
    assert sender.progress(wait=False) == 0
    assert ends.got(3) == [1, 2, 3]


def test_rows_on_the_host_wait_for_those_before_them(ends: Ends) -> None:
    sender, device = ends.sender, ends.device
    assert sender.put(device.chunk(1), 0.0)
    assert sender.put(device.chunk(2, far=False), 0.0)
    assert sender.progress(wait=False) == 2
    assert sender.progress(wait=True) == 0
    assert ends.got(2) == [1, 2]


def test_the_number_of_copies_is_bounded(ends: Ends) -> None:
    for n in range(1, 6):
        assert ends.sender.put(ends.device.chunk(n), PATIENCE_S)
        assert sum(not copy.done.is_set() for copy in ends.device.started) <= 3
    while ends.sender.progress(wait=True):
        pass
    assert ends.got(5) == [1, 2, 3, 4, 5]


def test_waiting_for_a_slot_sends_what_holds_them(ends: Ends) -> None:
    """More chunks than slots: a slot comes back only if what lies in it leaves."""
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(ends.got, 40)
        for n in range(1, 41):
            assert ends.sender.put(ends.device.chunk(n, far=n % 3 != 0), PATIENCE_S)
        while ends.sender.progress(wait=True):
            pass
        assert received.result() == list(range(1, 41))


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_landing(ends: Ends, seed: int) -> None:
    rng = random.Random(seed)
    got: list[int] = []
    for n in range(1, 80):
        assert ends.sender.put(ends.device.chunk(n, far=rng.random() < 0.8), PATIENCE_S)
        running = [copy for copy in ends.device.started if not copy.done.is_set()]
        for copy in rng.sample(running, rng.randrange(len(running) + 1)):
            copy.finish()
        left = ends.sender.progress(wait=rng.random() < 0.3)
        got += ends.got(n - left - len(got))
    while ends.sender.progress(wait=True):
        pass
    assert got + ends.got(79 - len(got)) == list(range(1, 80))


def test_close_sends_what_was_put(ends: Ends) -> None:
    for n in (1, 2, 3):
        assert ends.sender.put(ends.device.chunk(n), 0.0)
    ends.sender.close()
    assert ends.got(3) == [1, 2, 3]
    with pytest.raises(LinkClosed):
        ends.receiver.take(PATIENCE_S)


def test_the_peer_leaves_in_the_middle(ends: Ends) -> None:
    """Its end is told, and what the copies touch is kept until they are done."""
    sender, device = ends.sender, ends.device
    device.by_hand = True
    for n in (1, 2):
        assert sender.put(device.chunk(n), 0.0)
    ends.receiver.close()
    eventually(lambda: is_over(sender))
    device.started[0].finish()
    with pytest.raises((LinkClosed, PeerDead)) as caught:
        sender.progress(wait=False)
    assert caught.value.request == "r"
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(sender.close)
        assert device.started[1].waited.wait(PATIENCE_S)
        assert not closing.done(), "the copy still writes to the slot"
        assert 2 in device.alive
        device.started[1].finish()
        closing.result()


def test_close_while_the_courier_waits_for_a_copy(ends: Ends) -> None:
    sender, device = ends.sender, ends.device
    device.by_hand = True
    for n in (1, 2):
        assert sender.put(device.chunk(n), 0.0)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(sender.progress, wait=True)
        assert device.started[0].waited.wait(PATIENCE_S)
        closing = pool.submit(sender.close)
        eventually(lambda: is_over(sender))
        assert device.alive == {1, 2}
        device.started[0].finish()
        with pytest.raises(LinkClosed):
            waiting.result()  # it was closed before the first could leave
        assert device.started[1].waited.wait(PATIENCE_S)
        device.started[1].finish()
        closing.result()


def test_a_purged_chunk_keeps_its_slot_until_its_copy_is_done(ends: Ends) -> None:
    sender, device = ends.sender, ends.device
    assert sender.put(device.chunk(1, "gone"), 0.0)
    assert sender.put(device.chunk(2), 0.0)
    sender.purge(RequestId("gone"))
    assert sender.credits() == 4
    assert sender.progress(wait=True) == 1
    assert sender.credits() == 5
    assert sender.progress(wait=True) == 0
    assert ends.got(1) == [2]


def test_a_transfer_that_fails_late_is_reported_as_a_refusal(ends: Ends) -> None:
    device = ends.device
    transport: Any = ends.sender.transport
    send = transport.send_chunk
    calls = []

    def fail_first(slot: int, seq: int, size: int) -> None:
        calls.append(seq)
        if len(calls) == 1:
            raise PutFailed("no route")
        send(slot, seq, size)

    transport.send_chunk = fail_first
    sender = sender_over(transport, ends.receiver.endpoint, device)
    assert sender.put(device.chunk(1, "lost"), 0.0)
    assert sender.put(device.chunk(2), 0.0)
    while sender.progress(wait=True):
        pass
    assert [(refused.request, refused.message) for refused in sender.refusals()] == [
        ("lost", "no route")
    ]
    assert ends.got(1) == [2]


def test_a_courier_keeps_several_copies_running_and_counts_what_left(ends: Ends) -> None:
    out = Outgoing(ends.sender, "a-b", lambda: None, capacity=60)
    for n in range(1, 61):
        assert out.offer(ends.device.chunk(n))
    out.start()
    assert ends.got(60) == list(range(1, 61))
    out.close()
    assert (out.metrics.chunks, out.metrics.put.count) == (60, 60)
    assert out.metrics.bytes == sum(8 * n * 4 for n in range(1, 61))
    assert not out.faults()


def test_a_death_names_those_whose_copies_ran(ends: Ends, request: pytest.FixtureRequest) -> None:
    ends.device.by_hand = True
    ended = threading.Event()
    out = Outgoing(ends.sender, "a-b", lambda: ended.set() if out.ended else None, capacity=8)
    for n, id in enumerate(("r-1", "r-2"), 1):
        assert out.offer(ends.device.chunk(n, id))
    out.start()
    while len(ends.device.started) < 2 or not ends.device.started[0].waited.is_set():
        ended.wait(0.001)
    ends.receiver.close()
    ends.device.started[0].finish()
    for copy in ends.device.started:
        assert copy.waited.wait(PATIENCE_S)
        copy.finish()
    assert ended.wait(PATIENCE_S)
    out.close()
    told = {getattr(fault, "request", None) for fault in out.faults()}
    assert told <= {None, "r-1", "r-2"}
    if (
        request.node.callspec.params["ends"] == "shm"
    ):  # a network may take both before it hears that nobody is there
        assert told >= {"r-2"}, "and r-1, unless it left in time"


class Far:
    """A tensor on a device that is not there: it can only be copied to the host."""

    is_cpu, device = False, "far"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.copies = tensor, 0

    def cpu(self) -> torch.Tensor:
        self.copies += 1
        return self.tensor


def test_without_the_overlap_the_loop_waits_for_its_rows() -> None:
    """`async_d2h` off: rows are on the host when `offer` returns, and are not copied for an offer
    that is refused."""
    connector, options = (
        Registry().get("shm"),
        LinkOptions(slots=2, slot_bytes=1 << 15, secret=SECRET),
    )
    receiver = connector.listen("a-b", options)
    out = Outgoing(
        connector.connect(receiver.endpoint, options),
        "a-b",
        lambda: None,
        async_d2h=False,
        capacity=2,
    )

    def chunk(number: int) -> tuple[Chunk, Far]:
        rows = torch.full((2,), number)
        made = wire.chunk(R, Span(number, number + 1), Mark.MORE, {"x": rows}, seq=number)
        far = Far(rows)
        made.tensors = {"x": far}  # type: ignore[dict-item]
        return made, far

    for number in (1, 2):
        made, far = chunk(number)
        assert out.offer(made)
        assert far.copies == 1, "copied by the caller, before the courier even runs"
        assert made.tensors["x"] is far.tensor
    made, far = chunk(3)
    assert not out.offer(made)
    assert far.copies == 0, "there is no room for it"
    out.start()
    for number in (1, 2):
        taken = receiver.take(PATIENCE_S)
        assert taken is not None
        assert taken.tensors["x"].tolist() == [number, number]
        taken.release()
    out.close()
    assert out.faults() == []
    receiver.close()
