"""Messages and transports: what `slots` needs from shm, tcp and mooncake, and how slots are laid
out in memory.

A message is a small control message beside the data: a chunk lies in this slot, this slot is free
again, closing. Called by the ends of a link, on their courier's thread unless a method says
otherwise."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

from stretto.transport import wire


class MessageKind(IntEnum):
    CHUNK = 1  # sender -> receiver
    RELEASE = 2  # receiver -> sender
    REFUSE = 3  # receiver -> sender: the chunk is corrupt, the slot is free again
    CLOSE = 4  # both ways: the last message
    HELLO = 5  # sender -> receiver, first message, where the transport needs one


LinkMessage = tuple[int, int, int, int, int]
"""MessageKind, slot, seq, size, generation: 32 bytes. A bare tuple, since one is made and read for
every chunk. Its transport (a unix socket, a ZeroMQ frame) delivers it whole and unchanged or not at
all; the chunk's checksum is in its prefix."""

_MESSAGE = struct.Struct("<IIQQQ")
MESSAGE_BYTES = _MESSAGE.size
pack_message = _MESSAGE.pack
unpack_message = _MESSAGE.unpack_from
unpack_messages = _MESSAGE.iter_unpack


class Hangup(Exception):
    """The transport has lost its peer. Internal: the ends turn it into `PeerDead` or
    `LinkClosed`."""


def stride_of(slot_bytes: int) -> int:
    """Slots start on pages, so that a view of one is aligned for any element, and for
    registration."""
    return -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def split_slots(memory: mmap.mmap, slots: int, slot_bytes: int) -> list[wire.Page]:
    """The slots of a mapping. Views of them (a taken chunk's tensors) keep the mapping alive."""
    whole = memoryview(memory)
    stride = stride_of(slot_bytes)
    return [wire.Page(whole[at : at + slot_bytes]) for at in range(0, slots * stride, stride)]


class SendTransport(Protocol):
    """What a `SlotSender` sends with."""

    detects_hangup: bool
    """Whether `send_chunk` itself fails when the peer has left; if not, messages are read before
    each."""

    @property
    def pages(self) -> Sequence[wire.Page]:
        """The memory to encode into for each slot, `slot_bytes` long."""
        ...

    def send_chunk(self, slot: int, seq: int, size: int) -> None:
        """Send the chunk that lies in the slot. `Hangup` if the peer is known to be gone, or
        `PutFailed`."""
        ...

    def messages(self, timeout: float) -> list[LinkMessage]:
        """Messages from the receiver; waits for the first at most `timeout`. `Hangup` after the
        last."""
        ...

    def wake(self) -> None:
        """Send CLOSE to the peer and make a waiting `messages` return. Any thread; only before
        `close`."""
        ...

    def close(self) -> None: ...


class ReceiveTransport(Protocol):
    """What a `SlotReceiver` receives with."""

    @property
    def arrivals(self) -> Callable[[float], Sequence[tuple[LinkMessage, wire.Page]]]:
        """Called with a timeout: messages, each with the memory of its chunk; waits for the first
        at most that long. `Hangup` after the last."""
        ...

    def reply(self, kind: int, slot: int, seq: int) -> None:
        """Never waits; any thread. `Hangup` if the sender is gone."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
