"""The outbox: what was added and confirmed leaves once, in order; surplus never leaves; nothing stays leased."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.connector import wire
from stretto.connector.contract import Chunk
from stretto.connector.courier import Parcel
from stretto.errors import Bug
from stretto.models.qwen3_omni.payloads import CodecFrames
from stretto.stage.inbox import Inbox
from stretto.stage.outbox import Outbox, Outboxes
from stretto.stage.payload.chunker import ChunkPolicy, Confirmed
from stretto.stage.payload.ring import ReadLease, Ring
from stretto.stage.payload.schema import unpack
from stretto.types import Mark, RequestId, Span

R = RequestId("r-1")
CODEBOOKS = 3


def frames(segment: int, span: Span) -> torch.Tensor:
    """Codes that say where they belong."""
    rows = torch.arange(span.start, span.stop, dtype=torch.int32)[:, None]
    return (rows * 100 + segment * 10 + torch.arange(CODEBOOKS, dtype=torch.int32)).to(torch.int32)


class Courier:
    """Takes parcels as a courier would: some now, some only later, each sent over the wire format."""

    def __init__(self, room: Callable[[], bool] = lambda: True) -> None:
        self.room = room
        self.chunks: list[Chunk] = []

    def offer(self, parcel: Parcel) -> bool:
        if not self.room():
            return False
        chunk = parcel.pack()
        self.chunks.append(wire.decode(wire.encode(chunk)))
        chunk.release()
        return True


def in_ring(ring: Ring, segment: int, span: Span) -> ReadLease:
    lease = ring.lease()
    assert lease is not None
    lease.place("codes", torch.int32, (len(span), CODEBOOKS)).copy_(frames(segment, span))
    return lease.seal()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_rows_leave_once_in_order(data: st.DataObject) -> None:
    policy = ChunkPolicy(data.draw(st.integers(1, 3)), 4, data.draw(st.sampled_from([None, 2])))
    room = data.draw(st.lists(st.booleans(), max_size=30))
    courier = Courier(lambda: room.pop() if room else True)
    ring = Ring(64, 4096)
    outbox = Outbox(CodecFrames, R, policy, courier.offer)
    totals = data.draw(st.lists(st.integers(0, 14), min_size=1, max_size=3))
    for segment, total in enumerate(totals):
        surplus = data.draw(st.integers(0, 2))
        confirmed = 0
        while outbox.added < total + surplus:  # steps run ahead of what is confirmed
            span = Span(outbox.added, min(total + surplus, outbox.added + data.draw(st.integers(1, 5))))
            lease = in_ring(ring, segment, span)
            outbox.add(CodecFrames(span, lease.tensors["codes"]), lease=lease)
            confirmed = data.draw(st.integers(confirmed, min(total, outbox.added)))
            outbox.send(Confirmed(confirmed))
            assert outbox.sent <= confirmed
        last = segment == len(totals) - 1
        outbox.send(Confirmed(total), Mark.REQUEST_END if last else Mark.SEGMENT_END)
    while not outbox.flush():
        pass
    assert ring.free == 64
    inbox, got = (
        Inbox(R),
        {segment: [torch.empty(0, CODEBOOKS, dtype=torch.int32)] for segment in range(len(totals))},
    )
    for chunk in courier.chunks:
        inbox.push(chunk)
        payload = unpack(CodecFrames, chunk)
        if payload is not None:
            got[chunk.header.segment].append(payload.codes)
    assert inbox.ended
    for segment, total in enumerate(totals):
        assert torch.equal(torch.cat(got[segment]), frames(segment, Span(0, total)))


def test_one_piece_is_passed_on_as_it_lies() -> None:
    ring = Ring(1, 4096)
    parcels: list[Parcel] = []
    outbox = Outbox(CodecFrames, R, ChunkPolicy(2, 2), lambda parcel: parcels.append(parcel) or True)
    lease = in_ring(ring, 0, Span(0, 4))
    memory = lease.tensors["codes"]
    outbox.add(CodecFrames(Span(0, 4), memory), lease=lease)
    outbox.send(Confirmed(4))
    first, second = (parcel.pack() for parcel in parcels)
    assert first.tensors["codes"].data_ptr() == memory.data_ptr(), "a view, not a copy"
    first.release()
    assert ring.free == 0, "the other slice keeps the slot"
    second.release()
    assert ring.free == 1


def test_several_pieces_free_their_slots_when_packed() -> None:
    ring = Ring(2, 4096)
    parcels: list[Parcel] = []
    outbox = Outbox(CodecFrames, R, ChunkPolicy(4, 4), lambda parcel: parcels.append(parcel) or True)
    for span in (Span(0, 2), Span(2, 4)):
        lease = in_ring(ring, 0, span)
        outbox.add(CodecFrames(span, lease.tensors["codes"]), lease=lease)
    outbox.send(Confirmed(4))
    assert ring.free == 0
    chunk = parcels[0].pack()
    assert ring.free == 2
    assert torch.equal(chunk.tensors["codes"], frames(0, Span(0, 4)))


def test_an_interruption_drops_what_has_not_left() -> None:
    ring, courier = Ring(4, 4096), Courier(lambda: False)
    outbox = Outbox(CodecFrames, R, ChunkPolicy(1, 1), courier.offer)
    lease = in_ring(ring, 0, Span(0, 3))
    outbox.add(CodecFrames(Span(0, 3), lease.tensors["codes"]), lease=lease)
    assert not outbox.send(Confirmed(2))
    assert outbox.waiting == 2
    outbox.interrupt(epoch=1, segment=1)
    assert (ring.free, outbox.waiting, outbox.sent, outbox.added) == (4, 0, 0, 0)
    courier.room = lambda: True
    outbox.add(CodecFrames(Span(0, 1), frames(1, Span(0, 1))))
    outbox.send(Confirmed(1), Mark.REQUEST_END)
    header = courier.chunks[0].header
    assert (header.epoch, header.segment, header.seq, header.mark) == (1, 1, 0, Mark.REQUEST_END)


def test_dropping_a_request_gives_everything_back() -> None:
    ring = Ring(4, 4096)
    outbox = Outbox(CodecFrames, R, ChunkPolicy(1, 1), lambda _: False)
    for row in range(3):
        lease = in_ring(ring, 0, Span(row, row + 1))
        outbox.add(CodecFrames(Span(row, row + 1), lease.tensors["codes"]), lease=lease)
    outbox.send(Confirmed(2))
    outbox.drop()
    assert (ring.free, outbox.waiting) == (4, 0)


def test_a_segment_that_starts_late_in_the_sequence() -> None:
    courier = Courier()
    outbox = Outbox(CodecFrames, R, ChunkPolicy(1, 4), courier.offer, origin=100)
    outbox.add(CodecFrames(Span(0, 2), frames(0, Span(0, 2))))
    outbox.send(Confirmed(101))
    assert [chunk.header.span for chunk in courier.chunks] == [Span(0, 1)]


def test_what_may_not_be_done() -> None:
    outbox = Outbox(CodecFrames, R, ChunkPolicy(1, 1), lambda _: True)
    with pytest.raises(Bug):
        outbox.send(Confirmed(1))  # confirmed, but never added
    with pytest.raises(Bug):
        outbox.add(CodecFrames(Span(1, 2), frames(0, Span(1, 2))))  # a hole
    outbox.send(Confirmed(0), Mark.REQUEST_END)
    with pytest.raises(Bug):
        outbox.send(Confirmed(0), Mark.REQUEST_END)  # a second end
    with pytest.raises(Bug):
        outbox.add(CodecFrames(Span(0, 1), frames(0, Span(0, 1))))


def test_a_resting_request_gives_its_slots_back_when_asked() -> None:
    """Rows below the next boundary would hold their batch's slot for as long as the request rests."""
    ring, courier = Ring(4, 4096), Courier()
    boxes = Outboxes(CodecFrames, ChunkPolicy(4, 4), courier.offer)
    box, other = boxes.open(R), boxes.open(RequestId("r-2"))
    for step in range(3):
        lease = in_ring(ring, 0, Span(step, step + 1))
        for each in (box, other):
            each.add(CodecFrames(Span(step, step + 1), lease.tensors["codes"]), lease=lease.share())
            each.send(Confirmed(step + 1))
        lease.release()
    assert ring.free == 1
    boxes.settle()
    assert ring.free == 4
    for lease in [in_ring(ring, 0, Span(3, 4)) for _ in range(4)]:  # others use the slots
        lease.tensors["codes"].fill_(-1)
        lease.release()
    box.send(Confirmed(3), Mark.REQUEST_END)
    assert torch.equal(courier.chunks[0].tensors["codes"], frames(0, Span(0, 3)))
    boxes.forget(R)
    boxes.forget(RequestId("r-2"))
    assert R not in boxes
    with pytest.raises(Bug):
        box.send(Confirmed(3))


def test_chunks_without_room_can_leave_the_ring_too() -> None:
    ring, courier = Ring(2, 4096), Courier(lambda: False)
    boxes = Outboxes(CodecFrames, ChunkPolicy(1, 1), courier.offer)
    box = boxes.open(R)
    for row in range(2):
        lease = in_ring(ring, 0, Span(row, row + 1))
        box.add(CodecFrames(Span(row, row + 1), lease.tensors["codes"]), lease=lease)
    box.send(Confirmed(2))
    boxes.settle()
    assert (ring.free, box.waiting, boxes.flush()) == (2, 2, False)
    courier.room = lambda: True
    assert boxes.flush()
    assert torch.equal(torch.cat([chunk.tensors["codes"] for chunk in courier.chunks]), frames(0, Span(0, 2)))
