"""A request's body while it arrives: within limits of size, rate and all bodies together, and never in one piece on the
event loop. Small bodies are plain bytes; larger ones go into a memory file, part by part.

Used by `exchange.py` and the endpoints, on the event loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.prompt.spool import Spool
from stretto.server.failures import Refused

ON_THE_LOOP = 256 << 10  # bytes that are cut into fields on the event loop, in a millisecond at worst


@dataclass(slots=True)
class BodyBudget:
    """Bytes of all bodies that are held at the moment."""

    limit: int
    held: int = 0

    def take(self, size: int) -> None:
        if self.held + size > self.limit:
            message = "the server holds as many bytes of requests as it can; try again soon"
            raise Refused(429, message, kind="rate_limit_error", code="server_busy", headers={"connection": "close"})
        self.held += size

    def give_back(self, size: int) -> None:
        self.held -= size


@dataclass(slots=True, eq=False)
class Body:
    """Use it in a `with` statement: what it holds is given back at its end, if not by `close` before."""

    budget: BodyBudget
    size: int = 0
    spool: Spool | None = None  # holds all of it, once it is large
    _parts: list[bytes] = field(default_factory=list)

    def add(self, part: bytes) -> None:
        self.budget.take(len(part))
        self.size += len(part)
        if self.spool is None and self.size > ON_THE_LOOP:
            self.spool = Spool.of(*self._parts)
            self._parts.clear()
        if self.spool is None:
            self._parts.append(part)
        else:
            self.spool.append(part)

    @property
    def data(self) -> bytes:
        """All of it, for routes that take no large ones."""
        return b"".join(self._parts) if self.spool is None else self.spool.read(0, self.spool.size)

    def replace(self, spool: Spool) -> None:
        """The same in another form."""
        assert self.spool is not None
        self.spool.close()
        self.spool = spool

    def close(self) -> None:
        self.budget.give_back(self.size)
        self.size = 0
        self._parts.clear()
        if self.spool is not None:
            self.spool.close()

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
