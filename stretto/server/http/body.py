"""A request's body while it arrives. It counts against its client's share of the bytes of all
bodies, and is never one large object on the event loop: small bodies are plain bytes, larger ones
are written part by part to a memory file.

`Exchange.read_body` fills it and the routes read it, on the event loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.preprocess.pool.memfile import MemFile
from stretto.server.openai.error_body import Refused
from stretto.server.shares import Shares

# bytes that are cut into fields on the event loop, in a millisecond at worst
ON_THE_LOOP = 256 << 10
TURN_BYTES = 256 << 10  # of large bodies that are read in one turn of the loop: half a millisecond
TURN_REST_S = 0.001  # between two such turns, so that uploads have a third of the loop at most


@dataclass(slots=True, eq=False)
class Body:
    """Whoever makes it closes it; the prompt's builder may do so before, and twice does no harm.

    `shares`: bytes of all bodies that are held at the moment."""

    shares: Shares
    client: str
    size: int = 0
    memfile: MemFile | None = None  # holds all of it, once it is large
    _parts: list[bytes] = field(default_factory=list)
    _attached: list[MemFile] = field(default_factory=list)

    def add(self, part: bytes) -> None:
        self.reserve(len(part))
        if self.memfile is None and self.size > ON_THE_LOOP:
            self.memfile = MemFile.of(*self._parts)
            self._parts.clear()
        if self.memfile is None:
            self._parts.append(part)
        else:
            self.memfile.append(part)

    def reserve(self, size: int) -> None:
        """Count so many bytes more among those of this request."""
        if not self.shares.take(self.client, size):
            raise self._too_many(size)
        self.size += size

    def attach(self, memfile: MemFile) -> None:
        """A file that was fetched for this request: it goes when the body does."""
        self._attached.append(memfile)

    @property
    def data(self) -> bytes:
        """All of it, for routes that take no large ones."""
        if self.memfile is None:
            return b"".join(self._parts)
        return self.memfile.read(0, self.memfile.size)

    def replace(self, memfile: MemFile) -> None:
        """The same in another form."""
        assert self.memfile is not None
        self.memfile.close_in_thread()
        self.memfile = memfile

    def close(self) -> None:
        self.shares.give_back(self.client, self.size)
        self.size = 0
        self._parts.clear()
        for memfile in self._attached:
            memfile.close_in_thread()
        if self.memfile is not None:
            self.memfile.close_in_thread()

    def _too_many(self, size: int) -> Refused:
        if self.shares.free < size:
            message = "the server holds as many bytes of requests as it can; try again soon"
            code = "server_busy"
        else:
            message = "the server holds your share of the bytes of requests; try again soon"
            code = "rate_limit_exceeded"
        headers = {"connection": "close"}
        return Refused(429, message, kind="rate_limit_error", code=code, headers=headers)
