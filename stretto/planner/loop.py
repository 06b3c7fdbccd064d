"""The host's one thread, as `stage/loop.py` has it: rounds of turns, one thing after the other, and sleep after a round
in which nothing happened. Time is told to it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stretto.stage.loop import TICK_NS

TICK_S = TICK_NS / 1e9
Turn = Callable[[], bool]


class HostLoop:
    """A turn is taken at the moment at which the one before it is done, and sees what has happened until then."""

    def __init__(self, turns: Sequence[Turn], due: Callable[[], float | None]) -> None:
        """`due`: when something that is held back wants another round."""
        self.free = 0.0  # until when it is busy
        self.wakes: float | None = None  # by itself, when asleep
        self._turns, self._due = turns, due
        self._next, self._did, self._asleep = 0, False, True

    def busy(self, now: float, ms: float) -> float:
        """Work of the turn that is being taken. When it is done."""
        self.free = max(now, self.free) + ms / 1e3
        return self.free

    def ring(self) -> None:
        self._asleep = False

    @property
    def next(self) -> float | None:
        """When it goes on, unless something happens before."""
        return self.wakes if self._asleep else self.free

    def run(self, now: float) -> None:
        """Take turns until one of them takes time, or until there is nothing to do."""
        if self._asleep and self.wakes is not None and self.wakes <= now:
            self.ring()
        while not self._asleep and self.free <= now:
            self._did = self._turns[self._next]() or self._did
            self._next = (self._next + 1) % len(self._turns)
            if not self._next:
                self._asleep, self._did = not self._did, False
                due = self._due() if self._asleep else None
                # In whole ticks: what is due within less is due now.
                self.wakes = None if due is None else now + max(1, math.floor((due - now) / TICK_S)) * TICK_S
