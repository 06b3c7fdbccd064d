"""A stage that launches just in time, on a device that takes time: what is held back and what is
not, that the device never stands still for it, and that nothing but the times change."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from stretto.models.qwen3_omni.load import Models
from stretto.stage.host.loop import TICK_NS
from stretto.types import RequestId
from tests.prompts import make
from tests.stage.desk import CONFIG
from tests.stage.simulated import MS
from tests.stage.stepping import idle, in_flight
from tests.stage.timed_desk import LEAD, STEP, Timed, options


@pytest.fixture
def desk(models: Models) -> Iterator[Timed]:
    """One that answers, and has seen enough steps to hold them back."""
    desk = Timed(models)
    desk.text("old", 0, 40)
    desk.until_held()
    yield desk
    desk.finish()
    assert idle(desk.stage)
    assert desk.stage.due_ns is None
    desk.wakeup.close()


def test_steps_are_launched_when_due_and_the_device_never_stands_still(models: Models) -> None:
    desk = Timed(models)
    desk.text("a", 0, 40)
    desk.finish()
    stats, launches = desk.stage.stats, desk.device.launches
    assert set(desk.device.gaps()) == {0}
    assert stats.held == sum(b.at - a.end > -STEP // 2 for a, b in pairwise(launches))
    assert stats.held > 30
    assert stats.late == 0
    margin = LEAD + desk.device.launch_ns
    for a, b in list(pairwise(launches))[-20:-1]:
        begun = b.at - desk.device.launch_ns
        assert a.end - margin - TICK_NS < begun <= a.end - margin


def test_it_takes_no_longer_and_no_more_rounds_than_it_must(models: Models) -> None:
    """As many steps as without, ended at the same time, with one more sleep for each step held
    back."""
    ends, rounds = [], []
    for on in (False, True):
        desk = Timed(models, on=on)
        for i in range(5):
            desk.text(str(i), i, 20 + i)
        desk.finish()
        ends.append([launch.end for launch in desk.device.launches])
        rounds.append(desk.rounds)
        assert (desk.stage.stats.held > 0) == on
        assert desk.stage.stats.late == 0
    assert ends[0] == ends[1]
    assert rounds[1] <= rounds[0] + 2 * len(ends[1])


def test_a_prompt_gets_in_front_of_the_step_that_is_held_back(models: Models) -> None:
    """It is launched at once, behind the running step alone. Without, a whole step lies between."""
    waits = []
    for on in (False, True):
        desk = Timed(models, on=on)
        desk.text("old", 0, 40)
        while desk.device.free_ns < desk.clock.now or len(desk.tokens["old"]) < 10:
            desk.go()
        while desk.round():
            pass
        running = next(x for x in desk.device.launches if x.end > desk.clock.now)
        num_asked, before = desk.clock.now, len(desk.device.launches)
        desk.loop.post(lambda desk=desk: desk.text("new", 1, 3))
        if on:
            assert desk.round(), "at once"
            assert desk.clock.now == num_asked + desk.device.launch_ns
        while len(desk.device.launches) == before or desk.device.launches[-1].batch.decode_only:
            desk.go()
        prompt = desk.device.launches[-1]
        assert RequestId("new") in {s.request.id for s in prompt.batch.spans}
        assert RequestId("old") in {s.request.id for s in prompt.batch.spans}, (
            "the held step's rows go along"
        )
        waits.append(prompt.start - running.end)
        desk.finish()
        assert desk.stage.stats.late == 0
    assert waits == [STEP, 0]


def test_after_a_prompt_nothing_is_waited_for_until_it_is_done(models: Models) -> None:
    """Not even where decode steps of as many requests are known."""
    desk = Timed(models)
    desk.text("old", 0, 40)
    desk.text("beside", 2, 15)
    while "beside" not in desk.ended:
        desk.go()
    desk.until_held()
    assert {len(x.batch.spans) for x in desk.device.launches[-12:]} == {1, 2}
    desk.text("new", 1, 3)
    assert desk.round()
    assert in_flight(desk.stage) == 2
    assert desk.stage.due_ns is None
    desk.clock.move_to(desk.device.next_end())
    assert desk.round(), (
        "the step before the prompt is back, and the next is launched behind the prompt"
    )
    assert in_flight(desk.stage) == 2
    desk.finish()


@pytest.mark.parametrize("early", [0, 1, 5 * MS])
def test_a_wake_up_before_the_due_time_changes_nothing(desk: Timed, early: int) -> None:
    due, before = desk.stage.due_ns, len(desk.device.launches)
    for at in range(desk.clock.now, due - TICK_NS, STEP // 7):
        desk.clock.move_to(at)
        assert not desk.round()
        assert desk.stage.due_ns == due
    desk.clock.move_to(due - TICK_NS - early)
    desk.round()
    assert len(desk.device.launches) == before
    desk.clock.move_to(due - TICK_NS + 1)
    assert desk.round()
    assert len(desk.device.launches) == before + 1


@pytest.mark.parametrize("after", [1, 3 * MS, 100 * MS])
def test_a_wake_up_that_comes_too_late_is_counted_and_made_good(desk: Timed, after: int) -> None:
    end, held = desk.device.free_ns, desk.stage.stats.held
    desk.clock.move_to(end + after)
    assert desk.round()
    stats = desk.stage.stats
    assert (stats.held, stats.late) == (held + 1, 1)
    assert desk.device.launches[-1].start == end + after + desk.device.launch_ns


def test_a_launch_that_the_device_overtakes_is_late(desk: Timed) -> None:
    """Begun in time, but not done in time."""
    desk.clock.move_to(desk.device.free_ns - desk.device.launch_ns // 2)
    assert desk.round()
    assert desk.stage.stats.late == 1


def test_no_wake_up_at_all_still_ends_well(models: Models) -> None:
    """The end of the running step launches what nobody came to launch."""
    desk = Timed(models)
    desk.text("a", 0, 20)
    while not idle(desk.stage):
        if not desk.round():
            desk.wait()
    assert len(desk.tokens["a"]) == 20
    assert desk.stage.stats.late == desk.stage.stats.held > 10


def test_cancelling_all_while_held_back_leaves_nothing_to_wait_for(desk: Timed) -> None:
    before = len(desk.device.launches)
    desk.loop.post(lambda: desk.stage.cancel(RequestId("old")))
    desk.round()
    assert not desk.round()
    assert desk.stage.due_ns is None, "or the loop would go round and round"
    desk.wakeup.slept.clear()
    desk.loop.sleep()
    assert desk.wakeup.slept == [None]
    desk.finish()
    assert len(desk.device.launches) == before
    assert desk.stage.stats.late == 0


def test_cancelling_one_while_held_back_leaves_the_other_alone(models: Models) -> None:
    tokens = []
    for cancel in (False, True):
        desk = Timed(models)
        desk.text("stays", 1, 30)
        desk.text("goes", 2, 30)
        due = desk.until_held()
        if cancel:
            desk.stage.cancel(RequestId("goes"))
            assert not desk.round()
            assert desk.stage.due_ns == due
        desk.finish()
        tokens.append(desk.tokens)
    assert tokens[1]["stays"] == tokens[0]["stays"]
    assert len(tokens[1]["goes"]) < len(tokens[0]["goes"]) == 30


def test_a_loop_that_stops_while_a_step_is_held_back_stops(desk: Timed) -> None:
    before = len(desk.device.launches)
    desk.loop.post(desk.loop.stop)
    desk.loop.run()
    assert len(desk.device.launches) == before
    assert in_flight(desk.stage) == 1


def test_waiting_for_text_is_not_holding_back(models: Models) -> None:
    """A talker that has spoken all its text has no step to hold back: it has no due time, and the
    frame that it makes when text comes (here as the last one ends, at the worst moment) is not a
    late one."""
    desk = Timed(models, "talker")
    spoken = replace(options(3, 1), max_frames=60)
    desk.speak("a", make("text", models.config, seed=3), spoken, stop_ids=frozenset())
    for token in range(100, 112):
        desk.feed("a", token)
    desk.rest()
    held, frames = desk.stage.stats.held, len(desk.rows["a"])
    assert held
    for token in range(200, 206):
        desk.feed("a", token)
        assert desk.round()
        assert not desk.round()
        assert in_flight(desk.stage) == 1
        assert desk.stage.due_ns is None
        desk.clock.move_to(desk.device.free_ns)
    desk.rest()
    assert len(desk.rows["a"]) == frames + 6
    assert desk.stage.stats.held == held
    assert desk.stage.stats.late == 0
    desk.stage.cancel(RequestId("a"))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_with_any_times_tokens_are_the_same(models: Models, seed: int, depth: int) -> None:
    """Steps of any length, arrivals and cancellations at any time, wake-ups that are missed: the
    same answers."""
    rng = np.random.default_rng(seed)
    found = []
    for on in (False, True):
        desk = Timed(models, on=on, tick=20_000, config=replace(CONFIG, overlap_depth=depth))
        desk.device.lasts = lambda batch: int(rng.integers(4 * MS, 30 * MS))
        for i in range(6):
            desk.text(str(i), i, 12 + 3 * i)
            for _ in range(int(rng.integers(0, 30))):
                if not desk.round() and rng.random() < 0.8:
                    desk.loop.sleep()
                elif rng.random() < 0.2:
                    desk.clock.now += int(rng.integers(0, 20 * MS))
        desk.finish()
        found.append(desk.tokens)
        assert (desk.stage.stats.held > 0) == (on and depth > 1)
    assert found[0] == found[1]
