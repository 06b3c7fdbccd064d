"""Notes, and the carriers that bring them: what `slots` asks of shm, tcp and mooncake, and the memory they share.

A note is a small record beside the data: this chunk lies in that slot, this slot is free again, good-bye. Called by the
ends of a link, on their courier's thread unless a method says otherwise."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

from stretto.connector import wire


class Kind(IntEnum):
    CHUNK = 1  # sender -> receiver
    RELEASE = 2  # receiver -> sender
    REFUSE = 3  # receiver -> sender: not to be trusted, slot free again
    CLOSE = 4  # both ways: the last note
    HELLO = 5  # sender -> receiver, first note, where the carrier needs one
    RING = 6  # receiver -> sender: look at what came back, where that is told in shared memory


Note = tuple[int, int, int, int, int]
"""One small fixed-size record beside the data: kind, slot, seq, size, generation. A bare tuple, since one is made and
read for every chunk. What carries it (a unix socket, a ZeroMQ frame) delivers it whole and unchanged or not at all;
the checksum of what it announces is in the chunk's own prefix."""

_NOTE = struct.Struct("<IIQQQ")
NOTE_BYTES = _NOTE.size
pack_note = _NOTE.pack
unpack_note = _NOTE.unpack_from
unpack_notes = _NOTE.iter_unpack


class Hangup(Exception):
    """The carrier has no peer any more. Stays inside: the ends turn it into `PeerDead` or `LinkClosed`."""


def stride_of(slot_bytes: int) -> int:
    """Slots start on pages, so that a view of one is aligned for any element, and for registration."""
    return -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def split_slots(memory: mmap.mmap, slots: int, slot_bytes: int) -> list[wire.Page]:
    """The slots of a mapping. It lives as long as any of them, a taken chunk's tensors included."""
    whole = memoryview(memory)
    stride = stride_of(slot_bytes)
    return [wire.Page(whole[at : at + slot_bytes]) for at in range(0, slots * stride, stride)]


class Outward(Protocol):
    """A sender's carrier."""

    ship_tells: bool
    """Whether `ship` itself notices that the peer has left; if not, notes are looked at before each."""

    @property
    def pages(self) -> Sequence[wire.Page]:
        """The memory to encode into for each slot, `slot_bytes` long."""
        ...

    def ship(self, slot: int, seq: int, size: int) -> None:
        """Send the chunk that lies in the slot. `Hangup` if the peer is known to be gone, or `PutFailed`."""
        ...

    def notes(self, timeout: float) -> list[Note]:
        """Some of what came back; waits for the first at most `timeout`. `Hangup` once all was handed out."""
        ...

    def wake(self) -> None:
        """Say CLOSE to the peer and make a `notes` that waits return. Any thread; only before `close`."""
        ...

    def close(self) -> None: ...


class Inward(Protocol):
    """A receiver's carrier."""

    @property
    def arrivals(self) -> Callable[[float], Sequence[tuple[Note, wire.Page]]]:
        """Called with a timeout: notes with the memory that holds what they announce; waits for the first at most so
        long. `Hangup` after the last."""
        ...

    def reply(self, kind: int, slot: int, seq: int) -> None:
        """Never waits; any thread. `Hangup` if nobody is there."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
