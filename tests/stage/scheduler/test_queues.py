from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from stretto.stage.request import RequestSpec, StageRequest
from stretto.stage.scheduler.queues import aged_first, next_waiting, split
from stretto.types import RequestId


def request(arrival: int, since: int = 0, priority: int = 0) -> StageRequest:
    made = StageRequest(
        RequestSpec(RequestId(str(arrival)), 1, priority=priority), arrival, since=since
    )
    made.refresh_order(2)
    return made


@given(
    st.integers(1, 600), st.lists(st.integers(1, 400), min_size=1, max_size=12), st.integers(1, 64)
)
def test_split_wastes_nothing_and_starves_nobody_first(
    budget: int, wants: list[int], least: int
) -> None:
    shares = split(budget, wants, least)
    assert all(0 <= share <= want for share, want in zip(shares, wants))
    assert sum(shares) == min(budget, sum(wants))
    assert shares[0] >= 1
    assert shares[0] == wants[0] or shares[0] >= min(budget // 2, budget)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    assert split(512, [100_000, 50], 64) == [462, 50]
    assert split(512, [100_000, 100_000], 64) == [256, 256]
    assert split(512, [300, 300], 64) == [256, 256]
    assert split(100, [100_000, 100_000], 64) == [64, 36]
    assert split(512, [100] * 6, 64) == [100, 100, 100, 100, 64, 48]


def test_the_head_is_the_most_urgent_until_someone_has_waited_too_long() -> None:
    assert next_waiting([], 0, 5) is None
    old, low, urgent = (
        request(0, since=3, priority=2),
        request(1, since=0, priority=1),
        request(2, since=4),
    )
    waiting = [old, low, urgent]
    assert next_waiting(waiting, 5, 5) is urgent
    assert next_waiting(waiting, 6, 5) is low
    waiting.remove(low)
    assert next_waiting(waiting, 6, 5) is urgent
    assert next_waiting(waiting, 9, 5) is old


def test_the_longest_left_out_go_first() -> None:
    requests = [request(0, since=9), request(1, since=2), request(2, since=8), request(3, since=1)]
    assert aged_first(requests, 10, 9) == (requests, 0)
    ordered, aged = aged_first(requests, 10, 5)
    assert [r.arrival for r in ordered] == [3, 1, 0, 2]
    assert aged == 2
