"""The ring of host slots between a device and a link: pinned memory, taken and given back, never allocated anew.

    lease() -> FillLease --seal(event)-> ReadLease --release()--> free
                                            |--share()-> ReadLease ...   the slot is free when the last is released

The stage loop leases and seals, couriers release; the ring's lock covers that. No slot left is `None`: the caller
waits (backpressure), nothing is dropped and nothing allocated. A slot whose copy still runs when its last lease
goes is not handed out again before the copy's event has fired."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch

from stretto.errors import Bug

ALIGN = 64  # as on the wire, so that rows lie in the slot as they will lie in the chunk


_MAX_VIEWS = 256


class Event(Protocol):
    """What the ring needs of a CUDA event."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(slots=True)
class _Slot:
    memory: torch.Tensor  # uint8 [slot_bytes]
    readers: int = 0
    event: Event | None = None  # fires when the memory is filled
    sources: tuple[torch.Tensor, ...] = ()  # what the copy reads: must live until the event fires
    views: dict[tuple[int, torch.dtype, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)

    def view(self, start: int, stop: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A typed view of the memory. Remembered, because a decode loop asks for few shapes again and again, and
        making one takes as long as a small copy."""
        key = (start, dtype, shape)
        view = self.views.get(key)
        if view is None:
            if len(self.views) >= _MAX_VIEWS:
                self.views.clear()
            view = self.views[key] = self.memory[start:stop].view(dtype).view(shape)
        return view

    def settled(self) -> bool:
        return self.event is None or self.event.query()


class Ring:
    """`slots` slots of `slot_bytes` each. `pin` asks for page-locked memory, which only a CUDA build can give."""

    def __init__(self, slots: int, slot_bytes: int, *, pin: bool = False) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"not a ring: {slots} slots of {slot_bytes} bytes")
        stride = -(-slot_bytes // ALIGN) * ALIGN
        memory = torch.empty(slots * stride, dtype=torch.uint8, pin_memory=pin)
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.pinned = pin
        self._free = deque(_Slot(memory[i * stride : i * stride + slot_bytes]) for i in range(slots))
        self._cooling: deque[_Slot] = deque()
        # Re-entrant, because a lease that is collected unreleased comes back here, and the collector may run at
        # any allocation, also one made with the lock held.
        self._lock = threading.RLock()

    @property
    def free(self) -> int:
        """Slots that could be leased now."""
        with self._lock:
            self._settle()
            return len(self._free)

    def lease(self) -> FillLease | None:
        with self._lock:
            self._settle()
            return FillLease(self, self._free.popleft()) if self._free else None

    def _settle(self) -> None:
        for _ in range(len(self._cooling)):
            slot = self._cooling.popleft()
            if slot.settled():
                self._reuse(slot)
            else:
                self._cooling.append(slot)

    def _reuse(self, slot: _Slot) -> None:
        slot.event, slot.sources = None, ()
        self._free.append(slot)

    def _share(self, slot: _Slot) -> None:
        with self._lock:
            slot.readers += 1

    def _release(self, slot: _Slot) -> None:
        with self._lock:
            slot.readers -= 1
            if slot.readers > 0:
                return
            if slot.settled():
                self._reuse(slot)
            else:
                self._cooling.append(slot)


class FillLease:
    """The right to fill a slot: named tensors are placed in it one after the other, then it is sealed."""

    __slots__ = ("_ring", "_slot", "_tensors", "_used")

    def __init__(self, ring: Ring, slot: _Slot) -> None:
        slot.readers = 1
        self._ring = ring
        self._slot: _Slot | None = slot
        self._used = 0
        self._tensors: dict[str, torch.Tensor] = {}

    def place(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Room for a tensor, to be written by the holder or by a copy that it launches before it seals."""
        slot = self._held()
        start = -(-self._used // ALIGN) * ALIGN
        stop = start + prod(shape) * dtype.itemsize
        if stop > len(slot.memory) or name in self._tensors:
            raise Bug(f"{name!r} needs bytes up to {stop} of a slot of {len(slot.memory)}, or is there twice")
        self._used = stop
        self._tensors[name] = slot.view(start, stop, dtype, shape)
        return self._tensors[name]

    def seal(self, event: Event | None = None, sources: tuple[torch.Tensor, ...] = ()) -> ReadLease:
        """End of writing. `event` fires when the copies into the slot are done; `sources` are kept until then."""
        slot = self._held()
        slot.event, slot.sources = event, sources
        tensors, self._tensors, self._slot = self._tensors, {}, None
        return ReadLease(self._ring, slot, tensors)

    def release(self) -> None:
        """Give the slot back unfilled."""
        slot, self._slot, self._tensors = self._slot, None, {}
        if slot is not None:
            self._ring._release(slot)

    def _held(self) -> _Slot:
        if self._slot is None:
            raise Bug("this slot is no longer this lease's to fill")
        return self._slot

    def __del__(self) -> None:
        _warn_if_held(self, self._slot)


@dataclass(slots=True, eq=False)
class ReadLease:
    """The right to read a slot. Others share it; the slot is free again when all have released."""

    _ring: Ring
    _slot: _Slot | None
    _tensors: Mapping[str, torch.Tensor] = field(repr=False)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What the slot holds, by name. Not readable before `event` has fired."""
        self._held()
        return self._tensors

    @property
    def event(self) -> Event | None:
        return self._held().event

    @property
    def filled(self) -> bool:
        """Whether the slot can be read without waiting."""
        return self._held().settled()

    def wait(self) -> None:
        """Until the slot is filled. Blocks the caller: for couriers, not for a stage loop."""
        event = self._held().event
        if event is not None:
            event.synchronize()

    def share(self) -> ReadLease:
        """Another lease of the same slot, for someone else's slice of it."""
        slot = self._held()
        self._ring._share(slot)
        return ReadLease(self._ring, slot, self._tensors)

    def release(self) -> None:
        slot, self._slot, self._tensors = self._slot, None, {}
        if slot is None:
            raise Bug("a lease is released once")
        self._ring._release(slot)

    def _held(self) -> _Slot:
        if self._slot is None:
            raise Bug("this slot was released and may hold another's rows by now")
        return self._slot

    def __del__(self) -> None:
        _warn_if_held(self, self._slot)


def _warn_if_held(lease: FillLease | ReadLease, slot: _Slot | None) -> None:
    """A lease that nobody released: say so, and save the slot, or the link would run dry in silence."""
    if slot is not None:
        lease.release()
        warnings.warn(f"{type(lease).__name__} was collected without a release", ResourceWarning, stacklevel=2)
