"""The steps that a stage has in flight. Base of the cores of stages (`ar.py`,
`vocoder/core.py`); on the loop thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic, Protocol, TypeVar

import torch

from stretto.observe.recorder import Recorder
from stretto.stage.counters import StageStats
from stretto.stage.launch_timing import LaunchTimer
from stretto.stage.runner.waiter import Waiter
from stretto.types import RequestId


class LaunchedStep(Protocol):
    @property
    def copied(self) -> Any:
        """The CUDA event after which the host has the results. None: on a CPU, where the launch
        was the work."""
        ...

    @property
    def kind(self) -> str:
        """One of `counters.KINDS`."""
        ...


StepT = TypeVar("StepT", bound=LaunchedStep)
OutputT = TypeVar("OutputT")


class StepQueue(ABC, Generic[StepT, OutputT]):
    """Launches steps before earlier ones have been retired, and retires them in order.

    The host calls `poll`, then the core's `launch`. Each `poll` retires one step, so that a host
    that finds several of them done gives the device its next step before it spends time on the
    second. As long as one is left, `launch` returns True and the host polls again at once."""

    def __init__(
        self,
        name: str,
        depth: int,
        timer: LaunchTimer | None = None,
        waiter: Waiter | None = None,
        recorder: Recorder | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`depth`: so many steps may be in flight. `waiter` wakes the loop at their ends;
        `recorder` receives spans. `stream`: where steps run, on a GPU."""
        self.name = name
        self.depth = depth
        self.timer = timer or LaunchTimer((), 0, on=False)
        self.clock = self.timer.clock
        self.waiter = waiter
        self.recorder = recorder or Recorder()
        self.stream = stream
        self.stats = StageStats()
        # when a launch that is held back is due
        self.due_ns: int | None = None
        self._steps: deque[StepT] = deque()
        # that `poll` returns next
        self._outputs: list[OutputT] = []

    @abstractmethod
    def __len__(self) -> int:
        """Requests that it holds anything for."""

    @abstractmethod
    def launch(self) -> bool:
        """Launch one step, if there is something to run. True: one was launched, or `poll` has one
        more to retire. On a CPU the launch is the work, so that `poll` returns what came of it at
        once."""

    @abstractmethod
    def throttle(self, id: RequestId, on: bool) -> None:
        """Make no more of a request for now, or go on with it."""

    @property
    def in_flight(self) -> int:
        """Steps that were launched and are not retired."""
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether one more step may be in flight."""
        return len(self._steps) < self.depth

    @property
    def can_retire(self) -> bool:
        """Whether the oldest step in flight is done."""
        return bool(self._steps) and self._is_done(self._steps[0])

    def poll(self) -> list[OutputT]:
        """Retire the oldest step if it is done; what became certain since the last call, in
        order."""
        if self.can_retire:
            start_ns = self.clock()
            step = self._steps.popleft()
            begin_ns, end_ns = self.timer.retired()
            self.stats.kinds[step.kind].device.observe((end_ns - begin_ns) / 1e9)
            label = self._describe(step) if self.recorder.trace else ""
            self.recorder.span(self.name, label, begin_ns, end_ns)
            self._retire(step)
            done_ns = self.clock()
            self.stats.retire_ns += done_ns - start_ns
            self.recorder.span("loop", f"retire {self.name}", start_ns, done_ns)
        outputs = self._outputs
        self._outputs = []
        return outputs

    def _launched(self, step: StepT, start_ns: int, rows: int, size: int | None = None) -> None:
        """A step of so many rows was launched, which the host began at `start_ns`. `size`: of the
        batch, if steps of one size take the same time."""
        end_ns = self.clock()
        flight = self.timer.launched(size, end_ns - start_ns, done=step.copied is None)
        self._steps.append(step)
        self.stats.steps += 1
        self.stats.rows += rows
        kind = self.stats.kinds[step.kind]
        kind.steps += 1
        kind.launch.observe((end_ns - start_ns) / 1e9)
        self.recorder.span("loop", f"launch {self.name}", start_ns, end_ns)
        if self.waiter is not None and step.copied is not None:
            self.waiter.watch(step.copied, lambda: self.timer.ended(flight))

    @abstractmethod
    def _retire(self, step: StepT) -> None:
        """Append to `_outputs` what the step confirmed. It is not in `_steps` any more."""

    @abstractmethod
    def _describe(self, step: StepT) -> str:
        """Its name in a trace."""

    @staticmethod
    def _is_done(step: StepT) -> bool:
        """Whether the device has finished it, and the host has its results."""
        return step.copied is None or bool(step.copied.query())
