"""When a stage should launch its next step: late enough that a prompt can still get in front of it,
early enough that the device never waits. One `LaunchTimer` per stage, whose core reports every
launch and retirement to it, on the loop thread; it reads nothing but its clock. Imports no torch.

A second step in flight keeps the device busy while the host looks at the first one's tokens.
Launched when the first has just begun, it lies in the queue for a whole step, and whatever arrives
meanwhile has to wait behind it. So it is held back until shortly before the first is expected to
end. Only steps of which that is known are waited for: those that decode and nothing else, at a
batch size that was seen a few times. Everything else is launched at once.

            launch                    due ◀─ margin ─▶
    step 1    |██████████████████████████|███████████|
    step 2                               └── launch ──|██████████████████████
                     a prompt that comes here ↑ is in step 2"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stretto.stage.host.loop import TICK_NS

WINDOW = 16
MIN_TIMES = 4
"""Recent times that count, and how many there must be at least."""


@dataclass(slots=True, eq=False)
class Flight:
    """A step between its launch and its end."""

    # of the decode step that it is; None: nobody knows how long it takes
    size: int | None
    # the launch was done; on a CPU, it began
    launched_ns: int
    ended_ns: int | None = None


@dataclass(slots=True, eq=False)
class Recent:
    """The last few times that something took. One outlier on either side does not count."""

    took: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    # second shortest
    low: int | None = None
    # second longest
    high: int | None = None

    def add(self, ns: int) -> None:
        self.took.append(ns)
        if len(self.took) >= MIN_TIMES:
            ordered = sorted(self.took)
            self.low = ordered[1]
            self.high = ordered[-2]


class LaunchTimer:
    def __init__(
        self,
        sizes: Sequence[int],
        lead_ns: int,
        on: bool = True,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`sizes` that decode steps are padded to; `lead_ns`: what may come between the due time
        and the launch, such as launches of the other stages. When not `on`, every step is due at
        once."""
        self.sizes = sorted(sizes)
        self.lead_ns = lead_ns
        self.on = on
        self.clock = clock
        # short ones count: rather too early
        self._steps: dict[int, Recent] = {size: Recent() for size in self.sizes}
        # long ones count, for the same reason
        self._launches = Recent()
        self._flights: deque[Flight] = deque()
        # the device had done everything that was retired
        self._free_ns = 0

    def launched(self, rows: int | None, took_ns: int, done: bool = False) -> Flight:
        """A step was launched: one that only decodes, of `rows` rows, or another (None). `took_ns`:
        the host's time. `done`: on a CPU, where the launch was the work."""
        at = len(self.sizes) if rows is None else bisect_left(self.sizes, rows)
        size = self.sizes[at] if at < len(self.sizes) else None
        if size is not None:
            self._launches.add(took_ns)
        now = self.clock()
        flight = Flight(size, now - took_ns, now) if done else Flight(size, now)
        self._flights.append(flight)
        return flight

    def ended(self, flight: Flight) -> None:
        """The device is done with it. Called by whoever learns of it first, also on another
        thread."""
        flight.ended_ns = self.clock()

    def retired(self) -> tuple[int, int]:
        """The oldest step was found to be done. When the device began with it, and when it was
        done."""
        flight = self._flights.popleft()
        # The loop may have been busy for a while before it looked; the waiter's thread was not.
        ended = self.clock() if flight.ended_ns is None else flight.ended_ns
        begun = min(self._begun(flight), ended)
        if flight.size is not None:
            self._steps[flight.size].add(ended - begun)
        self._free_ns = ended
        return begun, ended

    def due_ns(self) -> int | None:
        """When to launch the next step. None: now."""
        if not self.on or not self._flights or self._launches.high is None:
            return None
        lasts = 0
        for flight in self._flights:
            usual = None if flight.size is None else self._steps[flight.size].low
            if usual is None:
                return None
            lasts += usual
        margin = self.lead_ns + self._launches.high
        if lasts < 2 * margin:
            # there is little to gain, and a late launch costs more
            return None
        due = self._begun(self._flights[0]) + lasts - margin
        return due if due - self.clock() >= TICK_NS else None

    def _begun(self, flight: Flight) -> int:
        """When the oldest flight came to be the one that runs."""
        return max(flight.launched_ns, self._free_ns)
