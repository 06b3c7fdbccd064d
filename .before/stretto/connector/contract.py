"""The connector contract: what a link's two ends promise, whatever carries the bytes.

A link is one way. The receiving side *listens* and gets a `Receiver`, whose `endpoint` travels over the control
plane to the sending side, which *connects* and gets a `Sender`. One receiver serves one sender for one
generation; after a death or a close, both sides start again with a new `listen` (and a higher generation).
One contract suite (`tests/contract/`) runs the rules below against every connector.

**Threads.** `put` and `take` wait, so only the link's courier threads call them, one thread per end. All other
methods never block and may be called from any thread. A connector whose `inline` is true promises more: its
`put` and `take` with a timeout of 0 cost no more than a lock, so a stage loop may call them itself.

**Order.** `take` yields the chunks in the order of `put`, each exactly once, whole.

**Ownership.** A `put` that returns True has taken over the chunk: the connector calls `chunk.release()` as soon as
it no longer reads the tensors (after encoding; for `local`, when the receiver releases). A `put` that returns
False or raises leaves the chunk with the caller. Tensors on a device are copied to the host behind `put`'s back, at
most `options.copies` chunks at a time, and sent in order as they land: whoever puts calls `settle` until it returns
0. Memory that such a copy reads or writes is let go of only when the copy is done, however the link ends.
A taken chunk's tensors are views of the connector's memory and stay valid until its `release()`, also after
`close()`. Releasing twice is allowed and does nothing.

**Credits.** At most `options.slots` chunks are between `put` and `release`. Without a credit `put` waits, and
returns False when the timeout passes: that is backpressure, not a fault, and nothing was sent. Chunks are never
dropped and never buffered beyond the credits. Only the receiver's `release` (or a refusal, or a purge) returns one.

**Purge.** `purge(request, epoch)` drops the chunks of `request` whose epoch is *below* `epoch` (`EVERY_EPOCH`: all
of them): those not yet taken, and those still to come. The receiver skips them inside `take` and returns their
credits; the sender's `put` swallows them (releases, returns True). Chunks already taken are the inbox's to ignore.
Both ends are told by a control message of their own, so a purge never waits behind data. See `Fences`.

**Closing** is a protocol, not an accident. After the sender's `close`, the receiver takes what was put and then
gets `LinkClosed` from every call. After the receiver's `close`, the sender gets `LinkClosed` at once. A blocked
`put` or `take` wakes with `LinkClosed` when its own end is closed by another thread. `close` is idempotent, joins
the threads the end started, and gives back descriptors and memory (memory under a lease goes with the last
`release`).

**Death** of the peer is a different fact: `PeerDead`, at both ends, within `DEATH_S`, from `put`, `take` and
`check` alike, also on an idle link, and from then on always. A receiver may first hand out what had arrived whole,
never anything half written. Nothing stays behind: no segment, file, descriptor or thread.

**Refusal.** A chunk that arrives but cannot be trusted is dropped by `take`, which returns its credit and raises
`Corrupt` or `VersionMismatch` (with the request, if the header could be read). The sender hears of it: it
remembers which request each of its chunks in flight belongs to, and reports a `Refused` that names it from
`refusals()`. The link itself lives on. What can never be sent (larger than a slot) is `PutFailed`, at once.

**Strangers.** A link between processes has a secret (`options.secret`), fresh for every generation, without which
neither end is opened (`Invalid`). Who cannot prove that it holds the secret is not listened to: nothing that it sends
is kept, its connection is closed, and the invited sender gets in beside it and after it.

**Names.** Nothing that a client chose appears in an address, a file name or a segment name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar, Protocol

import msgspec
import torch

from stretto.errors import Gone, StageDead, StrettoError, WireError
from stretto.types import Mark, RequestId, Span

WIRE_VERSION = 2
DEATH_S = 0.5
"""A peer's death is seen by the other end within this time, busy or idle."""
MAX_COUNT = 2**53
"""Bound of every counter in a header: exact in any language's numbers, never reached."""
EVERY_EPOCH = MAX_COUNT
"""`purge(request, EVERY_EPOCH)`: the request is over, nothing of it is wanted any more."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_COUNT)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"\A[A-Za-z0-9_.:-]+\Z")]


class Dtype(StrEnum):
    """Element types that may cross a link; the value is torch's own name."""

    __hash__ = str.__hash__  # an enum's own is Python code, and these are looked up with every chunk

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
    """What a chunk is, apart from its bytes. Build one with `wire.chunk`, which lays out the tensor table."""

    version: Count
    request: Annotated[RequestId, msgspec.Meta(min_length=1, max_length=64, pattern=r"\A[A-Za-z0-9_.:-]+\Z")]
    epoch: Count
    segment: Count
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


class Event(Protocol):
    """What is asked of a CUDA event that was recorded behind some copies."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(slots=True, eq=False)
class Chunk:
    """A header with its tensors, and the lease that keeps them valid.

    Host tensors need no event. Device tensors come with the event that was recorded after their last write: a reader
    makes its stream wait for it. `local` passes them on; the others copy them to the host as they encode."""

    header: ChunkHeader
    tensors: Mapping[str, torch.Tensor]
    lease: Lease | None = None
    event: torch.cuda.Event | None = None

    def release(self) -> None:
        """Give the memory back. The tensors must not be touched afterwards, so the chunk lets go of them."""
        lease, self.lease = self.lease, None
        self.tensors = _RELEASED
        if lease is not None:
            lease.release()


_RELEASED: Mapping[str, torch.Tensor] = MappingProxyType({})


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a receiver listens. Travels over the control plane; holds no secret and no client text.

    `generation` tells a restarted listener from its predecessor and `nonce` (random, hex) a stranger from the
    sender that was invited. `details` is the connector's own (a public key, a session name)."""

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
    """How a link is set up. Both ends get the same, but for `slots` and `slot_bytes`, which the listener decides
    and the endpoint carries."""

    slots: int = 32
    slot_bytes: int = 1 << 20  # of an encoded chunk, prefix and header included
    generation: int = 0
    checksum: bool | None = None  # of blobs; None: the connector's default (on for networks, off in memory)
    copies: int = 4  # chunks whose tensors may be on their way from the device at a time
    zero_copy: bool = True  # off: encode into a bytes object first, then copy it (an oracle; same bytes)
    connect_timeout_s: float = 5.0
    host: str = "127.0.0.1"  # interface that a network connector binds
    secret: bytes | None = field(default=None, repr=False)  # known to both ends alone; needed between processes
    details: Mapping[str, str] = field(default_factory=dict)  # the connector's own settings, from the config

    def __post_init__(self) -> None:
        if min(self.slots, self.slot_bytes, self.copies) < 1 or self.generation < 0 or self.connect_timeout_s <= 0:
            raise ValueError(f"not link options: {self}")


class OnLink(StrettoError):
    """What every error of a link says: which link, and which request where that is known."""

    message: str  # without the names
    link: str
    request: RequestId | None

    def __init__(self, message: str, *, link: str = "", request: RequestId | None = None) -> None:
        where = ", ".join(part for part in (link and f"link {link}", request and f"request {request}") if part)
        super().__init__(f"{message} ({where})" if where else message)
        self.message = message
        self.link = link
        self.request = request


class Corrupt(OnLink, WireError):
    """Bytes that are not a chunk, or not the chunk that was sent."""


class VersionMismatch(OnLink, WireError):
    """A chunk in a wire version that this end does not speak."""


class Refused(OnLink, WireError):
    """The receiver could not trust a chunk that this end had put."""


class PutFailed(OnLink, WireError):
    """This chunk can not be sent: it exceeds a slot, or the transport reported a failure for it."""


class PeerDead(OnLink, StageDead):
    """The other end's process went away without closing."""


class LinkClosed(OnLink, Gone):
    """This end or the other was closed in good order."""


class Sender(Protocol):
    """The end that puts. See the module's text for each rule."""

    def put(self, chunk: Chunk, timeout: float) -> bool:
        """Send; wait at most `timeout` seconds for a credit. False: still none, nothing sent."""
        ...

    def settle(self, *, wait: bool) -> int:
        """Send on what was put and has come from the device since; with `wait`, wait for the first that has not.
        Returns how many are still on their way. Raises as `put` does; a `PutFailed` is about the oldest of them, and
        the others go on. For the thread that puts."""
        ...

    def credits(self) -> int:
        """Chunks that could be put now without waiting."""
        ...

    def refusals(self) -> list[Refused]:
        """What the receiver refused since the last call."""
        ...

    def purge(self, request: RequestId, epoch: int) -> None: ...

    def check(self) -> None:
        """Raise what a `put` would raise (`PeerDead`, `LinkClosed`), if anything."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The end that takes. See the module's text for each rule."""

    @property
    def endpoint(self) -> Endpoint: ...

    def take(self, timeout: float) -> Chunk | None:
        """The next chunk, or None when none came within `timeout` seconds (also while no sender has connected)."""
        ...

    def credits(self) -> int:
        """Slots that hold no chunk, as far as this end knows."""
        ...

    def purge(self, request: RequestId, epoch: int) -> None: ...

    def check(self) -> None:
        """Raise what a `take` would raise after the last chunk (`PeerDead`, `LinkClosed`), if anything."""
        ...

    def close(self) -> None: ...


class InlineReceiver(Receiver, Protocol):
    """A receiver in the sender's own process, which can say that something has come."""

    def on_arrival(self, wake: Callable[[], None]) -> None:
        """Call `wake` (from the sender's thread) after each put and each change of state."""
        ...


class Connector(Protocol):
    """Makes ends. Stateless as far as callers see; a connector class is registered under its `name`."""

    name: ClassVar[str]
    inline: ClassVar[bool]

    def listen(self, link: str, options: LinkOptions) -> Receiver:
        """Open the receiving end. `link` is our own name for the edge (say `thinker-talker.0`)."""
        ...

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> Sender:
        """Join the receiver at `endpoint`; `PeerDead` if nobody answers there in `options.connect_timeout_s`,
        `WireError` if who answers is not the one (generation, nonce, secret)."""
        ...


class Dated(Protocol):
    """What belongs to an epoch of a request: a chunk's header, or something on its way to become one."""

    @property
    def request(self) -> RequestId: ...

    @property
    def epoch(self) -> int: ...


@dataclass(slots=True)
class Fences:
    """Which epochs of which requests are no longer wanted: what `purge` remembers, for all connectors.

    Bounded, oldest out first. A forgotten fence costs only a late chunk that the inbox then ignores itself.
    `stale` is one dict lookup, so a courier may ask it while another thread purges."""

    limit: int = 4096
    floor: OrderedDict[RequestId, int] = field(default_factory=OrderedDict)

    def purge(self, request: RequestId, epoch: int) -> None:
        self.floor[request] = max(epoch, self.floor.get(request, 0))
        self.floor.move_to_end(request)
        while len(self.floor) > self.limit:
            self.floor.popitem(last=False)

    def stale(self, what: Dated) -> bool:
        return what.epoch < self.floor.get(what.request, 0)
