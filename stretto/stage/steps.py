"""The steps that a stage has in flight. Base of the cores of stages (`ar.py`,
`vocoder/core.py`); on the loop thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, Protocol, TypeVar


class StepInFlight(Protocol):
    """A step that was launched and is not retired."""

    @property
    def done(self) -> bool:
        """The device has finished it, and the host has its results."""
        ...


StepT = TypeVar("StepT", bound=StepInFlight)
OutputT = TypeVar("OutputT")


class StepQueue(ABC, Generic[StepT, OutputT]):
    """Launches steps before earlier ones have been retired, and retires them in order.

    The host calls `poll`, then the core's `launch`. Each `poll` retires one step, so that a host
    that finds several of them done gives the device its next step before it spends time on the
    second. As long as one is left, `launch` returns True and the host polls again at once."""

    def __init__(self, depth: int) -> None:
        """`depth`: so many steps may be in flight."""
        self.depth = depth
        self._steps: deque[StepT] = deque()
        # that `poll` returns next
        self._outputs: list[OutputT] = []

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
        return bool(self._steps) and self._steps[0].done

    def poll(self) -> list[OutputT]:
        """Retire the oldest step if it is done; what became certain since the last call, in
        order."""
        if self.can_retire:
            self._retire(self._steps.popleft())
        outputs = self._outputs
        self._outputs = []
        return outputs

    @abstractmethod
    def _retire(self, step: StepT) -> None:
        """Append to `_outputs` what the step confirmed. It is not in `_steps` any more."""
