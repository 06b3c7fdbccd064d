"""The copies between a device and the host: the only module that turns device payloads into host chunks and back.

`DeviceToHost` is called by the stage loop when a step has been launched, and only enqueues: a batch's payload goes
to one slot of the pinned ring, on a stream of its own, behind the step that makes it. `HostToDevice` is called by
the incoming courier and starts a chunk's upload when it lands, on another stream. Both hand out events; whoever
needs the data waits for those, on a device stream (`adopt`) or, on a courier's thread, on the host. On a CPU device
the same calls copy at once. Nothing here waits on the host but what has `wait` in its name."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from stretto.connector.contract import Chunk
from stretto.connector.switches import OverlapSwitches
from stretto.stage.payload.ring import Event, ReadLease, Ring

DIRECT_BYTES = 256 << 10
"""From this size on a payload skips the ring: the courier copies it from the device into the link's slot itself. A
copy of its own costs some 15 µs, which the bytes outweigh from here, and the host no longer copies them once more."""


@dataclass(slots=True)
class Placed:
    """Where a step's payload lies until it is sent: in a slot of the ring, or still on the device."""

    tensors: Mapping[str, torch.Tensor]
    lease: ReadLease | None = None
    event: torch.cuda.Event | None = None

    def share(self) -> ReadLease | None:
        """A lease for one request's rows, to go with them to its outbox."""
        return None if self.lease is None else self.lease.share()

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


class DeviceToHost:
    """Brings a batch's payload to the host. One per link and sending host; the stage loop's thread only."""

    def __init__(self, ring: Ring, device: torch.device, switches: OverlapSwitches) -> None:
        self._ring = ring
        self._switches = switches
        self._device = device
        own = device.type == "cuda" and switches.payload_stream
        self._stream = _new_stream(device) if own else None

    def place(self, tensors: Mapping[str, torch.Tensor]) -> Placed | None:
        """Large payloads stay where they are, with an event; the others are copied to the ring. None: no slot."""
        size = sum(t.nbytes for t in tensors.values())
        if self._stream is not None and self._switches.async_d2h and size >= DIRECT_BYTES:
            event = _new_event()
            event.record(torch.cuda.current_stream(self._device))
            return Placed(tensors, event=event)
        lease = self.copy(tensors)
        return None if lease is None else Placed(lease.tensors, lease)

    def copy(self, tensors: Mapping[str, torch.Tensor], after: torch.cuda.Event | None = None) -> ReadLease | None:
        """Start the copy, behind `after` (or all that the current stream holds by now). None: no slot is free.

        The lease keeps `tensors` alive until the copy is done; they must not be overwritten before its event fires
        (a later step's write has to be ordered after it, or go to another buffer)."""
        lease = self._ring.lease()
        if lease is None:
            return None
        places = [(lease.place(name, t.dtype, tuple(t.shape)), t) for name, t in tensors.items()]
        if self._device.type != "cuda":
            for place, tensor in places:
                place.copy_(tensor)
            return lease.seal()
        current = torch.cuda.current_stream(self._device)
        stream = self._stream or current
        if after is not None:
            stream.wait_event(after)
        elif stream is not current:
            stream.wait_stream(current)
        # Not `with torch.cuda.stream`, which costs as much as two copies: this is on the stage loop's way.
        torch.cuda.set_stream(stream)
        try:
            for place, tensor in places:
                place.copy_(tensor, non_blocking=True)
        finally:
            torch.cuda.set_stream(current)
        event = _new_event()
        event.record(stream)
        sealed = lease.seal(event, tuple(tensors.values()))
        if not self._switches.async_d2h:
            sealed.wait()
        return sealed


@dataclass(slots=True)
class HostToDevice:
    """Uploads chunks as they land. One per link and receiving host; the incoming courier's thread only.

    `keep` names the tensors that stay on the host (see `Payload.HOST`); they are copied there, since the slot that
    they arrived in goes back to the sender."""

    device: torch.device
    switches: OverlapSwitches = field(default_factory=OverlapSwitches)
    keep: frozenset[str] = frozenset()
    stream: torch.cuda.Stream | None = None  # where they run; None: on one of their own, if there is a GPU
    _running: deque[tuple[Event, Chunk]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if self.device.type == "cuda" and self.stream is None:
            self.stream = _new_stream(self.device)

    def upload(self, chunk: Chunk) -> Chunk:
        """The chunk with its tensors on the device (or on their way there: `event`). Takes over `chunk` and
        releases it when the copy no longer reads it."""
        stream = self.stream
        if stream is None or self.keep >= chunk.tensors.keys():
            landed = Chunk(chunk.header, {name: t.clone() for name, t in chunk.tensors.items()})
            chunk.release()
            return landed
        current = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(stream)  # as above
        try:
            tensors = {
                name: t.clone() if name in self.keep else t.to(self.device, non_blocking=True)
                for name, t in chunk.tensors.items()
            }
        except RuntimeError:
            stream.synchronize()  # what was started must not read a slot that goes back, or is unmapped
            raise
        finally:
            torch.cuda.set_stream(current)
        event = _new_event()
        event.record(stream)
        self._running.append((event, chunk))
        if not self.switches.async_h2d:
            self.wait()
        return Chunk(chunk.header, tensors, event=event)

    def reap(self) -> int:
        """Release the sources of the uploads that are done, in order. Returns how many are still running."""
        while self._running and self._running[0][0].query():
            self._running.popleft()[1].release()
        return len(self._running)

    def wait_one(self) -> None:
        """Until the oldest upload is done, and its source released."""
        if self._running:
            self._running[0][0].synchronize()
            self._running.popleft()[1].release()

    def wait(self) -> None:
        """Until every upload is done, and its source released."""
        while self._running:
            self.wait_one()


def adopt(chunk: Chunk) -> None:
    """Make the current stream wait for a chunk's tensors and keep their memory from being reused under it.

    Called by the stage loop before it launches what reads them. The second half matters because the memory belongs
    to the upload's stream, whose next allocation would not wait for our kernels."""
    event = chunk.event
    if event is None:
        return
    stream: torch.cuda.Stream | None = None
    for tensor in chunk.tensors.values():
        if tensor.is_cuda:
            if stream is None:
                stream = torch.cuda.current_stream(tensor.device)
                stream.wait_event(event)
            tensor.record_stream(stream)


def _new_event() -> torch.cuda.Event:
    # Blocking: a courier that waits for it sleeps instead of spinning, since the loop thread needs the core.
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
