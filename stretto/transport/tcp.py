"""The connector between machines on a plain network: chunks as ZeroMQ messages on one connection
per link.

Called by the two courier threads of a link; ZeroMQ's I/O thread sends and receives. A chunk is
encoded into one of the sender's slots and sent from there without another copy. The slot is used
again only when the receiver has released the chunk, which it cannot do before it has all bytes, so
no slot is overwritten while it is sent. The receiver's tensors are views of the received message.
Blob checksums are on. See `zmq_socket` for death and authentication."""

from __future__ import annotations

import ctypes
import mmap
from typing import ClassVar

import zmq

from stretto.transport import wire
from stretto.transport.contract import Endpoint, LinkOptions
from stretto.transport.endpoint import check_endpoint, check_options, make_endpoint, new_nonce
from stretto.transport.slot_transport import (
    Hangup,
    LinkMessage,
    MessageKind,
    split_slots,
    stride_of,
)
from stretto.transport.slots import SlotReceiver, SlotSender
from stretto.transport.zmq_socket import ZmqDialer, ZmqListener

_NOTHING = memoryview(b"")
_ELEMENT = 8  # bytes of the widest element: what a tensor's address must be a multiple of


class TcpConnector:
    name: ClassVar[str] = "tcp"

    def listen(self, link: str, options: LinkOptions) -> SlotReceiver:
        check_options(link, options)
        listener = ZmqListener(link, options, options.slot_bytes)
        nonce = new_nonce()
        endpoint = make_endpoint(self.name, link, options, listener.bind(nonce), nonce)
        listener.expect(endpoint)
        return SlotReceiver(endpoint, _TcpReceiveTransport(listener))

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> SlotSender:
        check_endpoint(self.name, endpoint, options)
        return SlotSender(
            endpoint,
            options,
            _TcpSendTransport(endpoint, ZmqDialer(endpoint, options)),
            checksum=True,
        )


class _TcpSendTransport:
    """`slot_transport.SendTransport`. Its slots are plain memory, touched only as far as chunks
    need it."""

    detects_hangup = False

    def __init__(self, endpoint: Endpoint, dialer: ZmqDialer) -> None:
        memory = mmap.mmap(-1, endpoint.slots * stride_of(endpoint.slot_bytes))
        self.pages = split_slots(memory, endpoint.slots, endpoint.slot_bytes)
        self._dialer = dialer
        self.messages = dialer.messages
        self.wake = dialer.wake

    def send_chunk(self, slot: int, seq: int, size: int) -> None:
        blob = self.pages[slot].memory[:size]
        self._dialer.send_message(MessageKind.CHUNK, slot, seq, size, blob)

    def close(self) -> None:
        self._dialer.close()
        self.pages.clear()  # a chunk that is still being sent keeps the memory


class _TcpReceiveTransport:
    """`slot_transport.ReceiveTransport`."""

    def __init__(self, listener: ZmqListener) -> None:
        self.listener = listener
        self.reply = listener.reply
        self.wake = listener.wake
        self.close = listener.close

    def arrivals(self, timeout: float) -> list[tuple[LinkMessage, wire.Page]]:
        arrivals = self.listener.arrivals(timeout)
        return [(message, _page_of(message, frame)) for message, frame in arrivals]


def _page_of(message: LinkMessage, frame: zmq.Frame | None) -> wire.Page:
    memory = _bytes_of(frame)
    if len(memory) != message[3]:
        raise Hangup(f"the peer announced {message[3]} bytes and sent {len(memory)}")
    return wire.Page(memory)


def _bytes_of(frame: zmq.Frame | None) -> memoryview:
    """The frame's own memory. ZeroMQ packs small messages next to each other, so an unaligned one
    is copied; large ones have memory of their own, which is aligned."""
    if frame is None:
        return _NOTHING
    view = memoryview(frame.buffer)
    if len(view) and ctypes.addressof(ctypes.c_char.from_buffer(view)) % _ELEMENT:
        return memoryview(bytearray(view))
    return view
