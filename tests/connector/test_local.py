"""The local connector beyond the contract suite: tensors pass untouched, and what both ends share stays in count."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch

from stretto.connector import wire
from stretto.connector.contract import (
    EVERY_EPOCH,
    WIRE_VERSION,
    Chunk,
    Endpoint,
    LinkClosed,
    LinkOptions,
    PeerDead,
    PutFailed,
    VersionMismatch,
)
from stretto.connector.local import LocalConnector, LocalReceiver, LocalSender
from stretto.errors import WireError
from stretto.types import Mark, RequestId, Span

R = RequestId("r-1")


class Lease:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def chunk(seq: int = 0, epoch: int = 0, request: RequestId = R) -> tuple[Chunk, Lease]:
    lease = Lease()
    tensors = {"n": torch.tensor([seq])}
    return wire.chunk(request, Span(seq, seq + 1), Mark.MORE, tensors, seq=seq, epoch=epoch, lease=lease), lease


def link(slots: int = 4, slot_bytes: int = 4096) -> tuple[LocalSender, LocalReceiver]:
    connector = LocalConnector()
    receiver = connector.listen("a-b", LinkOptions(slots=slots, slot_bytes=slot_bytes))
    return connector.connect(receiver.endpoint, LinkOptions()), receiver


def taken(receiver: LocalReceiver) -> Chunk:
    got = receiver.take(0)
    assert got is not None
    return got


def test_tensors_pass_untouched() -> None:
    sender, receiver = link()
    sent, lease = chunk()
    tensor = sent.tensors["n"]
    assert sender.put(sent, 0)
    got = taken(receiver)
    assert got.tensors["n"] is tensor
    assert lease.released == 0, "the receiver still reads it"
    got.release()
    got.release()
    assert lease.released == 1
    assert not got.tensors
    assert sender.credits() == 4


def test_credits_bound_what_is_on_its_way() -> None:
    sender, receiver = link(slots=2)
    assert sender.put(chunk(0)[0], 0)
    assert sender.put(chunk(1)[0], 0)
    late, lease = chunk(2)
    assert not sender.put(late, 0)
    assert lease.released == 0, "it is still the caller's"
    first = taken(receiver)
    assert not sender.put(late, 0), "taken is not released"
    first.release()
    assert sender.put(late, 0)
    assert [taken(receiver).header.seq for _ in range(2)] == [1, 2]


def test_an_arrival_wakes_the_loop() -> None:
    sender, receiver = link()
    woken: list[str] = []
    receiver.on_arrival(lambda: woken.append("!"))
    sender.put(chunk()[0], 0)
    sender.close()
    assert len(woken) == 2


def test_purge_returns_credits_at_once() -> None:
    sender, receiver = link(slots=3)
    leases = []
    for seq, (epoch, request) in enumerate([(0, R), (1, R), (0, RequestId("r-2"))]):
        made, lease = chunk(seq, epoch, request)
        leases.append(lease)
        sender.put(made, 0)
    receiver.purge(R, 1)
    assert [lease.released for lease in leases] == [1, 0, 0]
    assert sender.credits() == 1
    stale, lease = chunk(3, 0)
    assert sender.put(stale, 0), "swallowed"
    assert (lease.released, sender.credits()) == (1, 1)
    receiver.purge(R, EVERY_EPOCH)
    assert taken(receiver).header.request == "r-2"
    assert receiver.take(0) is None


def test_a_purge_frees_a_put_that_waits() -> None:
    sender, receiver = link(slots=1)
    sender.put(chunk(0, epoch=1)[0], 0)
    waiting, lease = chunk(1, epoch=0)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(sender.put(waiting, 60)))
    thread.start()
    sender.purge(R, 1)
    thread.join(20)
    assert results == [True]
    assert (lease.released, taken(receiver).header.seq, receiver.take(0)) == (1, 0, None)


def test_a_clean_close_lets_the_rest_be_taken() -> None:
    sender, receiver = link()
    sender.put(chunk(0)[0], 0)
    sender.close()
    assert taken(receiver).header.seq == 0
    for _ in range(2):
        with pytest.raises(LinkClosed):
            receiver.take(0)
    with pytest.raises(LinkClosed):
        sender.put(chunk(1)[0], 0)


def test_the_receiver_leaves() -> None:
    sender, receiver = link()
    first, lease = chunk(0)
    second, kept = chunk(1)
    sender.put(first, 0)
    sender.put(second, 0)
    held = taken(receiver)
    receiver.close()
    assert (lease.released, kept.released) == (0, 1), "what is held stays valid, what was not taken goes"
    for use in (sender.check, lambda: sender.put(chunk(2)[0], 0)):
        with pytest.raises(LinkClosed):
            use()
    held.release()
    assert lease.released == 1
    assert sender.credits() == 4


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_death_is_not_a_close(victim: str) -> None:
    sender, receiver = link()
    if victim == "sender":
        sender.die()
        with pytest.raises(PeerDead, match="a-b"):
            receiver.take(0)
        with pytest.raises(PeerDead):
            receiver.check()
    else:
        receiver.die()
        with pytest.raises(PeerDead, match="r-1") as caught:
            sender.put(chunk()[0], 0)
        assert caught.value.request == R
        with pytest.raises(PeerDead):
            sender.check()


def test_another_version_is_refused_on_both_sides() -> None:
    sender, receiver = link()
    made, lease = chunk()
    made.header = msgspec.structs.replace(made.header, version=WIRE_VERSION + 1)
    sender.put(made, 0)
    with pytest.raises(VersionMismatch) as caught:
        receiver.take(0)
    assert caught.value.request == R
    assert [refused.request for refused in sender.refusals()] == [R]
    assert sender.refusals() == []
    assert (lease.released, sender.credits()) == (1, 4)
    sender.put(chunk(1)[0], 0)
    assert taken(receiver).header.seq == 1, "the link lives on"


def test_a_chunk_larger_than_a_slot() -> None:
    sender, _ = link(slot_bytes=64)
    made, lease = chunk()
    with pytest.raises(PutFailed, match="r-1"):
        sender.put(made, 0)
    assert lease.released == 0


def test_only_the_invited_may_connect() -> None:
    connector = LocalConnector()
    receiver = connector.listen("a-b", LinkOptions(generation=3))
    endpoint = msgspec.msgpack.decode(msgspec.msgpack.encode(receiver.endpoint), type=Endpoint)  # as it travels
    for wrong in (msgspec.structs.replace(endpoint, generation=2), msgspec.structs.replace(endpoint, nonce="00")):
        with pytest.raises(WireError):
            connector.connect(wrong, LinkOptions())
    connector.connect(endpoint, LinkOptions())
    with pytest.raises(WireError):
        connector.connect(endpoint, LinkOptions())
    receiver.close()
    with pytest.raises(PeerDead):
        connector.connect(endpoint, LinkOptions())
