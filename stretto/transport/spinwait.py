"""Whether a receiver spins for a moment before it sleeps. Used by the shm connector's `notesocket`.

Spinning saves the wake-up if the next chunk is almost there and a core is free. Otherwise it takes
the core away from the sender, or the interpreter's lock from the stage loop. So a link spins only
while measurements say that it pays:

    asleep --enough short waits in a row, and the process may use a second core--> on trial on trial
    --its waits are shorter than the sleeping ones were--> spinning on trial --they are not, or one
    takes longer than the window--> asleep; the next trial needs twice as many waits spinning --one
    wait takes longer than the window--> asleep

A stage that gets a chunk every few milliseconds, or a few at a time, never spins. Called by the
courier's thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

MAX_US = 1000
STREAK = 8
"""Short waits in a row before the first trial, and the number of waits of a trial."""
MAX_STREAK = 4096

SETTING, VARIABLE = "look_us", "STRETTO_LOOK_US"


def read_spin_s(link: str, details: Mapping[str, str], environ: Mapping[str, str]) -> float:
    """The window in seconds, from the link's details or, with precedence, the environment; 0: never
    spin."""
    text = environ.get(VARIABLE, details.get(SETTING, "0"))
    if not text.isdecimal() or int(text) > MAX_US:
        raise ValueError(
            f"link {link}: {SETTING} is a number of microseconds up to {MAX_US}, not {text!r}"
        )
    return int(text) / 1e6


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


class SpinWait:
    """Decides before each wait whether to spin, from how long the last waits took."""

    __slots__ = (
        "_asleep_s",
        "_clock",
        "_cores",
        "_needed",
        "_short_s",
        "_start",
        "_total_s",
        "_waits",
        "_window_s",
        "spins",
    )

    def __init__(
        self,
        window_s: float,
        clock: Callable[[], float] = time.perf_counter,
        cores: Callable[[], int] = usable_cores,
    ) -> None:
        self._window_s = window_s
        # A wait that slept includes its wake-up, which spinning would save.
        self._short_s = 2 * window_s
        self._clock = clock
        self._cores = cores
        self._start = 0.0
        self._needed = STREAK
        self._waits = 0  # short ones in a row, in this state
        self._total_s = 0.0  # of those
        self._asleep_s = 0.0  # average of the short waits before the trial
        self.spins = False
        """Whether to spin in the next wait."""

    def begin(self) -> None:
        """A wait begins."""
        self._start = self._clock()

    def over(self) -> bool:
        """The window of this wait has passed: sleep."""
        return self._clock() >= self._start + self._window_s

    def ended(self, came: bool) -> None:
        """The wait is over; `came`: something arrived."""
        took = self._clock() - self._start
        short = came and took <= (self._window_s if self.spins else self._short_s)
        if short:
            self._waits += 1
            self._total_s += took
        if self.spins:
            self._judge(short)
        elif not short:
            self._reset()
        elif self._waits >= self._needed:
            self._asleep_s = self._total_s / self._waits
            self._reset()
            # Read each time, since a process's affinity can change.
            self.spins = self._cores() > 1

    def _judge(self, short: bool) -> None:
        on_trial = self._waits <= STREAK
        if short and not (self._waits == STREAK and self._total_s >= STREAK * self._asleep_s):
            if self._waits == STREAK:
                self._needed = STREAK
            return
        if on_trial:
            self._needed = min(2 * self._needed, MAX_STREAK)
        self.spins = False
        self._reset()

    def _reset(self) -> None:
        self._waits = 0
        self._total_s = 0.0
