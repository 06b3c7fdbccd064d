"""The outbox: rows leave once, in order, in chunks that fit a slot; what finds no room waits, and
nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import Bug
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.models.speech.payloads import CodecFrames
from stretto.stage.links.inbox import Inbox
from stretto.stage.links.outbox import Outbox
from stretto.stage.payload import unpack
from stretto.transport import wire
from stretto.transport.contract import Chunk
from stretto.types import Mark, RequestId, Span

R = RequestId("r-1")
CODEBOOKS = 3
SLOT = 4096


def frames(span: Span) -> CodecFrames:
    """Codes that say where they belong."""
    rows = torch.arange(span.start, span.stop, dtype=torch.int32)[:, None]
    return CodecFrames(span, rows * 100 + torch.arange(CODEBOOKS, dtype=torch.int32))


class Courier:
    """Takes chunks as a courier would: some now, some only later, each sent over the wire
    format."""

    def __init__(self, room: Callable[[], bool] = lambda: True) -> None:
        self.room = room
        self.chunks: list[Chunk] = []

    def offer(self, chunk: Chunk) -> bool:
        if not self.room():
            return False
        self.chunks.append(wire.decode(wire.encode(chunk)))
        chunk.release()
        return True


class RecordingCourier(Courier):
    """Keeps chunks as they are."""

    def offer(self, chunk: Chunk) -> bool:
        self.chunks.append(chunk)
        return True


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_rows_leave_once_in_order(data: st.DataObject) -> None:
    room = data.draw(st.lists(st.booleans(), max_size=30))
    slot = data.draw(st.sampled_from([300, 400, SLOT]))  # for some 4, 12 and all of the rows below
    courier = Courier(lambda: room.pop() if room else True)
    outbox = Outbox(R)
    total = data.draw(st.integers(0, 60))
    while outbox.sent < total:
        span = Span(outbox.sent, data.draw(st.integers(outbox.sent + 1, total)))
        outbox.add(frames(span), slot)
        outbox.flush(courier)
        assert outbox.sent == span.stop
    outbox.add(None, slot, Mark.REQUEST_END)
    while not outbox.flush(courier):
        pass
    assert outbox.waiting == 0
    inbox, got = Inbox(R), [torch.empty(0, CODEBOOKS, dtype=torch.int32)]
    for chunk in courier.chunks:
        assert wire.encoded_size(chunk) <= slot
        inbox.push(chunk)
        payload = unpack(CodecFrames, chunk)
        if payload is not None:
            got.append(payload.codes)
    assert inbox.ended
    assert torch.equal(torch.cat(got), frames(Span(0, total)).codes)


def test_rows_that_fit_a_slot_are_one_chunk_and_are_not_copied() -> None:
    outbox, courier = Outbox(R), RecordingCourier()
    rows = frames(Span(0, 4))
    outbox.add(rows, SLOT, Mark.REQUEST_END)
    assert outbox.flush(courier)
    (chunk,) = courier.chunks
    assert (chunk.header.span, chunk.header.mark) == (Span(0, 4), Mark.REQUEST_END)
    assert chunk.tensors["codes"] is rows.codes
    assert wire.encoded_size(chunk) < SLOT
    outbox = Outbox(R)
    outbox.add(rows, wire.encoded_size(chunk))
    assert outbox.waiting == 1, "a chunk may fill its slot exactly"


def test_only_the_last_part_of_cut_media_rows_carries_the_mark() -> None:
    """A prompt with an image: some rows carry a hidden vector, others only an id."""
    ids = torch.arange(400, dtype=torch.int32)
    media = (Span(10, 200), Span(300, 310))
    hidden = torch.arange(200, dtype=torch.float32)[:, None].expand(200, 64).contiguous()
    courier, slot = Courier(), 1 << 14  # some 60 media rows
    outbox = Outbox(R)
    outbox.add(ThinkerRows(Span(0, 400), ids, media, hidden), slot, Mark.REQUEST_END)
    assert outbox.flush(courier)
    assert 4 <= len(courier.chunks) <= 8
    inbox, got = Inbox(R), []
    for chunk in courier.chunks:
        assert wire.encoded_size(chunk) <= slot
        inbox.push(chunk)
        part = unpack(ThinkerRows, chunk)
        assert part is not None
        got.append(part)
    assert [chunk.header.mark for chunk in courier.chunks] == [Mark.MORE] * (len(got) - 1) + [
        Mark.REQUEST_END
    ]
    assert inbox.stop == 400
    assert torch.equal(torch.cat([part.ids for part in got]), ids)
    assert [p for part in got for run in part.media for p in range(run.start, run.stop)] == [
        p for run in media for p in range(run.start, run.stop)
    ]
    assert torch.equal(torch.cat([part.hidden for part in got if part.media]), hidden)


def test_a_single_row_that_exceeds_a_slot_goes_on_as_it_is() -> None:
    """The connector refuses it and names the request."""
    outbox, courier = Outbox(R), Courier()
    outbox.add(CodecFrames(Span(0, 2), torch.zeros(2, SLOT, dtype=torch.int32)), SLOT)
    assert outbox.flush(courier)
    assert [chunk.header.span for chunk in courier.chunks] == [Span(0, 1), Span(1, 2)]


def test_every_part_carries_the_event_of_its_rows() -> None:
    event = object()
    outbox, courier = Outbox(R), RecordingCourier()
    outbox.add(frames(Span(0, 24)), 300, event=event)  # type: ignore[arg-type]
    assert outbox.flush(courier)
    assert len(courier.chunks) > 1
    assert all(chunk.event is event for chunk in courier.chunks)


def test_chunks_wait_for_a_link_that_is_not_laid() -> None:
    outbox = Outbox(R)
    outbox.add(frames(Span(0, 2)), SLOT)
    assert not outbox.flush(None)
    assert outbox.flush(Courier())


def test_dropping_a_request_drops_what_has_not_left() -> None:
    outbox = Outbox(R)
    outbox.add(frames(Span(0, 2)), SLOT)
    outbox.drop()
    assert outbox.waiting == 0
    with pytest.raises(Bug):
        outbox.add(frames(Span(2, 3)), SLOT)


def test_what_may_not_be_done() -> None:
    outbox = Outbox(R)
    with pytest.raises(Bug):
        outbox.add(frames(Span(1, 2)), SLOT)  # a hole
    outbox.add(None, SLOT, Mark.REQUEST_END)
    with pytest.raises(Bug):
        outbox.add(None, SLOT, Mark.REQUEST_END)  # a second end
    with pytest.raises(Bug):
        outbox.add(frames(Span(0, 1)), SLOT)
