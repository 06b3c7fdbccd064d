"""Slots and leases: conserved whatever happens, unusable once given up, loud when forgotten."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from stretto.errors import Bug
from stretto.stage.payload.ring import FillLease, ReadLease, Ring


class FakeEvent:
    """Fires when told to."""

    def __init__(self) -> None:
        self.fired = False

    def query(self) -> bool:
        return self.fired

    def synchronize(self) -> None:
        assert self.fired, "nobody would ever fire it"


def leased(ring: Ring) -> FillLease:
    lease = ring.lease()
    assert lease is not None
    return lease


def test_exhaustion_is_backpressure() -> None:
    ring = Ring(2, 128)
    first, second = leased(ring), leased(ring)
    assert ring.lease() is None
    second.release()
    first.seal().release()
    assert ring.free == 2


def test_tensors_lie_aligned_and_apart() -> None:
    ring = Ring(2, 1024)
    fill = leased(ring)
    ids = fill.place("ids", torch.int32, (5,))
    rows = fill.place("rows", torch.bfloat16, (3, 8))
    flags = fill.place("flags", torch.bool, ())
    nothing = fill.place("nothing", torch.float32, (0, 4))
    ids.copy_(torch.arange(5))
    rows.fill_(1.5)
    flags.fill_(True)
    read = fill.seal()
    assert read.tensors["ids"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(read.tensors["rows"], torch.full((3, 8), 1.5, dtype=torch.bfloat16))
    assert bool(read.tensors["flags"])
    assert nothing.shape == (0, 4)
    offsets = [t.storage_offset() * t.element_size() for t in (ids, rows, flags)]
    assert [offset % 64 for offset in offsets] == [0, 0, 0]
    read.release()


def test_a_slot_can_be_overfilled_by_nobody() -> None:
    fill = leased(Ring(1, 100))
    fill.place("a", torch.uint8, (60,))
    with pytest.raises(Bug):
        fill.place("b", torch.uint8, (37,))  # starts at 64
    fill.place("c", torch.uint8, (36,))
    with pytest.raises(Bug):
        fill.place("c", torch.uint8, (0,))
    fill.release()


def test_given_up_is_unusable() -> None:
    ring = Ring(1, 64)
    fill = leased(ring)
    fill.place("a", torch.uint8, (4,))
    read = fill.seal()
    for use in (lambda: fill.place("b", torch.uint8, (4,)), fill.seal):
        with pytest.raises(Bug):
            use()
    fill.release()  # of a sealed lease: nothing is left to give back
    assert ring.free == 0
    read.release()
    for use in (lambda: read.tensors, lambda: read.event, read.wait, read.share, read.release):
        with pytest.raises(Bug):
            use()
    assert ring.free == 1


def test_the_last_share_frees_the_slot() -> None:
    ring = Ring(1, 64)
    fill = leased(ring)
    fill.place("a", torch.uint8, (8,)).copy_(torch.arange(8))
    whole = fill.seal()
    shares = [whole.share() for _ in range(3)]
    whole.release()
    for share in shares:
        assert ring.free == 0
        assert share.tensors["a"].tolist() == list(range(8))
        share.release()
    assert ring.free == 1


def test_a_slot_cools_until_its_copy_is_done() -> None:
    ring, event = Ring(1, 64), FakeEvent()
    source = torch.ones(4)
    read = leased(ring).seal(event, (source,))
    read.release()  # dropped before the copy was done
    assert ring.lease() is None
    event.fired = True
    lease = ring.lease()
    assert lease is not None
    lease.release()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_forgotten_lease_warns_and_comes_back(sealed: bool) -> None:
    ring = Ring(1, 64)
    lease: FillLease | ReadLease = leased(ring)
    if isinstance(lease, FillLease) and sealed:
        lease = lease.seal()
    with pytest.warns(ResourceWarning, match=type(lease).__name__):
        del lease
    assert ring.free == 1


def test_slots_are_conserved_across_threads() -> None:
    """Leases are made here and released elsewhere, as a stage loop and its courier do."""
    ring, rng = Ring(8, 256), random.Random(3)
    handed: list[ReadLease] = []
    ready = threading.Semaphore(0)
    total = 2000

    def courier() -> None:
        for _ in range(total):
            ready.acquire()
            lease = handed.pop(0)
            assert lease.tensors["n"].unique().numel() == 1, "overwritten while leased"
            lease.release()

    thread = threading.Thread(target=courier)
    thread.start()
    sent = 0
    while sent < total:
        fill = ring.lease()
        if fill is None:
            continue
        fill.place("n", torch.uint8, (64,)).fill_(rng.randrange(256))
        lease = fill.seal()
        shares = [lease.share() for _ in range(min(rng.randrange(4), total - sent - 1))]
        for each in (lease, *shares):
            handed.append(each)
            ready.release()
            sent += 1
    thread.join()
    assert ring.free == 8


def test_a_ring_of_nothing() -> None:
    with pytest.raises(ValueError, match="not a ring"):
        Ring(0, 64)
