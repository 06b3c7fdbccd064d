"""When the next step is due: known durations, margins, and what is never waited for."""

import random
import subprocess
import sys

import pytest

from stretto.stage.host.loop import TICK_NS
from stretto.stage.launch_timing import MIN_TIMES, WINDOW, LaunchTimer
from tests.stage.simulated import MS, Clock

LEAD, LAUNCH = 2 * MS, MS


class Observed:
    """An `LaunchTimer` that is told of steps on a clock of its own."""

    def __init__(self, on: bool = True, lead: int = LEAD) -> None:
        self.clock = Clock()
        self.timer = LaunchTimer((4, 8, 16), lead, on, self.clock)

    def launch(self, rows: int | None = 8, took: int = LAUNCH) -> None:
        self.timer.launched(rows, took)

    def retire(self, after: int) -> int:
        """How long the step took on the device."""
        self.clock.now += after
        begun, ended = self.timer.retired()
        return ended - begun

    def step(self, lasts: int, rows: int | None = 8) -> None:
        """One that runs alone."""
        self.launch(rows)
        self.retire(lasts)

    def due_in(self) -> int | None:
        due = self.timer.due_ns()
        return None if due is None else due - self.clock.now


@pytest.fixture
def observed() -> Observed:
    """16 ms for 5 to 8 rows, often seen."""
    observed = Observed()
    for _ in range(MIN_TIMES):
        observed.step(16 * MS)
    return observed


def test_nothing_is_held_back_while_the_device_is_free(observed: Observed) -> None:
    assert observed.due_in() is None


def test_due_before_the_end_by_lead_and_launch(observed: Observed) -> None:
    observed.launch()
    assert observed.due_in() == 16 * MS - LEAD - LAUNCH
    observed.clock.now += 5 * MS
    assert observed.due_in() == 11 * MS - LEAD - LAUNCH


def test_a_step_behind_another_begins_when_that_ends(observed: Observed) -> None:
    observed.launch()
    observed.clock.now += 12 * MS
    observed.launch()
    assert observed.retire(4 * MS) == 16 * MS
    assert observed.due_in() == 16 * MS - LEAD - LAUNCH
    assert observed.retire(15 * MS) == 15 * MS, "time in the queue is not the step's"


def test_the_end_is_when_it_was_noticed_first(observed: Observed) -> None:
    """The loop comes 3 ms late to a step that the waiter saw in time."""
    flight = observed.timer.launched(8, LAUNCH)
    observed.launch()
    observed.clock.now += 16 * MS
    observed.timer.ended(flight)
    observed.retire(3 * MS)
    assert observed.due_in() == 13 * MS - LEAD - LAUNCH


def test_several_in_flight_add_up(observed: Observed) -> None:
    observed.launch()
    observed.launch()
    assert observed.due_in() == 32 * MS - LEAD - LAUNCH


@pytest.mark.parametrize("rows", [4, 9, 16, 17, None], ids=str)
def test_unknown_steps_are_not_waited_for(observed: Observed, rows: int | None) -> None:
    """Other sizes, sizes beyond all, and steps with prompts: also behind one that is known."""
    observed.launch(rows)
    assert observed.due_in() is None
    observed.retire(MS)
    observed.launch(8)
    observed.launch(rows)
    assert observed.due_in() is None


def test_sizes_are_learnt_apart_and_padded(observed: Observed) -> None:
    for _ in range(MIN_TIMES):
        observed.step(30 * MS, rows=9)
    for rows, lasts in ((5, 16), (8, 16), (10, 30), (16, 30)):
        observed.launch(rows)
        assert observed.due_in() == lasts * MS - LEAD - LAUNCH
        observed.retire(lasts * MS)


def test_a_few_must_be_seen_first() -> None:
    observed = Observed()
    for n in range(MIN_TIMES + 1):
        observed.launch()
        assert (observed.due_in() is not None) == (n >= MIN_TIMES)
        observed.retire(16 * MS)


def test_short_steps_are_not_waited_for() -> None:
    for lasts, held in ((2 * (LEAD + LAUNCH) - 1, False), (2 * (LEAD + LAUNCH), True)):
        observed = Observed()
        for _ in range(MIN_TIMES):
            observed.step(lasts)
        observed.launch()
        assert (observed.due_in() is not None) == held


def test_within_a_tick_is_now(observed: Observed) -> None:
    """So a sleep in whole ticks is never too short: what it wakes up for is due."""
    observed.launch()
    due = observed.timer.due_ns()
    assert due is not None
    observed.clock.now = due - TICK_NS
    assert observed.due_in() == TICK_NS
    for now in (due - TICK_NS + 1, due, due + 50 * MS):
        observed.clock.now = now
        assert observed.due_in() is None


def test_off_is_at_once_but_goes_on_learning(observed: Observed) -> None:
    observed.timer.on = False
    for _ in range(WINDOW):
        observed.step(20 * MS)
    observed.launch()
    assert observed.due_in() is None
    observed.timer.on = True
    assert observed.due_in() == 20 * MS - LEAD - LAUNCH


def test_one_outlier_changes_nothing(observed: Observed) -> None:
    for odd in (0, 500 * MS):
        observed.step(odd)
        observed.launch(took=0)
        assert observed.due_in() == 16 * MS - LEAD - LAUNCH
        observed.retire(16 * MS)
    observed.launch(took=300 * MS)
    assert observed.due_in() == 16 * MS - LEAD - LAUNCH


def test_faster_steps_are_believed_at_once_and_slower_ones_in_time(observed: Observed) -> None:
    """Too late costs the device's time, too early only the chance to be in front."""
    observed.step(10 * MS)
    observed.step(10 * MS)
    observed.launch()
    assert observed.due_in() == 10 * MS - LEAD - LAUNCH
    observed.retire(20 * MS)
    for n in range(WINDOW):
        observed.launch()
        due = observed.due_in()
        assert due is not None
        assert due <= 20 * MS - LEAD - LAUNCH
        if n >= WINDOW - 2:
            assert due == 20 * MS - LEAD - LAUNCH
        observed.retire(20 * MS)


def test_slow_launches_widen_the_margin(observed: Observed) -> None:
    for _ in range(2):
        observed.launch(took=3 * MS)
        observed.retire(16 * MS)
    observed.launch()
    assert observed.due_in() == 16 * MS - LEAD - 3 * MS


@pytest.mark.parametrize("seed", range(20))
def test_in_noise_it_is_early_rather_than_late(seed: int) -> None:
    """Steps of 15 ms that others stretch by up to 6, ends that are noticed up to a millisecond
    late: of the launches that are begun when due (or up to a tick before) next to none finds the
    device done, and most of a step is won."""
    rng = random.Random(seed)
    observed = Observed(lead=int(1.5 * MS))
    clock, ahead = observed.clock, observed.timer
    late, won, end = 0, 0, clock.now
    for n in range(400):
        due = ahead.due_ns()
        at = clock.now if due is None else due - rng.randrange(TICK_NS)
        if due is not None:
            won += at - clock.now
            late += at + LAUNCH > end
        clock.now = at + LAUNCH
        ahead.launched(8, LAUNCH)
        if n:  # the step before ends, and is retired
            clock.now = max(clock.now, end) + rng.randrange(MS)
            ahead.retired()
        end = max(end, at + LAUNCH) + 15 * MS + rng.choice((0, 0, rng.randrange(6 * MS)))
    assert late <= 4
    assert won / 400 > 9 * MS


def test_imports_no_torch() -> None:
    code = "import stretto.stage.launch_timing, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
