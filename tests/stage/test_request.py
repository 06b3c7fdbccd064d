from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import given

from stretto.errors import Bug
from stretto.stage.request import (
    OPAQUE,
    TRANSITIONS,
    Cursor,
    Reason,
    RequestSpec,
    StageRequest,
    State,
)
from stretto.types import RequestId
from tests.stage.invariants import check_cursor


def request(prompt: list[int], **spec: object) -> StageRequest:
    made = StageRequest(RequestSpec(RequestId("r"), **{"max_new": 4, **spec}), arrival=0)  # type: ignore[arg-type]
    made.cursor.append(made.add_input(prompt, []))
    made.refresh_limit()
    return made


def positions(cursor: Cursor) -> tuple[int, ...]:
    return cursor.prompt, cursor.known, cursor.filled, cursor.launched, cursor.confirmed


@pytest.mark.parametrize(("before", "after"), list(product(State, State)))
def test_only_listed_transitions_happen(before: State, after: State) -> None:
    made = request([1])
    made.state = before
    if after in TRANSITIONS[before]:
        made.move_to(after, 7)
        assert (made.state, made.since) == (after, 7)
    else:
        with pytest.raises(Bug):
            made.move_to(after, 7)
        assert (made.state, made.since) == (before, 0)


def test_what_is_done_stays_so() -> None:
    assert not TRANSITIONS[State.DONE]


def test_overlapped_decode_and_a_stop_seen_one_step_late() -> None:
    cursor = Cursor()
    cursor.append(3)
    cursor.launch(3, samples=True)  # the prompt; token 3 is on the device
    cursor.launch(4, samples=True)  # one step ahead, with a placeholder
    assert positions(cursor) == (3, 5, 4, 4, 0)
    cursor.confirm(3)
    assert positions(cursor) == (3, 5, 4, 4, 3)


def test_what_is_in_flight_can_be_recalled() -> None:
    cursor = Cursor(prompt=9, known=9, filled=8, launched=8, confirmed=5)
    cursor.recall()
    assert positions(cursor) == (9, 9, 5, 5, 5)
    cursor.vacate(2)
    cursor.recall()
    assert positions(cursor) == (9, 9, 2, 5, 5), "lost rows are not found again"


def test_lost_kv_takes_nothing_back() -> None:
    cursor = Cursor(prompt=3, known=7, filled=6, launched=6, confirmed=5)
    cursor.vacate()
    assert positions(cursor) == (3, 7, 0, 6, 5)
    cursor.confirm(6)  # the step in flight stands
    cursor.launch(4, samples=False)
    assert positions(cursor) == (3, 7, 4, 6, 6)
    cursor.launch(7, samples=True)
    assert positions(cursor) == (3, 8, 7, 7, 6)


def test_a_reuse_that_was_not_reported_can_be_undone() -> None:
    cursor = Cursor(prompt=9, known=9, filled=0, launched=2, confirmed=2)
    cursor.reuse(8)
    assert positions(cursor) == (9, 9, 8, 8, 8)
    cursor.vacate()
    cursor.disown(2)
    assert positions(cursor) == (9, 9, 0, 2, 2)


def test_what_must_not_happen_raises_and_moves_nothing() -> None:
    cursor = Cursor(prompt=3, known=4, filled=3, launched=3, confirmed=2)
    before = positions(cursor)
    for wrong in (
        lambda: cursor.launch(3, False),  # nothing to compute
        lambda: cursor.launch(5, False),  # input unknown
        lambda: cursor.confirm(4),  # never launched
        lambda: cursor.append(1),  # the answer has begun
        lambda: cursor.reuse(2),  # has KV
    ):
        with pytest.raises(Bug):
            wrong()
        assert positions(cursor) == before


operations = st.lists(
    st.tuples(
        st.sampled_from(["append", "launch", "sample", "confirm", "vacate", "reuse", "recall"]),
        st.integers(0, 12),
    ),
    max_size=30,
)


@given(operations)
def test_the_watermarks_stay_in_order_whatever_is_tried(operations: list[tuple[str, int]]) -> None:
    cursor = Cursor()
    for name, n in operations:
        before = positions(cursor)
        try:
            match name:
                case "recall":
                    cursor.recall()
                case "append" | "reuse" | "vacate":
                    getattr(cursor, name)(n)
                case "launch":
                    cursor.launch(n, samples=False)
                case "sample":
                    cursor.launch(n, samples=True)
                case "confirm":
                    cursor.confirm(n)
        except Bug:
            assert positions(cursor) == before
        check_cursor(cursor)


def test_limits_of_an_open_a_closed_and_a_paced_request() -> None:
    made = request([1, 2, 3])
    assert (made.limit, made.starved) == (3, False)
    made.cursor.launch(3, samples=False)
    assert made.starved
    made.cursor.append(made.add_input([4], []))
    made.closed = True
    made.refresh_limit()
    assert (made.limit, made.starved) == (4 + 4 - 1, False)  # the fourth token is not fed back

    made = request([1, 2, 3], paced=True)
    made.closed = True
    made.refresh_limit()
    assert (made.limit, made.starved) == (3, False)
    made.cursor.launch(3, samples=True)
    assert made.starved
    made.num_step_inputs = 1
    made.refresh_limit()
    assert (made.limit, made.starved) == (4, False)
    made.step_inputs_ended = True
    made.refresh_limit()
    assert (made.limit, made.starved) == (6, False)
    made.blocked_downstream = True
    assert made.starved


def test_a_request_ends_by_id_or_length() -> None:
    made = request([1], stop_ids=frozenset({9}))
    assert [made.add_token(t) for t in (5, 9)] == [None, Reason.STOP]
    made = request([1])
    assert [made.add_token(t) for t in (5, 5, 5, 5)] == [None, None, None, Reason.LENGTH]
    assert made.ids[made.cursor.prompt :] == [5, 5, 5, 5]


def test_rows_without_ids_end_what_can_be_keyed() -> None:
    made = request([1, 2])
    made.add_input([3, OPAQUE, 4], [])
    assert made.keyable == 3
    made.add_input([5], [])
    made.add_token(6)
    assert made.keyable == 3

    made = request([1, 2], cache_output=False)
    made.add_token(6)
    assert made.keyable == 2


def test_order_is_priority_then_first_packets_then_deadline_then_arrival() -> None:
    def ordered(
        arrival: int, priority: int = 0, deadline: float | None = None, preempted: int = 0
    ) -> StageRequest:
        spec = RequestSpec(RequestId(str(arrival)), max_new=1, priority=priority)
        made = StageRequest(spec, arrival, deadline=deadline, num_preemptions=preempted)
        made.refresh_order(max_preemptions=2)
        return made

    expected = [
        ordered(8, priority=5, deadline=9.0, preempted=3),  # preempted too often: before all
        ordered(4),  # first packet, by arrival
        ordered(6),
        ordered(7, deadline=1.0),
        ordered(2, deadline=2.0, preempted=2),
        ordered(3, deadline=2.0),
        ordered(1, priority=1),
        ordered(0, priority=1, deadline=0.5),
    ]
    assert sorted(expected, key=lambda r: r.order) == expected
