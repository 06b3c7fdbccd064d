"""cut(): the spans tile the segment, one end mark, last, for every arrival order and every end."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import Invalid
from stretto.stage.payload.chunker import ChunkPolicy, cut
from stretto.types import Mark, Span

POLICIES = [
    ChunkPolicy(first, each, ramp, limit)
    for first, each, ramp in product((1, 2, 3), (3, 4), (None, 2, 3))
    for limit in (None, each, 2 * each)
]


def run(policy: ChunkPolicy, arrivals: list[int], mark: Mark, mark_late: bool) -> list[tuple[Span, Mark]]:
    """The segment as a stage would send it: rows become ready in steps, the end comes with the last or after it."""
    out: list[tuple[Span, Mark]] = []
    steps = [(ready, Mark.MORE) for ready in arrivals]
    if mark_late:
        steps.append((arrivals[-1] if arrivals else 0, mark))
    else:
        steps = [*steps[:-1], (arrivals[-1] if arrivals else 0, mark)]
    sent = 0
    for ready, how in steps:
        chunks = cut(policy, sent, ready, how)
        out += chunks
        sent = chunks[-1][0].stop if chunks else sent
    return out


def sizes(policy: ChunkPolicy, total: int) -> list[int]:
    """What the policy says, row by row: an oracle that shares nothing with `boundary`."""
    out: list[int] = []
    size = policy.first
    while total > 0:
        out.append(min(size, total))
        total -= size
        size = policy.each if policy.ramp is None else min(policy.each, size * policy.ramp)
    return out


def check_tiling(chunks: list[tuple[Span, Mark]], total: int, mark: Mark) -> None:
    spans = [span for span, _ in chunks]
    assert spans[0].start == 0
    assert spans[-1].stop == total
    assert all(left.stop == right.start for left, right in pairwise(spans))
    assert [how for _, how in chunks] == [Mark.MORE] * (len(chunks) - 1) + [mark]
    assert all(len(span) for span in spans[:-1]), "only the last chunk may be empty"


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_arrival_order(policy: ChunkPolicy) -> None:
    for total in range(8):
        for subset in range(2 ** max(total - 1, 0)):  # each way in which `total` rows can arrive
            arrivals = [i for i in range(1, total) if subset >> (i - 1) & 1] + ([total] if total else [])
            for mark, late in product((Mark.SEGMENT_END, Mark.REQUEST_END), (False, True)):
                chunks = run(policy, arrivals, mark, late)
                check_tiling(chunks, total, mark)
                if policy.limit is None or policy.limit == policy.each == policy.first:
                    got = [len(span) for span, _ in chunks if len(span)]
                    assert got == sizes(policy, total), "sizes do not depend on the arrival"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(1, 40),
    st.integers(0, 60),
    st.sampled_from([None, 2, 3, 7]),
    st.data(),
    st.booleans(),
    st.booleans(),
)
def test_long_segments(first: int, more: int, ramp: int | None, data: st.DataObject, limited: bool, late: bool) -> None:
    each = first + more
    policy = ChunkPolicy(first, each, ramp, data.draw(st.integers(each, 3 * each)) if limited else None)
    arrivals = sorted(data.draw(st.lists(st.integers(0, 500), max_size=20)))
    total = arrivals[-1] if arrivals else 0
    chunks = run(policy, arrivals, Mark.REQUEST_END, late)
    check_tiling(chunks, total, Mark.REQUEST_END)
    lengths = [len(span) for span, _ in chunks if len(span)]
    if policy.limit is None:
        assert lengths == sizes(policy, total)
    else:
        assert max(lengths, default=0) <= policy.limit
        assert all(span.stop >= policy.boundary(span.start) for span, _ in chunks[:-1])


def test_ends() -> None:
    policy = ChunkPolicy(first=2, each=4)
    assert cut(policy, 0, 1, Mark.MORE) == []
    assert cut(policy, 0, 2, Mark.MORE) == [(Span(0, 2), Mark.MORE)]
    assert cut(policy, 2, 6, Mark.REQUEST_END) == [(Span(2, 6), Mark.REQUEST_END)]  # on a boundary, with rows
    assert cut(policy, 6, 6, Mark.REQUEST_END) == [(Span(6, 6), Mark.REQUEST_END)]  # on a boundary, rows gone
    assert cut(policy, 0, 0, Mark.SEGMENT_END) == [(Span(0, 0), Mark.SEGMENT_END)]  # nothing at all
    assert cut(policy, 0, 1, Mark.SEGMENT_END) == [(Span(0, 1), Mark.SEGMENT_END)]  # a single row
    assert cut(policy, 2, 7, Mark.SEGMENT_END) == [(Span(2, 6), Mark.MORE), (Span(6, 7), Mark.SEGMENT_END)]


def test_ramp() -> None:
    policy = ChunkPolicy(first=1, each=8, ramp=2)
    assert [len(span) for span, _ in cut(policy, 0, 40, Mark.MORE)] == [1, 2, 4, 8, 8, 8, 8]
    assert [policy.boundary(sent) for sent in (0, 1, 2, 3, 7, 14, 15, 22, 23)] == [1, 3, 3, 7, 15, 15, 23, 23, 31]


def test_backlog_goes_together() -> None:
    policy = ChunkPolicy(first=1, each=1, limit=1024)
    assert [len(span) for span, _ in cut(policy, 0, 2500, Mark.MORE)] == [1024, 1024, 452]
    assert cut(policy, 2500, 2501, Mark.MORE) == [(Span(2500, 2501), Mark.MORE)]


@pytest.mark.parametrize("bad", [{"first": 0}, {"first": 3, "each": 2}, {"ramp": 1}, {"each": 4, "limit": 3}])
def test_policies_that_make_no_sense(bad: dict[str, int]) -> None:
    with pytest.raises(Invalid) as caught:
        ChunkPolicy(**bad)
    assert caught.value.param in bad


def test_more_sent_than_ready() -> None:
    with pytest.raises(ValueError, match="sent 3"):
        cut(ChunkPolicy(), 3, 2, Mark.MORE)
