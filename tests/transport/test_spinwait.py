"""When a receiver spins before it sleeps: the rules in `spinwait`'s docstring, with a clock that
the test moves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from stretto.transport.spinwait import MAX_STREAK, STREAK, SpinWait, read_spin_s

WINDOW_S = 100e-6
SHORT_S, LONG_S = 30e-6, 0.004


@dataclass(slots=True)
class Played:
    """A receiver's waits on a clock that only they move. `wakes_s` is what a sleeper's wake-up adds
    to a wait."""

    cores: int = 2
    wakes_s: float = 50e-6
    spinning_adds_s: float = 0.0
    now: float = 0.0
    spun_s: float = 0.0
    spin_wait: SpinWait = field(init=False)

    def __post_init__(self) -> None:
        self.spin_wait = SpinWait(WINDOW_S, lambda: self.now, lambda: self.cores)

    def wait(self, until_s: float, came: bool = True) -> bool:
        """One wait for a chunk that is there after `until_s`. Whether it spun."""
        spins = self.spin_wait.spins
        self.spin_wait.begin()
        if spins:
            took = until_s + self.spinning_adds_s
            self.spun_s += min(took, WINDOW_S)
            assert not self.spin_wait.over()
            if took > WINDOW_S:
                self.now += WINDOW_S
                assert self.spin_wait.over()
                self.now += took - WINDOW_S + self.wakes_s
            else:
                self.now += took
        else:
            self.now += until_s + self.wakes_s
        self.spin_wait.ended(came)
        return spins


def test_it_spins_after_enough_short_waits_and_stops_at_the_first_long_one() -> None:
    played = Played()
    assert [played.wait(SHORT_S) for _ in range(STREAK + 20)] == [False] * STREAK + [True] * 20
    assert played.wait(LONG_S), "this one still spun"
    assert [played.wait(SHORT_S) for _ in range(STREAK + 1)] == [False] * STREAK + [True]


def test_a_wait_that_brings_nothing_counts_as_a_long_one() -> None:
    played = Played()
    for _ in range(STREAK - 1):
        played.wait(SHORT_S)
    played.wait(SHORT_S, came=False)
    assert not any(played.wait(SHORT_S) for _ in range(STREAK))
    assert played.wait(SHORT_S)


def test_a_process_with_one_core_never_spins_and_one_that_gets_another_does() -> None:
    played = Played(cores=1)
    assert not any(played.wait(SHORT_S) for _ in range(100))
    played.cores = 2
    assert any(played.wait(SHORT_S) for _ in range(2 * STREAK))


@pytest.mark.parametrize("burst", [1, 2, STREAK])
def test_the_rhythm_of_serving_never_spins(burst: int) -> None:
    """A chunk, or a few, every few milliseconds."""
    played = Played()
    chance = random.Random(burst)
    for _ in range(1000):
        assert not played.wait(chance.uniform(0.003, 0.02))
        assert not any(played.wait(chance.uniform(0, WINDOW_S)) for _ in range(burst - 1))


@pytest.mark.parametrize("burst", [STREAK + 1, STREAK + 4, 2 * STREAK - 1])
def test_bursts_that_end_during_the_trial_cost_less_and_less(burst: int) -> None:
    played = Played()
    for _ in range(2000):
        played.wait(LONG_S)
        for _ in range(burst):
            played.wait(SHORT_S)
    assert played.spun_s <= 2 * (burst * SHORT_S + WINDOW_S), (
        "a trial or two, then the bursts are known to be too short"
    )


def test_spinning_that_gains_nothing_is_given_up_for_longer_and_longer() -> None:
    """As where sender and receiver share a core: spinning itself delays the chunk."""
    played = Played(wakes_s=20e-6, spinning_adds_s=60e-6)
    waits = 40_000
    spun = sum(played.wait(SHORT_S) for _ in range(waits))
    trials = spun / STREAK
    assert 5 <= trials <= 4 + waits / MAX_STREAK + MAX_STREAK.bit_length()


def test_spinning_that_gains_is_kept() -> None:
    played = Played()
    assert sum(played.wait(SHORT_S) for _ in range(10_000)) == 10_000 - STREAK


def test_after_a_good_trial_the_way_back_is_short_again() -> None:
    played = Played(spinning_adds_s=60e-6, wakes_s=20e-6)
    for _ in range(500):
        played.wait(SHORT_S)
    played.spinning_adds_s = 0.0
    while not played.wait(SHORT_S):
        pass
    for _ in range(STREAK):
        assert played.wait(SHORT_S)
    played.wait(LONG_S)
    assert [played.wait(SHORT_S) for _ in range(STREAK + 1)] == [False] * STREAK + [True]


def test_the_setting_and_the_variable_above_it() -> None:
    assert read_spin_s("a-b", {}, {}) == 0.0
    assert read_spin_s("a-b", {"look_us": "100"}, {}) == 100e-6
    assert read_spin_s("a-b", {"look_us": "100"}, {"STRETTO_LOOK_US": "0"}) == 0.0
    for wrong in ("1001", "-1", "1.5", "much", ""):
        with pytest.raises(ValueError, match="a-b: look_us"):
            read_spin_s("a-b", {"look_us": wrong}, {})
