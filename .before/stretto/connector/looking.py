"""Whether a receiver looks for its next chunk for a moment before it sleeps. Used by the shm connector's doorbell.

A look saves the wake-up where the next chunk is almost there and a core is free for it; elsewhere it costs the sender
that core, or the stage loop the interpreter's lock. So a link is looked at only while that pays:

    asleep --enough short waits in a row, and the process has a second core--> on trial
    on trial --its waits are shorter than the sleeping ones were--> looking
    on trial --they are not, or one takes longer than the window--> asleep, and twice as many are enough the next time
    looking --one wait takes longer than the window--> asleep

A stage that gets a chunk every few milliseconds, or a few at a time, never looks. Called by the courier's thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

MOST_US = 1000
STREAK = 8
"""Short waits in a row that are enough at first, and waits of a trial."""
MOST_STREAK = 4096

SETTING, VARIABLE = "look_us", "STRETTO_LOOK_US"


def read_look_s(link: str, details: Mapping[str, str], environ: Mapping[str, str]) -> float:
    """The window in seconds, from the link's settings or, above them, the environment; 0 is off."""
    text = environ.get(VARIABLE, details.get(SETTING, "0"))
    if not text.isdecimal() or int(text) > MOST_US:
        raise ValueError(f"link {link}: {SETTING} is a number of microseconds up to {MOST_US}, not {text!r}")
    return int(text) / 1e6


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


class Lookout:
    """Decides before each wait, learns from how long it took."""

    __slots__ = (
        "_asleep_s",
        "_clock",
        "_cores",
        "_enough",
        "_short_s",
        "_start",
        "_total_s",
        "_waits",
        "_window_s",
        "looks",
    )

    def __init__(
        self,
        window_s: float,
        clock: Callable[[], float] = time.perf_counter,
        cores: Callable[[], int] = usable_cores,
    ) -> None:
        self._window_s = window_s
        # What a sleeping receiver measures has its own wake-up in it, which a look would save.
        self._short_s = 2 * window_s
        self._clock = clock
        self._cores = cores
        self._start = 0.0
        self._enough = STREAK
        self._waits = 0  # short ones in a row, in this state
        self._total_s = 0.0  # of those
        self._asleep_s = 0.0  # what one took on average, before the trial
        self.looks = False
        """Whether to look in the next wait."""

    def begin(self) -> None:
        """A wait begins."""
        self._start = self._clock()

    def over(self) -> bool:
        """The window of this wait has passed: sleep."""
        return self._clock() >= self._start + self._window_s

    def ended(self, came: bool) -> None:
        """The wait is over, with something to show for it or not."""
        took = self._clock() - self._start
        short = came and took <= (self._window_s if self.looks else self._short_s)
        if short:
            self._waits += 1
            self._total_s += took
        if self.looks:
            self._judge(short)
        elif not short:
            self._count_anew()
        elif self._waits >= self._enough:
            self._asleep_s = self._total_s / self._waits
            self._count_anew()
            # Asked each time, since where a process may run can change.
            self.looks = self._cores() > 1

    def _judge(self, short: bool) -> None:
        on_trial = self._waits <= STREAK
        if short and not (self._waits == STREAK and self._total_s >= STREAK * self._asleep_s):
            if self._waits == STREAK:
                self._enough = STREAK
            return
        if on_trial:
            self._enough = min(2 * self._enough, MOST_STREAK)
        self.looks = False
        self._count_anew()

    def _count_anew(self) -> None:
        self._waits, self._total_s = 0, 0.0
