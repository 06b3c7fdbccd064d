"""What a host knows of a stage, and what a stage gives back to it. Families write stages.

A stage does no I/O: what concerns it comes as method calls, and what it makes is returned by
`poll`. The host moves outputs: payloads to the stage behind, here or in another process, and
reports to the engine. Nothing in a stage waits. All on the loop thread."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import torch

from stretto.errors import Bug, WireError
from stretto.messages.requests import Admit, FromHost
from stretto.preprocess.prompt import Piece, Prompt
from stretto.stage.links.copies import adopt
from stretto.stage.payload import Payload
from stretto.stage.steps import StepQueue
from stretto.types import Mark, RequestId


@dataclass(slots=True, eq=False)
class Transfer:
    """The next rows of a request on a link: an output of one stage, which the stage behind accepts.
    The payload is the receiver's during the call of `accept` only."""

    link: str
    request: RequestId
    # of the type that both stages declare for the link; None: nothing but the mark
    payload: Any
    mark: Mark = Mark.MORE
    # device tensors are complete once it has fired
    event: torch.cuda.Event | None = None

    def adopt(self) -> None:
        """Make the current stream wait for the payload's device tensors, and keep their memory from
        being used again under it."""
        if self.event is not None and self.payload is not None:
            adopt(self.payload.tensors().values(), self.event)


@dataclass(slots=True, eq=False)
class ToEngine:
    """A report: text, codes, samples, the end of a request here, its failure."""

    message: FromHost
    blob: bytes = b""


Output = Transfer | ToEngine


class Stage(ABC):
    """One stage of a host. A request uses a link of a stage if both of the link's stages are on the
    request's path."""

    name: str
    # what it needs to know of a request
    params: type[msgspec.Struct]
    # links that end here, and what comes by them
    receives: Mapping[str, type[Payload]] = {}
    # links that begin here, and what goes by them
    sends: Mapping[str, type[Payload]] = {}
    # it is polled in little time, so that it may be polled several times in a round
    cheap: bool = False
    # where its steps run, on a GPU
    stream: torch.cuda.Stream | None = None

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        # that `poll` returns next
        self.outputs: list[Output] = []

    @abstractmethod
    def __len__(self) -> int:
        """Requests that it holds anything for."""

    @property
    def due_ns(self) -> int | None:
        """When it must be polled again though nothing wakes the loop, by the loop's clock; at least
        a tick from now."""
        return None

    @abstractmethod
    def admit(self, a: Admit, params: Any, prompt: Prompt) -> None:
        """A request is coming. `params` are of this stage's type. Keeps nothing of one that it
        refuses."""

    def accept(self, transfer: Transfer) -> None:
        """Rows from the stage before, in order. They may be of a request that is over."""
        raise Bug(f"no link ends at {self.name}")

    def take_step_inputs(self, id: RequestId, tokens: Sequence[int], last: bool) -> None:
        """Tokens that the steps of a request consume and that come while it runs, such as a text
        that is read aloud while it is written."""
        raise WireError(f"{self.name!r} takes no step inputs")

    def supply(self, id: RequestId, pieces: Sequence[Piece]) -> None:
        """Features that did not come with a request and that the stage has requested
        (`MediaRequest`). The request may be over."""
        raise WireError(f"features for {self.name!r}, which requests none")

    @abstractmethod
    def cancel(self, id: RequestId) -> None:
        """End a request wherever it is; nothing more is returned of it."""

    def finish(self, id: RequestId) -> None:  # noqa: B027  most stages end with their input
        """What a request has made here is all there shall be: it ends in good order."""

    @abstractmethod
    def throttle(self, id: RequestId, on: bool) -> None:
        """A request's listener is slow, or its link is full: make no more for now, or go on."""

    @abstractmethod
    def poll(self) -> Sequence[Output]:
        """Look at what the device has done; what became certain since the last call, in order."""

    def take_outputs(self) -> list[Output]:
        outputs = self.outputs
        self.outputs = []
        return outputs

    @abstractmethod
    def launch(self) -> bool:
        """Give the device more to do, if there is something. True: it was given, or `poll` has
        something to return. On a CPU this does the work."""


CoreT = TypeVar("CoreT", bound=StepQueue[Any, Any])


class CoreStage(Stage, Generic[CoreT]):
    """A stage whose steps are those of a core (`ar.py`, `vocoder/core.py`). A family's stage adds
    how it admits a request, and what it makes of the core's outputs."""

    def __init__(self, core: CoreT, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.core = core
        self.stream = core.stream

    def __len__(self) -> int:
        return len(self.core)

    @property
    def due_ns(self) -> int | None:
        return self.core.due_ns

    def throttle(self, id: RequestId, on: bool) -> None:
        self.core.throttle(id, on)

    def poll(self) -> Sequence[Output]:
        for confirmed in self.core.poll():
            self.take(confirmed)
        return self.take_outputs()

    def launch(self) -> bool:
        return self.core.launch() or bool(self.outputs)

    @abstractmethod
    def take(self, confirmed: Any) -> None:
        """An output of the core: append to `outputs` what comes of it. Its request may be over."""
