"""The connector between machines on a plain network: chunks as ZeroMQ messages, on the link's one connection.

Called by the two courier threads of a link; ZeroMQ's I/O thread does the sending and receiving. A chunk is encoded
into one of the sender's own slots and sent from there without another copy. That slot is used again only when the
receiver has released the chunk, which it cannot do before it has all bytes, so no send is ever overtaken. The
receiver's tensors are views of the received message. Blob checksums are on. See `netbell` for death and for who
may talk."""

from __future__ import annotations

import ctypes
import mmap
from typing import ClassVar

import zmq

from stretto.connector import wire
from stretto.connector.contract import Endpoint, LinkOptions
from stretto.connector.endpoint import check_endpoint, check_options, make_endpoint, new_nonce
from stretto.connector.netbell import NetDialer, NetListener
from stretto.connector.notes import Hangup, Kind, Note, split_slots, stride_of
from stretto.connector.slots import SlotReceiver, SlotSender

_NOTHING = memoryview(b"")
_ELEMENT = 8  # bytes of the widest element: what a tensor's address must be a multiple of


class TcpConnector:
    name: ClassVar[str] = "tcp"
    inline: ClassVar[bool] = False

    def listen(self, link: str, options: LinkOptions) -> SlotReceiver:
        check_options(link, options)
        bell = NetListener(link, options, options.slot_bytes)
        nonce = new_nonce()
        endpoint = make_endpoint(self.name, link, options, bell.bind(nonce), nonce)
        bell.expect(endpoint)
        return SlotReceiver(endpoint, _TcpInward(bell))

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> SlotSender:
        check_endpoint(self.name, endpoint, options)
        return SlotSender(endpoint, options, _TcpOutward(endpoint, NetDialer(endpoint, options)), checksum=True)


class _TcpOutward:
    """A sender's carrier (`notes.Outward`). Its slots are plain memory, touched only as far as chunks need it."""

    ship_tells = False

    def __init__(self, endpoint: Endpoint, bell: NetDialer) -> None:
        memory = mmap.mmap(-1, endpoint.slots * stride_of(endpoint.slot_bytes))
        self.pages = split_slots(memory, endpoint.slots, endpoint.slot_bytes)
        self._bell = bell
        self.notes = bell.notes
        self.wake = bell.wake

    def ship(self, slot: int, seq: int, size: int) -> None:
        self._bell.ring(Kind.CHUNK, slot, seq, size, self.pages[slot].memory[:size])

    def close(self) -> None:
        self._bell.close()
        self.pages.clear()  # a chunk that is still being sent keeps the memory


class _TcpInward:
    """A receiver's carrier (`notes.Inward`)."""

    def __init__(self, bell: NetListener) -> None:
        self._bell = bell
        self.reply = bell.reply
        self.wake = bell.wake
        self.close = bell.close

    def arrivals(self, timeout: float) -> list[tuple[Note, wire.Page]]:
        return [(note, _page_of(note, frame)) for note, frame in self._bell.arrivals(timeout)]


def _page_of(note: Note, frame: zmq.Frame | None) -> wire.Page:
    memory = _bytes_of(frame)
    if len(memory) != note[3]:
        raise Hangup(f"the peer announced {note[3]} bytes and sent {len(memory)}")
    return wire.Page(memory)


def _bytes_of(frame: zmq.Frame | None) -> memoryview:
    """The frame's own memory. ZeroMQ packs small messages next to each other, so those may need a move to be
    aligned; large ones have memory of their own, which is."""
    if frame is None:
        return _NOTHING
    view = memoryview(frame.buffer)
    if len(view) and ctypes.addressof(ctypes.c_char.from_buffer(view)) % _ELEMENT:
        return memoryview(bytearray(view))
    return view
