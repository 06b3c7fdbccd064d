"""What stages around a core (`ar.py`, `vocoder/core.py`) have in common. A family's stage adds how
it admits a request, and what it makes of the core's outputs. Driven by the host, on the loop
thread."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import torch

from stretto.errors import Bug
from stretto.messages.requests import Admit
from stretto.preprocess.prompt import Prompt
from stretto.stage.payload import Payload
from stretto.stage.stage import Output, Transfer
from stretto.stage.steps import StepQueue
from stretto.types import RequestId

CoreT = TypeVar("CoreT", bound=StepQueue[Any, Any])


class CoreStage(ABC, Generic[CoreT]):
    """A `Stage` whose steps are those of `core`."""

    name: str
    params: type[msgspec.Struct]
    cheap: ClassVar[bool] = False
    receives: Mapping[str, type[Payload]] = {}
    sends: Mapping[str, type[Payload]] = {}

    def __init__(self, core: CoreT, clock: Callable[[], float] = time.monotonic) -> None:
        self.core = core
        self.clock = clock
        # that `poll` returns next
        self.outputs: list[Output] = []

    def __len__(self) -> int:
        return len(self.core)

    @property
    def due_ns(self) -> int | None:
        return self.core.due_ns

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self.core.stream

    @abstractmethod
    def admit(self, a: Admit, params: Any, prompt: Prompt) -> None: ...

    def accept(self, transfer: Transfer) -> None:
        raise Bug(f"no link ends at {self.name}")

    @abstractmethod
    def cancel(self, id: RequestId) -> None: ...

    def finish(self, id: RequestId) -> None:
        """It ends with its input, which ends by itself."""

    def throttle(self, id: RequestId, on: bool) -> None:
        self.core.throttle(id, on)

    def poll(self) -> Sequence[Output]:
        for confirmed in self.core.poll():
            self.take(confirmed)
        return self.take_outputs()

    def take_outputs(self) -> list[Output]:
        outputs = self.outputs
        self.outputs = []
        return outputs

    def launch(self) -> bool:
        return self.core.launch() or bool(self.outputs)

    @abstractmethod
    def take(self, confirmed: Any) -> None:
        """An output of the core: append to `outputs` what comes of it. Its request may be over."""
