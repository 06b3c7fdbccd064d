"""What a host knows of a stage, and what a stage gives back to it. Families write stages.

A stage does no I/O: what concerns it comes as method calls, and what it makes is returned by
`poll`. The host moves outputs: payloads to the stage behind, here or in another process, and
reports to the engine. Nothing in a stage waits. All on the loop thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch

from stretto.messages.requests import Admit, FromHost
from stretto.preprocess.prompt import Piece, Prompt
from stretto.stage.links.copies import adopt
from stretto.stage.payload import Payload
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


class Stage(Protocol):
    """One stage of a host. A request uses a link of a stage if both of the link's stages are on the
    request's way."""

    @property
    def name(self) -> str: ...

    @property
    def params(self) -> type[msgspec.Struct]:
        """What it needs to know of a request."""
        ...

    @property
    def receives(self) -> Mapping[str, type[Payload]]:
        """Links that end here, and what comes by them."""
        ...

    @property
    def sends(self) -> Mapping[str, type[Payload]]:
        """Links that begin here, and what goes by them."""
        ...

    @property
    def cheap(self) -> bool:
        """It is polled in little time, so that it may be polled several times in a round."""
        ...

    @property
    def due_ns(self) -> int | None:
        """When it must be polled again though nothing wakes the loop, by the loop's clock; at least
        a tick from now."""
        ...

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where its steps run, on a GPU."""
        ...

    def __len__(self) -> int:
        """Requests that it holds anything for."""
        ...

    def admit(self, a: Admit, params: Any, prompt: Prompt) -> None:
        """A request is coming. `params` are of this stage's type. Keeps nothing of one that it
        refuses."""
        ...

    def accept(self, transfer: Transfer) -> None:
        """Rows from the stage before, in order. They may be of a request that is over."""
        ...

    def cancel(self, id: RequestId) -> None:
        """End a request wherever it is; nothing more is returned of it."""
        ...

    def finish(self, id: RequestId) -> None:
        """What a request has made here is all there shall be: it ends in good order."""
        ...

    def throttle(self, id: RequestId, on: bool) -> None:
        """A request's listener is slow, or its link is full: make no more for now, or go on."""
        ...

    def poll(self) -> Sequence[Output]:
        """Look at what the device has done; what became certain since the last call, in order."""
        ...

    def launch(self) -> bool:
        """Give the device more to do, if there is something. True: it was given, or `poll` has
        something to return. On a CPU this does the work."""
        ...


@runtime_checkable
class TakesFeatures(Protocol):
    """A stage that asks for features that did not come with a request (`MediaRequest`)."""

    def supply(self, id: RequestId, pieces: Sequence[Piece]) -> None:
        """They are here; the request may be over."""
        ...


@runtime_checkable
class TakesStepInputs(Protocol):
    """A stage whose steps consume tokens that come while the request runs, such as a text that is
    read aloud while it is written."""

    def take_step_inputs(self, id: RequestId, tokens: Sequence[int], last: bool) -> None: ...
