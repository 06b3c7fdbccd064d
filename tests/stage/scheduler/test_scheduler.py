"""The scheduler's behaviour, one promise per test. Streams are checked against the oracle by the
driver throughout; the tests add that what they are about really happened."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest

from stretto.errors import Bug, Busy, Gone, Invalid, TooLong
from stretto.stage.request import OPAQUE, Reason, RequestSpec, Salt, State
from stretto.stage.scheduler import Batch, Scheduler, SchedulerConfig, StepResult, prefix_keys
from stretto.types import RequestId, Span
from tests.stage.fakes import Driver
from tests.stage.pools import num_held

NEVER: frozenset[int] = frozenset()


def config(**changes: Any) -> SchedulerConfig:
    small = {
        "num_blocks": 64,
        "block_size": 4,
        "max_rows": 8,
        "max_step_tokens": 64,
        "prefill_chunk": 16,
        "least_share": 4,
        "max_context": 200,
        "patience": 8,
    }
    return SchedulerConfig(**{**small, **changes})


def spans(batch: Batch | None) -> dict[str, tuple[int, int]]:
    assert batch is not None
    return {span.request.id: (span.start, span.stop) for span in batch.spans}


def turn(driver: Driver) -> Batch | None:
    """One step, launched and retired."""
    batch = driver.launch()
    if batch is not None:
        driver.retire()
    return batch


def joins(driver: Driver, id: str) -> list[Any]:
    return [join for batch in driver.batches for join in batch.joined if join.request.id == id]


# -- the oracles


def workload(driver: Driver, seed: int = 0) -> dict[str, list[int]]:
    """Ragged arrivals with shared prefixes; late input for every third request, text by drips for
    every fourth."""
    rng = random.Random(seed)
    common = [rng.randint(1, 6) for _ in range(30)]
    todo = [
        (f"r{i}", common[: rng.randint(1, 30)] + [rng.randint(1, 6)] * rng.randint(0, 3))
        for i in range(14)
    ]
    while todo or driver.live:
        for _ in range(rng.randint(0, 2)):
            if todo and driver.scheduler.num_waiting < 8:
                id, rows = todo.pop()
                number = int(id[1:])
                driver.submit(
                    id, rows, max_new=5 + number, paced=number % 4 == 1, cache_output=False,
                    last_on_device=number % 2 == 1,
                    missing=[Span(1, 3), Span(5, 6)] if number % 3 == 0 and len(rows) > 6 else [],
                )  # fmt: skip
        for id, request in list(driver.live.items()):
            if driver.stories[id].missing and rng.random() < 0.1:
                driver.provide(id)
            if request.spec.paced and not request.step_inputs_ended:
                if request.num_step_inputs < 6:
                    driver.text(id, 1 + request.num_step_inputs)
                else:
                    driver.scheduler.append_step_inputs(RequestId(id), 0, last=True)
        if (driver.launch() is None or rng.random() < 0.4) and driver.flying:
            driver.retire()
    driver.drain()
    driver.check_idle()
    return {id: story.answer for id, story in driver.stories.items()}


def test_answers_do_not_depend_on_how_the_work_is_cut() -> None:
    reference = workload(
        Driver(config(overlap_depth=1, prefix_cache=False, prefill_chunk=200, max_step_tokens=999))
    )
    assert sum(map(len, reference.values())) > 60
    drivers = {
        "depth 2": Driver(config(overlap_depth=2)),
        "depth 3": Driver(config(overlap_depth=3)),
        "chunked": Driver(config(prefill_chunk=3, max_step_tokens=11, least_share=1)),
        "alone": Driver(config(max_rows=1, max_waiting=16)),
        "preempted": Driver(config(num_blocks=13, max_waiting=16)),
        "preempted, cold": Driver(config(num_blocks=13, prefix_cache=False, overlap_depth=3)),
        "cached": Driver(config(block_size=1, num_blocks=200)),
        "in turns": Driver(config(mixed=False)),
        "in turns, preempted": Driver(config(mixed=False, num_blocks=13, max_waiting=16)),
    }
    for name, driver in drivers.items():
        assert workload(driver) == reference, name
    assert any(len(joins(drivers["preempted"], id)) > 1 for id in drivers["preempted"].stories), (
        "none was preempted"
    )
    reused = [
        join
        for batch in drivers["cached"].batches
        for join in batch.joined
        if join.filled > join.reused_from
    ]
    assert len(reused) > 5
    assert max(len(batch.spans) for batch in drivers["depth 2"].batches) > 3
    assert {len(batch.spans) for batch in drivers["alone"].batches} == {1}
    assert {
        batch.num_decodes in (0, len(batch.spans)) for batch in drivers["in turns"].batches
    } == {True}
    assert {batch.num_decodes in (0, len(batch.spans)) for batch in drivers["depth 2"].batches} == {
        True,
        False,
    }


def test_a_last_row_on_the_device_runs_as_a_decode_with_others() -> None:
    """A prompt that is known at once, and one whose last row comes later: neither samples in a
    prefill."""
    driver = Driver(config(overlap_depth=1))
    driver.submit("a", [1, 2, 3], max_new=20, stop_ids=NEVER)
    turn(driver)
    driver.submit("b", [1, 2, 4, 5], max_new=20, stop_ids=NEVER, last_on_device=True)
    driver.submit("c", [1, 2], closed=False, max_new=20, stop_ids=NEVER, last_on_device=True)
    batch = turn(driver)
    assert spans(batch)["b"] == (0, 3)
    assert batch is not None
    assert not batch.decode_only
    driver.append("c", [6], last=True)
    batch = turn(driver)
    assert batch is not None
    assert spans(batch) == {"a": (4, 5), "b": (3, 4), "c": (2, 3)}
    assert batch.decode_only
    assert all(span.from_device and span.samples for span in batch.spans)
    for id in "abc":
        driver.cancel(id)
    driver.drain()
    driver.check_idle()


# -- overlap


def test_a_stop_is_seen_one_step_late_and_the_surplus_goes_nowhere() -> None:
    driver = Driver(config(overlap_depth=2))
    request = driver.submit("a", [1, 2, 3], max_new=50, stop_ids=NEVER)
    driver.launch()
    driver.launch()
    (first,) = driver.retire()
    driver.scheduler.cancel(RequestId("a"))
    driver.live.pop("a")
    driver.drain()
    (stop,) = first.row

    driver = Driver(config(overlap_depth=2))
    request = driver.submit("a", [1, 2, 3], max_new=50, stop_ids=frozenset({stop}))
    driver.launch()
    ahead = driver.launch()
    assert ahead is not None
    assert ahead.spans[0].from_device
    held = num_held(driver.scheduler.pool)
    (outcome,) = driver.retire()
    assert (outcome.reason, request.state) == (Reason.STOP, State.DONE)
    assert num_held(driver.scheduler.pool) == held, "the step in flight still uses the blocks"
    confirmed = request.cursor.confirmed
    assert driver.retire() == []
    assert num_held(driver.scheduler.pool) == 0
    assert request.cursor.confirmed == confirmed == 3
    assert driver.stories["a"].answer == [stop]


def test_length_needs_no_surplus() -> None:
    driver = Driver(config(overlap_depth=3))
    driver.submit("a", [1, 2, 3], max_new=2, stop_ids=NEVER)
    driver.drain()
    assert [spans(batch) for batch in driver.batches] == [{"a": (0, 3)}, {"a": (3, 4)}]


def test_the_depth_is_a_limit_and_steps_retire_in_order() -> None:
    driver = Driver(config(overlap_depth=2))
    driver.submit("a", [1, 2, 3], max_new=9, stop_ids=NEVER)
    assert driver.launch()
    late = driver.launch()
    assert late is not None
    assert driver.launch() is None
    with pytest.raises(Bug, match="order"):
        driver.scheduler.retire(late, driver.runner.retire(driver.flying.popleft()))


# -- budget


def test_decodes_go_first_and_bound_the_prefill() -> None:
    driver = Driver(config())
    driver.submit("long", [1] * 150, max_new=2)
    assert spans(driver.launch()) == {"long": (0, 64)}  # nobody answers: the whole budget
    driver.submit("talk", [2, 3], max_new=40, stop_ids=NEVER)
    assert spans(driver.launch()) == {"long": (64, 126), "talk": (0, 2)}
    driver.retire()
    driver.retire()
    batch = driver.launch()
    assert spans(batch) == {"talk": (2, 3), "long": (126, 142)}
    assert batch is not None
    assert [span.request.id for span in batch.spans] == ["talk", "long"]
    assert (batch.num_decodes, batch.num_tokens, batch.decode_only) == (1, 17, False)
    driver.drain()
    assert driver.batches[-1].decode_only
    assert max(batch.num_tokens for batch in driver.batches[2:]) <= 1 + 16


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    driver = Driver(config(prefix_cache=False))
    driver.submit("talk", [2, 3], max_new=90, stop_ids=NEVER)
    turn(driver)
    driver.submit("long", [1] * 150, max_new=2)
    driver.submit("short", [4] * 9, max_new=2)
    assert spans(turn(driver)) == {"talk": (2, 3), "long": (0, 8), "short": (0, 8)}
    assert spans(turn(driver))["short"] == (8, 9)


def test_when_decodes_exceed_the_budget_the_nearest_deadlines_go() -> None:
    driver = Driver(config(max_step_tokens=3, overlap_depth=1, patience=1000))
    for name in "abcde":
        driver.submit(name, [1], max_new=60, stop_ids=NEVER)
    for name, deadline in {"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": None}.items():
        driver.scheduler.set_deadline(RequestId(name), deadline)
    batch = driver.launch()
    assert batch is not None
    assert [span.request.id for span in batch.spans] == ["e", "d", "c"], (
        "first packets, then the least buffered"
    )
    driver.retire()
    driver.scheduler.set_deadline(RequestId("a"), 1.0)
    driver.scheduler.set_deadline(RequestId("e"), 9.0)
    batch = driver.launch()
    assert batch is not None
    assert [span.request.id for span in batch.spans] == ["a", "d", "c"]


@pytest.mark.parametrize("patience", [0, 3, 20])
def test_nobody_starves_behind_the_urgent(patience: int) -> None:
    driver = Driver(
        config(
            max_step_tokens=2, overlap_depth=1, patience=patience, max_context=900, num_blocks=900
        )
    )
    for i in range(4):
        driver.submit(f"urgent{i}", [1], max_new=150, stop_ids=NEVER)
    turn(driver)
    driver.submit("meek", [2, 2, 2], max_new=5, stop_ids=NEVER, priority=9)
    steps = 0
    while "meek" in driver.live:
        turn(driver)
        steps += 1
    assert len(driver.live) == 4
    assert steps <= 8 * (patience + 2 + 4)


def test_nobody_starves_in_the_queue() -> None:
    driver = Driver(config(max_rows=2, patience=10))
    driver.submit("meek", [2], max_new=2, priority=9)
    for i in range(200):
        while len(driver.live) < 6:
            driver.submit(f"urgent{i}.{len(driver.live)}", [1, 2], max_new=4, stop_ids=NEVER)
        turn(driver)
        if "meek" not in driver.live:
            break
    assert i < 40


def test_a_request_that_does_not_fit_is_not_overtaken() -> None:
    driver = Driver(config(num_blocks=10, prefix_cache=False, overlap_depth=1))
    driver.submit("first", [1] * 20, max_new=8, stop_ids=NEVER)
    turn(driver)
    driver.submit("large", [2] * 25, max_new=4, stop_ids=NEVER)
    driver.submit("small", [3], max_new=4, stop_ids=NEVER)
    while "first" in driver.live:
        assert set(spans(turn(driver))) == {"first"}
    driver.drain()
    order = [join.request.id for batch in driver.batches for join in batch.joined]
    assert order == ["first", "large", "small"]


# -- blocks


def test_preemption_takes_the_least_urgent_and_loses_nothing() -> None:
    driver = Driver(config(num_blocks=12, block_size=2, overlap_depth=2, max_preemptions=9))
    a = driver.submit("a", [1] * 4, max_new=17, stop_ids=NEVER)
    b = driver.submit("b", [2] * 4, max_new=17, stop_ids=NEVER)
    c = driver.submit("c", [3] * 4, max_new=17, stop_ids=NEVER, priority=1)
    driver.drain()
    driver.check_idle()
    assert a.num_preemptions == 0
    assert c.num_preemptions >= 1
    assert c.num_preemptions >= b.num_preemptions
    assert [len(driver.stories[n].answer) for n in "abc"] == [17] * 3
    assert len(joins(driver, "c")) > 1


def test_tokens_in_flight_at_a_preemption_count() -> None:
    driver = Driver(config(num_blocks=4, block_size=2, overlap_depth=2, prefix_cache=False))
    driver.submit("a", [1, 2], max_new=7, stop_ids=NEVER)
    b = driver.submit("b", [2, 1], max_new=7, stop_ids=NEVER)
    while driver.launch() or b.state is not State.WAITING:
        if len(driver.flying) == 2:
            driver.retire()
    assert b.in_flight == 1
    assert (b.row, b.blocks, b.num_preemptions) == (None, [], 1)
    before = len(driver.stories["b"].answer)
    in_flight = b.in_flight
    while b.in_flight:
        driver.retire()
    assert len(driver.stories["b"].answer) == before + in_flight
    driver.drain()
    driver.check_idle()


def test_one_preempted_too_often_goes_before_all() -> None:
    driver = Driver(
        config(num_blocks=8, block_size=2, max_preemptions=0, max_waiting=99, patience=3)
    )
    meek = driver.submit("meek", [2] * 4, max_new=9, stop_ids=NEVER, priority=5)
    for i in range(60):
        while len(driver.live) < 3 + ("meek" in driver.live):
            driver.submit(f"u{i}.{len(driver.live)}", [1] * 3, max_new=8, stop_ids=NEVER)
        turn(driver)
    assert meek.num_preemptions == 1
    assert meek.state is State.DONE


def test_at_least_the_last_prompt_row_is_computed() -> None:
    driver = Driver(config())
    driver.submit("a", [1, 2, 3, 4, 5, 6, 7, 8], max_new=1)
    driver.drain()
    driver.submit("b", [1, 2, 3, 4, 5, 6, 7, 8], max_new=1)
    batch = driver.launch()
    assert spans(batch) == {"b": (4, 8)}
    assert joins(driver, "b")[0].filled == 4
    driver.drain()
    driver.submit("c", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_new=1)
    assert spans(driver.launch()) == {"c": (8, 9)}
    driver.drain()
    driver.check_idle()


def test_a_reuse_that_was_in_no_batch_is_reported_again() -> None:
    driver = Driver(config(num_blocks=8, max_rows=2, patience=0, overlap_depth=1))
    driver.submit("seed", [1] * 9, max_new=1)
    driver.drain()
    for name in ("x", "y"):
        driver.submit(name, [5], max_new=3, stop_ids=NEVER)
    turn(driver)
    low = driver.submit("low", [1] * 9, max_new=2, priority=1)
    driver.submit("high", [2] * 25, max_new=2)
    while "x" in driver.live:
        turn(driver)
    # Both rows come free at once: `low` is the longest waiting and goes first, then makes room for
    # `high` at once.
    assert set(spans(driver.launch())) == {"high"}
    assert (low.num_preemptions, low.cursor.confirmed, joins(driver, "low")) == (1, 0, [])
    driver.drain()
    assert joins(driver, "low")[0].reused_from == 0
    driver.check_idle()


def test_a_cached_prefix_without_its_payload_is_computed_again() -> None:
    driver = Driver(config())
    rows, media = [1, 2, 3, 4] * 3, [0, 0, 0, 0, 9, 9]
    driver.submit("text", rows, media=media, max_new=1)
    driver.drain()
    driver.submit("speech", rows, media=media, max_new=1, needs_payload=True)
    assert spans(driver.launch()) == {"speech": (0, 12)}
    driver.drain()
    assert driver.scheduler.pool.payloads, "kept for the next"
    driver.submit("more speech", rows, media=media, max_new=1, needs_payload=True)
    assert spans(driver.launch()) == {"more speech": (8, 12)}
    (join,) = joins(driver, "more speech")
    assert [list(rows) for rows in join.payloads] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    driver.drain()
    driver.submit("more text", rows, media=media, max_new=1)
    assert spans(driver.launch()) == {"more text": (8, 12)}
    driver.drain()
    driver.check_idle()


def test_other_media_or_another_root_share_nothing() -> None:
    driver = Driver(config())
    rows = [1] * 8
    driver.submit("a", rows, media=[5] * 4, max_new=1)
    driver.drain()
    driver.submit("b", rows, media=[6] * 4, max_new=1)
    driver.submit("c", rows, media=[5] * 4, max_new=1, cache_root=b"other voice")
    driver.submit("d", rows, media=[5] * 4, max_new=1)
    assert spans(driver.launch()) == {"b": (0, 8), "c": (0, 8), "d": (4, 8)}


def test_a_talker_block_with_media_depends_on_what_the_thinker_saw() -> None:
    """Equal talker rows after different system prompts: the media rows hold the thinker's hidden
    states."""
    scheduler = Scheduler(config())

    def talk(id: str, system: list[int], media: bool) -> tuple[int, int]:
        user = [7, 7, 7, 7, 8, 8, 8, 8]
        [key] = prefix_keys(system + user, [Salt(Span(len(system), len(system) + 4), b"wav")])
        salts = [Salt(Span(0, 4), key)]
        spec = RequestSpec(RequestId(id), max_new=1, paced=True, cache_output=False)
        scheduler.submit(spec, [*user, 9], salts=salts if media else [])
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.retire(batch, StepResult([[1]]))
        return batch.spans[0].start, batch.spans[0].stop

    assert talk("a", [1, 2], media=True) == (0, 9)
    assert talk("b", [1, 2], media=True) == (8, 9)
    assert talk("c", [3, 4], media=True) == (0, 9)
    assert talk("d", [1, 2], media=False) == (0, 9)
    assert talk("e", [3, 4], media=False) == (8, 9)


def test_generated_rows_are_cached_only_if_ids_tell_them() -> None:
    for cache_output, rows in ((True, (8, 11)), (False, (4, 11))):
        driver = Driver(config(overlap_depth=1))
        driver.submit("a", [1, 2, 3, 4, 5], max_new=5, stop_ids=NEVER, cache_output=cache_output)
        driver.drain()
        driver.submit("b", [1, 2, 3, 4, 5, *driver.stories["a"].answer, 6], max_new=1)
        assert spans(driver.launch()) == {"b": rows}


def test_rows_without_ids_are_never_shared() -> None:
    driver = Driver(config())
    for name in "ab":
        driver.submit(name, [1, 2, 3, 4], closed=False, max_new=1)
        driver.append(name, [5, 6, 7, 8, 9], opaque=True, last=True)
        driver.drain()
    assert OPAQUE in driver.ended["a"].ids
    assert [join.filled for join in joins(driver, "b")] == [4]


# -- input over time


def test_an_open_prompt_starves_only_its_own_request() -> None:
    driver = Driver(config(overlap_depth=1))
    talk = driver.submit("talk", [1], max_new=30, stop_ids=NEVER)
    slow = driver.submit("slow", closed=False, max_new=2, stop_ids=NEVER)
    assert (slow.state, talk.state) == (State.STARVED, State.WAITING)
    assert set(spans(turn(driver))) == {"talk"}
    driver.append("slow", [1, 2, 3], last=False)
    assert spans(turn(driver))["slow"] == (0, 3)
    assert slow.state is State.STARVED
    assert set(spans(turn(driver))) == {"talk"}
    driver.append("slow", [4], last=True)
    batch = driver.launch()
    assert batch is not None
    assert batch.decode_only, "the last row of a prompt alone looks like a decode"
    driver.drain()
    driver.check_idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("rows", [3, 4, 8])
@pytest.mark.parametrize("paced", [False, True])
def test_a_prompt_may_close_after_all_its_rows_have_run(depth: int, rows: int, paced: bool) -> None:
    for retired in (False, True):
        driver = Driver(config(overlap_depth=depth))
        request = driver.submit(
            "a", [1] * rows, closed=False, max_new=3, paced=paced, cache_output=False
        )
        driver.launch()
        if retired:
            driver.retire()
        assert request.state is State.STARVED
        driver.scheduler.append_rows(RequestId("a"), 0, last=True)
        assert request.state is State.RUNNING
        if paced:
            driver.scheduler.append_step_inputs(RequestId("a"), 0, last=True)
        driver.drain()
        driver.check_idle()


def test_a_paced_decode_waits_for_its_text_and_runs_free_after_the_end() -> None:
    driver = Driver(config(overlap_depth=2))
    driver.submit("other", [1], max_new=30, stop_ids=NEVER)
    talker = driver.submit(
        "talker", [1, 2, 3], max_new=12, stop_ids=NEVER, paced=True, cache_output=False
    )
    for _ in range(3):
        turn(driver)
    assert (talker.state, talker.cursor.launched) == (State.STARVED, 3)
    driver.text("talker", 5)
    driver.text("talker", 6)
    assert talker.state is State.RUNNING
    for _ in range(4):
        turn(driver)
    assert (talker.state, talker.cursor.launched) == (State.STARVED, 5)
    driver.scheduler.append_step_inputs(RequestId("talker"), 0, last=True)
    driver.drain()
    driver.check_idle()
    with_other = [batch for batch in driver.batches if "other" in spans(batch)]
    assert with_other == driver.batches[: len(with_other)], "its batch never waited"


@pytest.mark.parametrize("depth", [1, 2])
def test_who_waits_for_text_holds_nobody_up(depth: int) -> None:
    """However urgent it is: here it goes before the others in order."""
    driver = Driver(config(overlap_depth=depth))
    driver.submit(
        "first", [1, 2, 3], max_new=12, stop_ids=NEVER, paced=True, cache_output=False, priority=-1
    )
    for id in ("second", "third"):
        driver.submit(id, [4, 5], max_new=12, stop_ids=NEVER, paced=True, cache_output=False)
        driver.scheduler.append_step_inputs(RequestId(id), 0, last=True)
    while len(driver.live) > 1:
        batch = driver.launch()
        assert batch is not None or driver.flying, "a batch waited"
        if batch is not None and len(driver.live) == 3:
            assert {"second", "third"} <= set(spans(batch))
        if len(driver.flying) == depth or batch is None:
            driver.retire()
    assert driver.live["first"].state is State.STARVED
    driver.text("first", 6)
    driver.scheduler.append_step_inputs(RequestId("first"), 0, last=True)
    driver.drain()
    driver.check_idle()


def test_who_has_no_credit_takes_no_share_of_a_step() -> None:
    """Neither of the rows of a prompt beside it, nor by making that one go in small pieces, as
    beside an answer."""
    driver = Driver(config(overlap_depth=1, prefill_chunk=8, lone_prefill_chunk=16))
    driver.submit("a", list(range(1, 13)), max_new=9, stop_ids=NEVER)
    driver.submit("b", list(range(2, 122)), max_new=2, stop_ids=NEVER)
    assert spans(turn(driver)) == {"a": (0, 8), "b": (0, 8)}
    driver.scheduler.set_blocked(RequestId("a"), True)
    assert spans(turn(driver)) == {"b": (8, 24)}
    driver.scheduler.set_blocked(RequestId("a"), False)
    while driver.live["a"].cursor.known == 12:
        turn(driver)
    driver.scheduler.set_blocked(RequestId("a"), True)
    start = driver.live["b"].cursor.filled
    assert spans(turn(driver)) == {"b": (start, start + 16)}
    driver.scheduler.set_blocked(RequestId("a"), False)
    driver.drain()
    driver.check_idle()


def test_no_credit_downstream_stops_one_request_at_a_known_row() -> None:
    driver = Driver(config(overlap_depth=2))
    a = driver.submit("a", [1], max_new=30, stop_ids=NEVER)
    driver.submit("b", [2], max_new=30, stop_ids=NEVER)
    driver.launch()
    driver.launch()
    driver.scheduler.set_blocked(RequestId("a"), True)
    assert a.state is State.STARVED
    launched = a.cursor.launched
    for _ in range(6):
        driver.retire()
        assert "a" not in spans(driver.launch())
    assert a.cursor.launched == launched
    driver.scheduler.set_blocked(RequestId("a"), False)
    driver.drain()
    driver.check_idle()


def test_a_starved_request_lends_its_row_but_keeps_its_kv() -> None:
    driver = Driver(config(max_rows=1, overlap_depth=1))
    slow = driver.submit("slow", [1, 2, 3, 4, 5], closed=False, max_new=3)
    turn(driver)
    driver.submit("quick", [2], max_new=3)
    while "quick" in driver.live:
        turn(driver)
    assert (slow.row, slow.cursor.filled, len(slow.blocks)) == (None, 5, 2)
    driver.append("slow", [6], last=True)
    assert spans(turn(driver)) == {"slow": (5, 6)}
    driver.drain()
    driver.check_idle()


# -- memory, taken and given back


def test_rows_computed_again_are_findable_again_but_not_before() -> None:
    driver = Driver(config(num_blocks=8, max_step_tokens=6, prefill_chunk=6, overlap_depth=1))
    a = driver.submit("a", [1] * 15, max_new=9, stop_ids=NEVER, priority=1)
    while a.cursor.confirmed < 16:
        turn(driver)
    driver.submit("b", [2] * 20, max_new=13, stop_ids=NEVER)
    while "b" in driver.live:
        turn(driver)
    assert not a.blocks
    assert spans(turn(driver)) == {"a": (0, 6)}, "all its blocks were taken"
    assert driver.batches[-1].spans[0].publish_from == 16, (
        "what was published is not published again"
    )
    assert len(a.blocks) == 2
    driver.submit("c", [1] * 9, max_new=1)
    while not joins(driver, "c"):
        turn(driver)
    assert joins(driver, "c")[0].filled == 4, "the second block was only half there"
    driver.drain()
    driver.submit("d", [1] * 15, max_new=1)
    driver.drain()
    assert joins(driver, "d")[0].filled == 12
    driver.check_idle()


def test_rows_wait_for_their_input_unless_the_cache_has_them() -> None:
    driver = Driver(config(overlap_depth=1))
    a = driver.submit(
        "a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], max_new=1, missing=[Span(2, 5), Span(6, 8)]
    )
    assert spans(turn(driver)) == {"a": (0, 2)}
    assert turn(driver) is None
    assert a.state is State.STARVED
    driver.provide("a", 1)  # not what it waits for
    assert turn(driver) is None
    driver.provide("a", 0)
    driver.drain()
    assert spans(driver.batches[-1]) == {"a": (2, 10)}
    b = driver.submit(
        "b", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], max_new=1, missing=[Span(2, 5), Span(6, 8)]
    )
    assert driver.scheduler.num_found(b.id) == 8
    assert spans(driver.launch()) == {"b": (8, 10)}
    driver.drain()
    # In the cache is half of what is missing: all of it is waited for.
    c = driver.submit("c", [1, 2, 3, 4, 5, 6, 9, 9, 9], max_new=1, missing=[Span(2, 6)])
    assert driver.launch() is None
    assert (c.state, c.cursor.filled) == (State.STARVED, 4)
    driver.provide("c")
    assert spans(driver.launch()) == {"c": (4, 9)}
    driver.drain()
    driver.check_idle()


def test_input_that_the_cache_had_is_waited_for_when_it_is_lost() -> None:
    """Preempted, it finds nothing any more; then the input that never came is needed after all."""
    driver = Driver(config(num_blocks=8, overlap_depth=1))
    driver.submit("seed", [1] * 9, max_new=1)
    driver.drain()
    a = driver.submit("a", [1] * 9, max_new=9, stop_ids=NEVER, priority=1, missing=[Span(2, 6)])
    assert spans(turn(driver)) == {"a": (8, 9)}
    driver.submit("b", [2] * 20, max_new=13, stop_ids=NEVER)
    while "b" in driver.live:
        turn(driver)
    assert (a.state, a.cursor.filled) == (State.STARVED, 0)
    assert driver.launch() is None
    driver.provide("a")
    driver.drain()
    driver.check_idle()


def test_nobody_is_preempted_in_vain() -> None:
    driver = Driver(config(num_blocks=10, prefix_cache=False, overlap_depth=1))
    low = driver.submit("low", [1] * 8, max_new=9, stop_ids=NEVER, priority=1)
    peer = driver.submit("peer", [2] * 10, max_new=6, stop_ids=NEVER)
    turn(driver)
    driver.submit("head", [3] * 30, max_new=2, stop_ids=NEVER)
    while "peer" in driver.live:
        turn(driver)
        assert low.num_preemptions == 0, "its blocks would not have been enough"
    assert peer.num_preemptions == 0
    driver.launch()
    assert low.num_preemptions == 1
    assert low.state is State.WAITING
    driver.drain()
    driver.check_idle()


def test_two_with_a_cached_prefix_do_not_preempt_each_other_for_ever() -> None:
    """Each is seated on what the cache has, lacks input right behind it, and does not fit beside
    the other. Making one batch must end; and as their input comes, both are answered."""
    driver = Driver(config(num_blocks=3, overlap_depth=1))
    for id, ids in (("seed a", [1] * 5), ("seed b", [2] * 5)):
        driver.submit(id, ids, max_new=1)
        driver.drain()
    a = driver.submit("a", [1] * 10, max_new=1, missing=[Span(4, 8)])
    b = driver.submit("b", [2] * 10, max_new=1, missing=[Span(4, 8)])
    for _ in range(4):
        assert driver.launch() is None
        assert {a.state, b.state} == {State.STARVED, State.WAITING}
    driver.provide("a")
    driver.provide("b")
    driver.drain()
    driver.check_idle()


# -- ends and errors


def test_cancelling_in_flight_frees_when_the_step_has_retired() -> None:
    driver = Driver(config(overlap_depth=2))
    driver.submit("a", [1] * 9, max_new=9, stop_ids=NEVER)
    driver.submit("b", [2] * 9, max_new=9, stop_ids=NEVER)
    driver.launch()
    driver.launch()
    held = num_held(driver.scheduler.pool)
    driver.cancel("a")
    assert not driver.scheduler.cancel(RequestId("a"))
    assert num_held(driver.scheduler.pool) == held
    assert {outcome.request.id for outcome in driver.retire()} == {"b"}
    assert num_held(driver.scheduler.pool) == held
    driver.retire()
    assert num_held(driver.scheduler.pool) < held
    driver.drain()
    driver.check_idle()


def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    driver = Driver(config(overlap_depth=2, max_rows=2))
    a = driver.submit("a", [1] * 5, max_new=9, stop_ids=NEVER)
    b = driver.submit("b", [2] * 5, max_new=9, stop_ids=NEVER)
    driver.submit("c", [3] * 5, max_new=9, stop_ids=NEVER)
    driver.launch()
    driver.launch()
    error = Bug("the device said no")
    outcomes = driver.retire(error)
    assert [(o.request.id, o.reason, list(o.row)) for o in outcomes] == [
        ("a", Reason.FAILED, []),
        ("b", Reason.FAILED, []),
    ]
    assert (a.error, b.error) == (error, error)
    driver.drain()
    driver.check_idle()
    assert len(driver.stories["c"].answer) == 9
    driver.submit("again", [1] * 5, max_new=9)
    assert spans(driver.launch()) == {"again": (0, 5)}, "nothing of a failed step is in the cache"


def test_one_failed_row_leaves_its_batch_alone() -> None:
    driver = Driver(config())
    a = driver.submit("a", [1] * 5, max_new=9)
    driver.submit("b", [2] * 5, max_new=9)
    driver.launch()
    driver.retire(Bug("NaN"), ["a"])
    assert a.reason is Reason.FAILED
    driver.drain()
    driver.check_idle()
    assert driver.stories["b"].answer


def test_what_can_never_work_is_refused_at_the_door() -> None:
    driver = Driver(config(max_context=40, num_blocks=8, max_waiting=2))
    with pytest.raises(TooLong):
        driver.submit("a", [1] * 37, max_new=4)
    with pytest.raises(Invalid, match="never fit") as caught:
        driver.submit("b", [1] * 30, max_new=4)
    assert not isinstance(caught.value, TooLong)
    with pytest.raises(Invalid, match="empty"):
        driver.submit("c", [], max_new=4)
    driver.submit("d", [1] * 20, max_new=13)
    driver.submit("e", [1], closed=False, max_new=10)
    with pytest.raises(Busy):
        driver.submit("f", [1], max_new=1)
    with pytest.raises(Bug, match="twice"):
        driver.scheduler.submit(RequestSpec(RequestId("d"), 1), [1])
    with pytest.raises(TooLong):
        driver.scheduler.append_rows(RequestId("e"), [1] * 30)
    assert driver.live["e"].ids == [1]
    with pytest.raises(Gone):
        driver.scheduler.append_step_inputs(RequestId("nobody"))
    turn(driver)
    driver.submit("f", [1], max_new=1)  # admission made room in the queue
    driver.scheduler.append_rows(RequestId("e"), 0, last=True)
    driver.drain()
    driver.check_idle()


@pytest.mark.parametrize(
    "name", ["num_blocks", "block_size", "max_rows", "max_step_tokens", "overlap_depth"]
)
def test_a_senseless_configuration_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match=name):
        config(**{name: 0})


def test_imports_no_torch() -> None:
    code = (
        "import sys, stretto.stage.scheduler, stretto.stage.request; sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
