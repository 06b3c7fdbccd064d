"""The connector between stages of one host: tensors change hands where they are, nothing is copied.

It is the reference behaviour of the contract. A chunk put by one stage is the chunk taken by the other, device
tensors, event and all; what the connector adds are the credits, the purge and the three ways in which a link ends.
Both ends share one small state under one lock, which is held for a few dictionary operations at a time, so a
stage loop may call `put` and `take` with a timeout of 0 itself (`inline`)."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from stretto.connector import wire
from stretto.connector.contract import (
    WIRE_VERSION,
    Chunk,
    Endpoint,
    Fences,
    LinkClosed,
    LinkOptions,
    OnLink,
    PeerDead,
    PutFailed,
    Refused,
    VersionMismatch,
)
from stretto.errors import WireError
from stretto.types import RequestId


@dataclass(frozen=True, slots=True)
class _End:
    """How a link ended, for one of its ends. Errors are made anew for each raise: a shared one would collect the
    traceback, and with it the locals, of every thread that ever raised it."""

    kind: type[OnLink]
    message: str


_CLOSED = _End(LinkClosed, "this end is closed")


@dataclass(slots=True)
class _Shared:
    """What the two ends of a link have in common. All fields are guarded by `changed`."""

    link: str
    slots: int
    slot_bytes: int
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.Lock()))
    queue: deque[Chunk] = field(default_factory=deque)
    in_flight: int = 0  # between put and release
    fences: Fences = field(default_factory=Fences)
    refused: list[Refused] = field(default_factory=list)
    connected: bool = False
    sender_end: _End | None = None  # what the sender must raise from now on
    receiver_end: _End | None = None  # what the receiver must raise once the queue is empty
    wake: Callable[[], None] | None = None

    def arrived(self) -> None:
        """Tell a receiver that has asked for it. Called without the lock: `wake` is not ours."""
        if self.wake is not None:
            self.wake()

    def error(self, end: _End, request: RequestId | None = None) -> OnLink:
        return end.kind(end.message, link=self.link, request=request)

    def give_back(self) -> None:
        with self.changed:
            self.in_flight -= 1
            self.changed.notify_all()


@dataclass(slots=True)
class _Credit:
    """The lease of a taken chunk: the sender's chunk, and the credit it took."""

    shared: _Shared
    chunk: Chunk

    def release(self) -> None:
        self.chunk.release()
        self.shared.give_back()


class LocalSender:
    def __init__(self, shared: _Shared) -> None:
        self._shared = shared

    def put(self, chunk: Chunk, timeout: float) -> bool:
        shared = self._shared
        request = chunk.header.request
        self._check_size(chunk)
        with shared.changed:
            if timeout > 0:
                shared.changed.wait_for(lambda: self._may_put(chunk), timeout)
            if shared.sender_end is not None:
                raise shared.error(shared.sender_end, request)
            stale = shared.fences.stale(chunk.header)
            if not stale and shared.in_flight >= shared.slots:
                return False
            if not stale:
                shared.in_flight += 1
                shared.queue.append(chunk)
                shared.changed.notify_all()
        if stale:
            chunk.release()
        else:
            shared.arrived()
        return True

    def _check_size(self, chunk: Chunk) -> None:
        """There is no slot here to exceed, but what one connector refuses all refuse."""
        limit = self._shared.slot_bytes
        if wire.blob_bytes(chunk.header) + wire.MAX_HEADER + wire.ALIGN > limit and wire.encoded_size(chunk) > limit:
            raise PutFailed(
                f"{wire.encoded_size(chunk)} bytes exceed a slot of {limit}",
                link=self._shared.link,
                request=chunk.header.request,
            )

    def _may_put(self, chunk: Chunk) -> bool:
        shared = self._shared
        return (
            shared.in_flight < shared.slots
            or shared.sender_end is not None
            or shared.fences.stale(chunk.header)  # purged while it waited
        )

    def settle(self, *, wait: bool) -> int:
        return 0  # nothing is copied

    def credits(self) -> int:
        return self._shared.slots - self._shared.in_flight

    def refusals(self) -> list[Refused]:
        with self._shared.changed:
            refused, self._shared.refused = self._shared.refused, []
        return refused

    def purge(self, request: RequestId, epoch: int) -> None:
        with self._shared.changed:
            self._shared.fences.purge(request, epoch)
            self._shared.changed.notify_all()

    def check(self) -> None:
        if (end := self._shared.sender_end) is not None:
            raise self._shared.error(end)

    def close(self) -> None:
        self._leave(_End(LinkClosed, "the sender closed"))

    def die(self) -> None:
        """Behave as if this end's process had been killed. For tests of what the other end makes of it."""
        self._leave(_End(PeerDead, "the sender died"))

    def _leave(self, told: _End) -> None:
        shared = self._shared
        with shared.changed:
            if shared.sender_end is None:
                shared.sender_end = _CLOSED
            if shared.receiver_end is None:
                shared.receiver_end = told
            shared.changed.notify_all()
        shared.arrived()


class LocalReceiver:
    def __init__(self, shared: _Shared, endpoint: Endpoint, forget: Callable[[Endpoint], None]) -> None:
        self._shared = shared
        self._endpoint = endpoint
        self._forget = forget

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def on_arrival(self, wake: Callable[[], None]) -> None:
        self._shared.wake = wake

    def take(self, timeout: float) -> Chunk | None:
        shared = self._shared
        dropped: list[Chunk] = []
        with shared.changed:
            if timeout > 0:
                shared.changed.wait_for(lambda: shared.queue or shared.receiver_end is not None, timeout)
            chunk = self._next(dropped)
            end = shared.receiver_end if chunk is None else None
        for stale in dropped:
            stale.release()
        if end is not None:
            raise shared.error(end)
        if chunk is None:
            return None
        if chunk.header.version != WIRE_VERSION:
            self._refuse(chunk)
        return Chunk(chunk.header, chunk.tensors, _Credit(shared, chunk), chunk.event)

    def _next(self, dropped: list[Chunk]) -> Chunk | None:
        """The first chunk in the queue that is still wanted. Called with the lock held; the caller releases the
        dropped ones after it let go of the lock, since a release runs the sender's code."""
        shared = self._shared
        while shared.queue:
            chunk = shared.queue.popleft()
            if not shared.fences.stale(chunk.header):
                return chunk
            dropped.append(chunk)
            shared.in_flight -= 1
            shared.changed.notify_all()
        return None

    def _refuse(self, chunk: Chunk) -> None:
        shared, header = self._shared, chunk.header
        message = f"header version {header.version}, this end speaks {WIRE_VERSION}"
        with shared.changed:
            shared.refused.append(Refused(message, link=shared.link, request=header.request))
        _Credit(shared, chunk).release()
        raise VersionMismatch(message, link=shared.link, request=header.request)

    def credits(self) -> int:
        return self._shared.slots - self._shared.in_flight

    def purge(self, request: RequestId, epoch: int) -> None:
        dropped: list[Chunk] = []
        shared = self._shared
        with shared.changed:
            shared.fences.purge(request, epoch)
            kept: deque[Chunk] = deque()
            for chunk in shared.queue:
                (dropped if shared.fences.stale(chunk.header) else kept).append(chunk)
            shared.queue = kept
            shared.in_flight -= len(dropped)
            shared.changed.notify_all()
        for chunk in dropped:
            chunk.release()

    def check(self) -> None:
        if (end := self._shared.receiver_end) is not None:
            raise self._shared.error(end)

    def close(self) -> None:
        self._leave(_End(LinkClosed, "the receiver closed"))

    def die(self) -> None:
        """Behave as if this end's process had been killed. For tests of what the other end makes of it."""
        self._leave(_End(PeerDead, "the receiver died"))

    def _leave(self, told: _End) -> None:
        shared = self._shared
        with shared.changed:
            shared.receiver_end = _CLOSED
            if shared.sender_end is None:
                shared.sender_end = told
            left, shared.queue = shared.queue, deque()
            shared.in_flight -= len(left)
            shared.changed.notify_all()
        self._forget(self._endpoint)
        for chunk in left:
            chunk.release()


class LocalConnector:
    """One object per process is enough; ends find each other through it."""

    name: ClassVar[str] = "local"
    inline: ClassVar[bool] = True

    def __init__(self) -> None:
        self._listening: dict[str, tuple[Endpoint, _Shared]] = {}

    def listen(self, link: str, options: LinkOptions) -> LocalReceiver:
        nonce = secrets.token_hex(16)
        endpoint = Endpoint(
            self.name, link, f"local:{nonce}", options.generation, nonce, options.slots, options.slot_bytes
        )
        shared = _Shared(link, options.slots, options.slot_bytes)
        self._listening[endpoint.address] = (endpoint, shared)
        return LocalReceiver(shared, endpoint, self._forget)

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> LocalSender:
        known = self._listening.get(endpoint.address)
        if known is None:
            raise PeerDead("nobody listens there", link=endpoint.link)
        listening, shared = known
        if listening != endpoint:
            raise WireError(f"link {endpoint.link}: the listener is of another generation or nonce")
        with shared.changed:
            if shared.connected:
                raise WireError(f"link {endpoint.link}: the listener already has its sender")
            shared.connected = True
        return LocalSender(shared)

    def _forget(self, endpoint: Endpoint) -> None:
        self._listening.pop(endpoint.address, None)
