"""Whether a receiver looks for its next chunk for a moment before it sleeps. Used by the shm connector's doorbell.

A look saves the wake-up where the next chunk is almost there, and costs the interpreter's lock and a core where it is
not. So a link is looked at only while that pays: after `STREAK` waits in a row that ended within the window, and where
the process has a second core for the sender. One wait that takes longer, and the link sleeps again: a stage that gets a
chunk every few milliseconds, or a few at a time, never looks. Called by the courier's thread alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

MOST_US = 1000
STREAK = 8
_SETTING, _VARIABLE = "look_us", "STRETTO_LOOK_US"


def read_look_s(link: str, details: Mapping[str, str], environ: Mapping[str, str]) -> float:
    """The window in seconds, of the link's settings or, above them, the environment; 0 is off."""
    text = environ.get(_VARIABLE, details.get(_SETTING, "0"))
    if not text.isdecimal() or int(text) > MOST_US:
        raise ValueError(f"link {link}: {_SETTING} is a number of microseconds up to {MOST_US}, not {text!r}")
    return int(text) / 1e6


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


class Lookout:
    """Decides before each wait, learns from how long it took."""

    __slots__ = ("_asleep_s", "_clock", "_cores", "_start", "_streak", "_window_s", "looks")

    def __init__(
        self,
        window_s: float,
        clock: Callable[[], float] = time.perf_counter,
        cores: Callable[[], int] = usable_cores,
    ) -> None:
        self._window_s = window_s
        # What a sleeping receiver measures has its own wake-up in it, which a look would have saved.
        self._asleep_s = 2 * window_s
        self._clock = clock
        self._cores = cores
        self._start = 0.0
        self._streak = 0
        self.looks = False
        """Whether to look in the wait that was just begun."""

    def begin(self) -> None:
        """A wait begins."""
        self._start = self._clock()

    def over(self) -> bool:
        """The window of this wait has passed: sleep."""
        return self._clock() >= self._start + self._window_s

    def ended(self, came: bool) -> None:
        """The wait is over, with something to show for it or not."""
        took = self._clock() - self._start
        if not came or took > (self._window_s if self.looks else self._asleep_s):
            self._streak, self.looks = 0, False
        elif not self.looks:
            self._streak += 1
            # Asked anew with each streak: where a process may run can change, and streaks are rare.
            self.looks = self._streak == STREAK and self._cores() > 1
