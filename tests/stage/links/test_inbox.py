"""The inbox against a model of itself: every order of arrival, repeats, gaps, early and late
chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice, pairwise, permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import Bug, WireError
from stretto.stage.links.inbox import Gap, Inbox, Inboxes, Pushed, Unannounced
from stretto.transport import wire
from stretto.transport.contract import Chunk
from stretto.types import Mark, RequestId, Span

R = RequestId("r-1")


@dataclass
class Slots:
    """Counts chunks that were made and not released: stands for the credits of a link."""

    num_leased: int = 0
    seen: list[Chunk] = field(default_factory=list)

    def chunk(self, span: Span, mark: Mark, *, seq: int, request: RequestId = R) -> Chunk:
        self.num_leased += 1
        rows = torch.arange(span.start, span.stop, dtype=torch.int32)
        return wire.chunk(
            request, span, mark, {"rows": rows} if len(span) else {}, seq=seq, lease=_Slot(self)
        )


@dataclass
class _Slot:
    slots: Slots

    def release(self) -> None:
        self.slots.num_leased -= 1


Key = tuple[int, Span, Mark]  # seq, span, mark


def stream(sizes: list[int], total: int) -> list[Key]:
    """A whole request of so many rows, in chunks of `sizes` (again and again)."""
    stops = [stop for stop in accumulate(islice(cycle(sizes), total)) if stop < total]
    spans = [Span(start, stop) for start, stop in pairwise([0, *stops, total])]
    marks = [Mark.MORE] * (len(spans) - 1) + [Mark.REQUEST_END]
    return [(seq, span, mark) for seq, (span, mark) in enumerate(zip(spans, marks, strict=True))]


def expected(sent: list[Key], arrival: list[int]) -> list[int] | None:
    """Which of `sent` are taken when they arrive in this order (indices, with repeats); None if a
    gap shows up."""
    taken: list[int] = []
    for index in arrival:
        if index == len(taken):
            taken.append(index)
        elif index > len(taken):
            return None
    return taken


def drain(inbox: Inbox) -> list[Key]:
    out: list[Key] = []
    while (chunk := inbox.pop()) is not None:
        header = chunk.header
        if len(header.span):
            assert chunk.tensors["rows"].tolist() == list(range(header.start, header.stop))
        out.append((header.seq, header.span, header.mark))
        chunk.release()
    return out


def deliver(sent: list[Key], arrival: list[int]) -> tuple[list[Key] | None, Slots]:
    slots, inbox = Slots(), Inbox(R)
    try:
        for index in arrival:
            seq, span, mark = sent[index]
            inbox.push(slots.chunk(span, mark, seq=seq))
    except Gap:
        inbox.drop()
        return None, slots
    return drain(inbox), slots


@pytest.mark.parametrize("total", [0, 1, 4, 5, 8])
@pytest.mark.parametrize("sizes", [[1, 2], [2], [1, 2, 4]], ids=str)
def test_every_arrival_order(sizes: list[int], total: int) -> None:
    sent = stream(sizes, total)
    for arrival in permutations(range(len(sent))):
        order = expected(sent, list(arrival))
        got, slots = deliver(sent, list(arrival))
        assert got == (None if order is None else [sent[i] for i in order]), arrival
        assert slots.num_leased == 0


@pytest.mark.parametrize("total", [3, 5])
def test_every_repeat_and_loss(total: int) -> None:
    """All sequences of up to five arrivals out of the request's chunks, so also every loss and
    every repeat."""
    sent = stream([1, 2], total)
    for length in range(6):
        for arrival in product(range(len(sent)), repeat=length):
            order = expected(sent, list(arrival))
            got, slots = deliver(sent, list(arrival))
            assert got == (None if order is None else [sent[i] for i in order]), arrival
            assert slots.num_leased == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_a_whole_request_arrives_whole(data: st.DataObject) -> None:
    """In order with repeats thrown in, announced at any time: all is there once, in order, with one
    end, last."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sent = stream(sizes, data.draw(st.integers(0, 30)))
    announced_at = data.draw(st.integers(0, len(sent)))
    slots, inboxes = Slots(), Inboxes()
    for index, (seq, span, mark) in enumerate(sent):
        if index == announced_at:
            inboxes.announce(R)
        again = data.draw(st.integers(0, index))
        inboxes.push(slots.chunk(span, mark, seq=seq))
        if index >= announced_at:
            old = sent[again]
            assert inboxes.push(slots.chunk(old[1], old[2], seq=old[0])) is Pushed.REPEAT
    if announced_at == len(sent):
        inboxes.announce(R)
    assert inboxes[R].ended
    got = drain(inboxes[R])
    assert got == sent
    assert [key[2] for key in got].count(Mark.REQUEST_END) == 1
    assert got[-1][2] is Mark.REQUEST_END
    assert slots.num_leased == 0
    assert inboxes.num_early == 0


@pytest.mark.parametrize(
    ("span", "mark", "seq"),
    [
        (Span(0, 3), Mark.MORE, 0),  # the first chunk again, but longer
        (Span(0, 2), Mark.REQUEST_END, 0),  # again, but with an end
        (Span(2, 5), Mark.MORE, 1),  # a repeat of the last, but longer
        (Span(4, 5), Mark.MORE, 3),  # a number is missing
        (Span(5, 6), Mark.MORE, 2),  # a row is missing
        (Span(3, 6), Mark.MORE, 2),  # a row twice
    ],
)
def test_what_does_not_follow_is_a_gap(span: Span, mark: Mark, seq: int) -> None:
    slots, inbox = Slots(), Inbox(R)
    inbox.push(slots.chunk(Span(0, 2), Mark.MORE, seq=0))
    inbox.push(slots.chunk(Span(2, 4), Mark.MORE, seq=1))
    with pytest.raises(Gap, match=R) as caught:
        inbox.push(slots.chunk(span, mark, seq=seq))
    assert isinstance(caught.value, WireError)
    assert slots.num_leased == 2
    assert [key[0] for key in drain(inbox)] == [0, 1], "what was accepted before is untouched"


def test_nothing_follows_the_end() -> None:
    slots, inbox = Slots(), Inbox(R)
    inbox.push(slots.chunk(Span(0, 1), Mark.REQUEST_END, seq=0))
    assert inbox.push(slots.chunk(Span(0, 1), Mark.REQUEST_END, seq=0)) is Pushed.REPEAT
    with pytest.raises(Gap):
        inbox.push(slots.chunk(Span(1, 1), Mark.REQUEST_END, seq=1))
    assert len(drain(inbox)) == 1


def test_early_chunks_are_bounded() -> None:
    slots = Slots()
    inboxes = Inboxes(early_chunks=3, early_bytes=1 << 20)
    for seq in range(3):
        assert inboxes.push(slots.chunk(Span(seq, seq + 1), Mark.MORE, seq=seq)) is Pushed.EARLY
    with pytest.raises(Unannounced, match="r-2") as caught:
        inboxes.push(slots.chunk(Span(0, 1), Mark.MORE, seq=0, request=RequestId("r-2")))
    assert caught.value.request == "r-2"
    assert slots.num_leased == 3
    assert [key[0] for key in drain(inboxes.announce(R))] == [0, 1, 2]
    assert (
        inboxes.push(slots.chunk(Span(0, 1), Mark.MORE, seq=0, request=RequestId("r-2")))
        is Pushed.EARLY
    )
    inboxes.forget(RequestId("r-2"))
    assert (slots.num_leased, inboxes.num_early) == (0, 0)


def test_early_bytes_are_bounded() -> None:
    slots = Slots()
    inboxes = Inboxes(early_chunks=100, early_bytes=40)
    inboxes.push(slots.chunk(Span(0, 8), Mark.MORE, seq=0))  # 32 bytes
    with pytest.raises(Unannounced):
        inboxes.push(slots.chunk(Span(8, 11), Mark.MORE, seq=1))  # 12 more
    inboxes.push(slots.chunk(Span(8, 10), Mark.MORE, seq=1))
    inboxes.forget(R)
    assert slots.num_leased == 0


def test_a_gap_among_early_chunks_shows_at_the_announcement() -> None:
    slots, inboxes = Slots(), Inboxes()
    for seq in (0, 2, 3):
        inboxes.push(slots.chunk(Span(seq, seq + 1), Mark.MORE, seq=seq))
    with pytest.raises(Gap):
        inboxes.announce(R)
    inboxes.forget(R)
    assert (slots.num_leased, inboxes.num_early) == (0, 0)


def test_a_forgotten_request_stays_forgotten() -> None:
    slots, inboxes = Slots(), Inboxes()
    inboxes.announce(R)
    inboxes.push(slots.chunk(Span(0, 1), Mark.MORE, seq=0))
    inboxes.forget(R)
    assert R not in inboxes
    assert inboxes.push(slots.chunk(Span(1, 2), Mark.MORE, seq=1)) is Pushed.LATE
    assert inboxes.counts[Pushed.LATE] == 1
    assert slots.num_leased == 0
    with pytest.raises(Bug):
        inboxes.announce(RequestId("r-2")) and inboxes.announce(RequestId("r-2"))
