"""A stage with its links: what turns control messages and payloads into requests, and outputs into payloads and
reports. Families write these.

One node per stage of a host, driven by the loop: `admit`, `cancel`, `finish` and `throttle` come as messages, `turn`
takes in what has arrived, gives the stage its turn and sends what it made. All on the loop thread. A node never waits:
a full link leaves chunks in the outlet and marks their request as blocked, so that only it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch

from stretto.control.messages import Admit
from stretto.prompt.prompt import Piece, Prompt
from stretto.stage.links import Inlet, Outlet
from stretto.types import RequestId


class Node(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def params(self) -> type[msgspec.Struct]:
        """What it is told of a request."""
        ...

    @property
    def cheap(self) -> bool:
        """Its turns are short, so that it may have several in a round."""
        ...

    @property
    def inlets(self) -> Sequence[Inlet[Any]]: ...

    @property
    def outlets(self) -> Sequence[Outlet[Any]]: ...

    @property
    def due_ns(self) -> int | None:
        """When it wants another turn though nothing rings, by the loop's clock; at least a tick from its last turn."""
        ...

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where its steps run, on a GPU."""
        ...

    def __len__(self) -> int:
        """Requests that it holds anything for."""
        ...

    def admit(self, a: Admit, params: Any, prompt: Prompt) -> None:
        """A request is coming. `params` are of this node's type."""
        ...

    def cancel(self, id: RequestId) -> None:
        """End a request wherever it is; nothing more is reported of it."""
        ...

    def finish(self, id: RequestId) -> None:
        """What a request has made here is all there shall be: it ends in good order."""
        ...

    def throttle(self, id: RequestId, on: bool) -> None:
        """A request's listener is slow: make no more for now, or go on."""
        ...

    def turn(self) -> bool:
        """Do what can be done now, without waiting. True: something was."""
        ...


@runtime_checkable
class Asking(Protocol):
    """A node that asks for features that did not come with a request (`Lacking`)."""

    def supply(self, id: RequestId, pieces: Sequence[Piece]) -> None:
        """They are here; the request may be over."""
        ...


@runtime_checkable
class TakesText(Protocol):
    """A node that can be told a text while it is written."""

    def take_text(self, id: RequestId, tokens: Sequence[int], last: bool) -> None: ...
