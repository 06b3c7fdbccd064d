"""A device that takes time, on a clock that tests move. The stage's work is done for real when it
is launched; when it counts as done is what this says. So what a stage launches when can be seen, to
the nanosecond, on any machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from stretto.stage.host.loop import TICK_NS, Wakeup
from stretto.stage.runner.runner import Runner
from stretto.stage.scheduler.batch import Batch

MS = 1_000_000


@dataclass
class Clock:
    """Stands still unless moved; with `tick`, each look at it takes so long."""

    now: int = 1_000 * MS
    tick: int = 0

    def __call__(self) -> int:
        self.now += self.tick
        return self.now

    def move_to(self, at: int) -> None:
        self.now = max(self.now, at)


@dataclass
class Fired:
    """In the place of a device's event."""

    clock: Clock
    at: int

    def query(self) -> bool:
        return self.clock() >= self.at

    def synchronize(self) -> None:
        self.clock.move_to(self.at)


@dataclass
class Launch:
    batch: Batch
    at: int  # when the host was done with it
    start: int  # on the device
    end: int


@dataclass
class Device:
    clock: Clock
    lasts: Callable[[Batch], int]
    launch_ns: int = MS // 2  # of the host's time
    launches: list[Launch] = field(default_factory=list)

    def drive(self, runner: Runner) -> None:
        launch = runner.launch

        def timed(batch: Batch) -> Any:
            step = launch(batch)
            if step.copied is not None:
                step.copied.synchronize()
            if step.error is None:
                self.clock.now += self.launch_ns
                start = max(self.clock.now, self.free_ns)
                self.launches.append(
                    Launch(batch, self.clock.now, start, start + self.lasts(batch))
                )
                step.copied = Fired(self.clock, self.free_ns)
            return step

        runner.launch = timed  # type: ignore[method-assign]

    @property
    def free_ns(self) -> int:
        return self.launches[-1].end if self.launches else 0

    def gaps(self) -> list[int]:
        """How long the device stood still before each launch but the first."""
        return [b.start - a.end for a, b in pairwise(self.launches)]

    def next_end(self) -> int | None:
        return next((launch.end for launch in self.launches if launch.end > self.clock.now), None)


class SimulatedWakeup(Wakeup):
    """Woken by the ends of steps and at given times. A sleep moves the clock."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.later: deque[int] = deque()  # other wakes, in order of time
        self.slept: list[int | None] = []
        self.awake = False

    def wake(self) -> None:
        self.awake = True

    def sleep(self, ticks: int | None = None) -> None:
        self.slept.append(ticks)
        clock = self.device.clock
        if self.awake:
            self.awake = False
            return
        while self.later and self.later[0] <= clock.now:
            self.later.popleft()
        times = [self.device.next_end(), self.later[0] if self.later else None]
        times.append(None if ticks is None else clock.now + ticks * TICK_NS)
        known = [at for at in times if at is not None]
        assert known, "asleep, and nothing will ever wake it"
        clock.move_to(min(known))
