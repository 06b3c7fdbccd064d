"""How far another machine's monotonic clock is from ours, by asking it the time. Pure; imports no
torch.

An answer is off by at most half of its round trip, so the fastest recent one is used. Clocks drift,
so the error of an old answer grows with time, until a new one is better."""

from __future__ import annotations

from dataclasses import dataclass

DRIFT = 1e-4
"""Seconds that two clocks may part in a second: twice what cheap quartz does."""


@dataclass(slots=True)
class ClockOffset:
    """`offset` is their clock less ours, true within `error` at the time of `at`."""

    offset: float = 0.0
    error: float = float("inf")
    at: float = 0.0

    def add(self, sent: float, received: float, theirs: float) -> None:
        """They were asked at `sent`, answered at `theirs` by their clock, and we heard at
        `received`."""
        error = (received - sent) / 2
        if 0 <= error <= self.error + DRIFT * (received - self.at):
            self.offset = theirs - (sent + received) / 2
            self.error = error
            self.at = received
