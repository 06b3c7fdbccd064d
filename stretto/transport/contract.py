"""The connector contract: what the two ends of a link promise, whichever transport is below.

A link is one way and joins two processes. The receiving side *listens* and gets a `Receiver`, whose
`endpoint` travels over the control plane to the sending side, which *connects* and gets a `Sender`.
One receiver serves one sender for one generation; after a death or a close, both sides start again
with a new `listen` and a higher generation. One contract suite (`tests/transport/contract/`) runs
the rules below against every connector.

**Threads.** `put`, `progress` and `take` may wait, so only the link's courier threads call them,
one thread per end. All other methods never block and may be called from any thread.

**Order.** `take` yields the chunks in the order of `put`, each exactly once, whole.

**Ownership.** A `put` that returns True has taken over the chunk: the connector calls
`chunk.release()` as soon as it no longer reads the tensors. A `put` that returns False or raises
leaves the chunk with the caller. Device tensors are copied to the host asynchronously, at most
`options.copies` chunks at a time. Their chunks are sent in order as the copies finish, by
`progress`, which the thread that puts calls until it returns 0. Memory that such a copy reads or
writes is freed only when the copy is done, however the link ends. A taken chunk's tensors are views
of the connector's memory and stay valid until its `release()`, also after `close()`. Releasing
twice is allowed and does nothing.

**Credits.** At most `options.slots` chunks are between `put` and `release`. Without a credit `put`
waits, and returns False when the timeout passes: that is backpressure, not a fault, and nothing was
sent. Chunks are never dropped and never buffered beyond the credits. Only the receiver's `release`
(or a refusal, or a purge) returns one.

**Purge.** `purge(request)` drops the chunks of `request`, those not yet taken and those still to
come. The receiver skips them inside `take` and returns their credits; the sender's `put` discards
them (releases the chunk, returns True). The inbox ignores those already taken. Each end is told by
its own control message, so a purge never waits behind data. See `PurgedRequests`.

**Closing.** After the sender's `close`, the receiver takes what was put and then gets `LinkClosed`
from every call. After the receiver's `close`, the sender gets `LinkClosed` at once. A blocked `put`
or `take` returns with `LinkClosed` when its own end is closed by another thread. `close` is
idempotent, joins the threads that the end started, and frees descriptors and memory (memory under a
lease is freed by the last `release`).

**Death** of the peer is reported differently: `PeerDead`, at both ends, within `DEATH_S`, from
`put`, `take` and `check` alike, also on an idle link, and from then on always. A receiver may first
return chunks that had arrived whole, never a partial one. Nothing stays behind: no segment, file,
descriptor or thread.

**Refusal.** A chunk that arrives corrupted or in another version is dropped by `take`, which
returns its credit and raises `Corrupt` or `VersionMismatch` (with the request, if the header could
be read). The sender is told. It knows the request of each chunk in flight, and `refusals()` returns
a `ChunkRefused` that names it. The link goes on. A chunk that can never be sent (larger than a
slot) is a `PutFailed`, at once.

**Authentication.** A link has a secret (`options.secret`), fresh for every generation, without
which neither end opens (`Invalid`). A peer that does not prove that it holds the secret gets no
further: nothing that it sends is kept, its connection is closed, and it does not keep the invited
sender out.

**Names.** No text from a client appears in an address, a file name or a segment name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar, Protocol

import msgspec
import torch

from stretto.errors import Gone, StageDead, StrettoError, WireError
from stretto.types import Mark, RequestId, Span

WIRE_VERSION = 3
DEATH_S = 0.5
"""A peer's death is seen by the other end within this time, busy or idle."""
MAX_COUNT = 2**53
"""Bound of every counter in a header: exact in any language's numbers, never reached."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_COUNT)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"\A[A-Za-z0-9_.:-]+\Z")]


class Dtype(StrEnum):
    """Element types that may cross a link; the value is torch's own name."""

    # an enum's own is Python code, and these are looked up with every chunk
    __hash__ = str.__hash__

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    BOOL = "bool"


class TensorMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a header's tensor table. `offset` counts from the start of the blob area."""

    name: Name
    dtype: Dtype
    shape: tuple[Count, ...]
    offset: Count


class ChunkHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a chunk is, apart from its bytes. Build one with `wire.chunk`, which lays out the tensor
    table."""

    version: Count
    request: Annotated[
        RequestId, msgspec.Meta(min_length=1, max_length=64, pattern=r"\A[A-Za-z0-9_.:-]+\Z")
    ]
    seq: Count
    start: Count
    stop: Count
    mark: Mark
    tensors: tuple[TensorMeta, ...]

    @property
    def span(self) -> Span:
        return Span(self.start, self.stop)


class Lease(Protocol):
    """The right to read some memory, given back exactly once."""

    def release(self) -> None: ...


class CopyEvent(Protocol):
    """The part of a CUDA event that connectors use. Recorded after some copies."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(slots=True, eq=False)
class Chunk:
    """A header with its tensors, and the lease that keeps them valid.

    Host tensors need no event. Device tensors come with the event that was recorded after their
    last write: a reader makes its stream wait for it."""

    header: ChunkHeader
    tensors: Mapping[str, torch.Tensor]
    lease: Lease | None = None
    event: torch.cuda.Event | None = None

    def release(self) -> None:
        """Give the memory back. The tensors must not be used afterwards, so the chunk drops
        them."""
        lease = self.lease
        self.lease = None
        self.tensors = _RELEASED
        if lease is not None:
            lease.release()


_RELEASED: Mapping[str, torch.Tensor] = MappingProxyType({})


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a receiver listens. Travels over the control plane; holds no secret and no client text.

    `generation` tells a restarted listener from its predecessor. `nonce` (random, hex) makes every
    endpoint different. `details` belongs to the connector (a session name, a seal)."""

    connector: Name
    link: Name
    address: str
    generation: Count
    nonce: str
    slots: Annotated[int, msgspec.Meta(ge=1)]
    slot_bytes: Annotated[int, msgspec.Meta(ge=1)]
    details: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How a link is set up. Both ends get the same, but for `slots` and `slot_bytes`, which the
    listener decides and the endpoint carries."""

    slots: int = 32
    slot_bytes: int = 1 << 20  # of an encoded chunk, prefix and header included
    generation: int = 0
    # of blobs; None: the connector's default (on for networks, off in memory)
    checksum: bool | None = None
    copies: int = 4  # chunks whose tensors may be in copy from the device at a time
    # off: encode into a bytes object first, then copy it (an oracle; same bytes)
    zero_copy: bool = True
    connect_timeout_s: float = 5.0
    host: str = "127.0.0.1"  # interface that a network connector binds
    secret: bytes | None = field(default=None, repr=False)  # known to the two ends only
    details: Mapping[str, str] = field(default_factory=dict)  # settings of one connector

    def __post_init__(self) -> None:
        if (
            min(self.slots, self.slot_bytes, self.copies) < 1
            or self.generation < 0
            or self.connect_timeout_s <= 0
        ):
            raise ValueError(f"not link options: {self}")


class OnLink(StrettoError):
    """Base of a link's errors: names the link, and the request where it is known."""

    message: str  # without the names
    link: str
    request: RequestId | None

    def __init__(self, message: str, *, link: str = "", request: RequestId | None = None) -> None:
        where = ", ".join(
            part for part in (link and f"link {link}", request and f"request {request}") if part
        )
        super().__init__(f"{message} ({where})" if where else message)
        self.message = message
        self.link = link
        self.request = request

    def locate(self, link: str, request: RequestId | None = None) -> None:
        """Called by the end of a link whose transport raised the error: names what it did not
        know."""
        self.link = link
        self.request = request or self.request


class Corrupt(OnLink, WireError):
    """Bytes that are not a chunk, or not the chunk that was sent."""


class VersionMismatch(OnLink, WireError):
    """A chunk in a wire version that this end does not support."""


class ChunkRefused(OnLink, WireError):
    """The receiver refused a chunk that this end had put."""


class PutFailed(OnLink, WireError):
    """This chunk cannot be sent: it exceeds a slot, or the transport reported a failure for it."""


class PeerDead(OnLink, StageDead):
    """The other end's process went away without closing."""


class LinkClosed(OnLink, Gone):
    """This end or the other was closed in good order."""


class Sender(Protocol):
    """The end that puts. See the module's text for each rule."""

    @property
    def endpoint(self) -> Endpoint:
        """The one that it is connected to."""
        ...

    def put(self, chunk: Chunk, timeout: float) -> bool:
        """Send; wait at most `timeout` seconds for a credit. False: still none, nothing sent."""
        ...

    def progress(self, *, wait: bool) -> int:
        """Send the chunks whose copies from the device have finished; with `wait`, wait for the
        first copy that has not. Returns how many are still to be sent. Raises `PeerDead` or
        `LinkClosed` as `put` does; a chunk that could not be sent after its copy is in
        `refusals()`. For the thread that puts."""
        ...

    def credits(self) -> int:
        """Chunks that could be put now without waiting."""
        ...

    def refusals(self) -> list[ChunkRefused]:
        """What the receiver refused since the last call."""
        ...

    def purge(self, request: RequestId) -> None: ...

    def check(self) -> None:
        """Raise what a `put` would raise (`PeerDead`, `LinkClosed`), if anything."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The end that takes. See the module's text for each rule."""

    @property
    def endpoint(self) -> Endpoint: ...

    def take(self, timeout: float) -> Chunk | None:
        """The next chunk, or None when none came within `timeout` seconds (also while no sender has
        connected)."""
        ...

    def credits(self) -> int:
        """Slots that hold no chunk, as far as this end knows."""
        ...

    def purge(self, request: RequestId) -> None: ...

    def check(self) -> None:
        """Raise what a `take` would raise after the last chunk (`PeerDead`, `LinkClosed`), if
        anything."""
        ...

    def close(self) -> None: ...


class Connector(Protocol):
    """Makes ends. Stateless as far as callers see; a connector class is registered under its
    `name`."""

    name: ClassVar[str]

    def listen(self, link: str, options: LinkOptions) -> Receiver:
        """Open the receiving end. `link` is the engine's name for the link (`a-b`)."""
        ...

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> Sender:
        """Connect to the receiver at `endpoint`. `PeerDead` if nobody answers in
        `options.connect_timeout_s`, `WireError` if the endpoint was changed or the listener is
        another (generation, nonce, secret)."""
        ...


@dataclass(slots=True)
class PurgedRequests:
    """The requests whose chunks an end drops: what `purge` remembers, for all connectors.

    Bounded; the oldest entry is removed first. A removed entry costs only a late chunk, which the
    inbox ignores. `stale` is one dict lookup, so a courier may call it while another thread
    purges."""

    limit: int = 4096
    ids: OrderedDict[RequestId, None] = field(default_factory=OrderedDict)

    def purge(self, request: RequestId) -> None:
        self.ids[request] = None
        self.ids.move_to_end(request)
        while len(self.ids) > self.limit:
            self.ids.popitem(last=False)

    def stale(self, header: ChunkHeader) -> bool:
        return header.request in self.ids
