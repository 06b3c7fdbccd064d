"""The connector between machines with RDMA: Mooncake's Transfer Engine writes chunks into the
receiver's memory.

What was run: `protocol=tcp`, on one machine, by the contract suite and by the benchmarks. What
never was: `protocol=rdma`, for want of hardware. The owner of two machines with RDMA proves a link
between them with `python -m bench connectors --parts machines` (see docs/links.md).

Called by the two courier threads of a link; the engine's own threads (one engine per process, for
all links) move the bytes. The receiver registers memory for its slots and puts the address into its
endpoint. The sender encodes into a slot of its own, registered too, writes it into the same slot of
the receiver, and announces it on the link's ZeroMQ connection (`zmq_socket`), which also returns
the credits, reports a death and authenticates the peer. The engine's own notifications are polled
and cost about a millisecond; a message wakes the receiver at once.

`details`: `protocol` (`tcp`, the default, or `rdma`) and `device` (names of RDMA devices, empty for
all). The engine itself has no authentication: whoever reaches its port can write to registered
memory. Blob checksums are on, and the wire format refuses damaged chunks, but use it on trusted
networks only. Needs the optional extra `stretto[mooncake]` and, from the distribution, libibverbs1
and libnuma1."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from stretto.errors import Invalid
from stretto.transport import wire
from stretto.transport.contract import Endpoint, LinkOptions, PutFailed
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

if TYPE_CHECKING:
    from mooncake.engine import TransferEngine

DEVICES = Path("/sys/class/infiniband")
# the engine's name for: no metadata server, peers exchange metadata directly
_HANDSHAKE = "P2PHANDSHAKE"


class MooncakeConnector:
    name: ClassVar[str] = "mooncake"

    def __init__(self) -> None:
        # now, so that a missing package is an error of the configuration, not of the first link
        _import_engine()

    def listen(self, link: str, options: LinkOptions) -> SlotReceiver:
        check_options(link, options)
        listener = ZmqListener(link, options, most_bytes=0)
        nonce = new_nonce()
        address = listener.bind(nonce)
        try:
            memory = _SlotMemory(options.slots, options.slot_bytes, _engine_options(options))
        except Invalid:
            listener.close()
            raise
        details = {
            "session": f"{address.rpartition(':')[0]}:{memory.port}",
            "base": str(memory.base),
        }
        endpoint = make_endpoint(self.name, link, options, address, nonce, details)
        listener.expect(endpoint)
        return SlotReceiver(endpoint, _MooncakeReceiveTransport(listener, memory))

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> SlotSender:
        check_endpoint(self.name, endpoint, options)
        dialer = ZmqDialer(endpoint, options)
        try:
            memory = _SlotMemory(endpoint.slots, endpoint.slot_bytes, _engine_options(options))
        except Invalid:
            dialer.close()
            raise
        return SlotSender(
            endpoint, options, _MooncakeSendTransport(endpoint, dialer, memory), checksum=True
        )


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The settings of an engine. Links with the same settings share one."""

    host: str
    protocol: str
    device: str


def _engine_options(options: LinkOptions) -> EngineOptions:
    host = options.details.get("advertise", options.host)
    protocol = options.details.get("protocol", "tcp")
    return EngineOptions(host, protocol, options.details.get("device", ""))


def _import_engine() -> Callable[[], TransferEngine]:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise Invalid(
            f"connector 'mooncake' needs the extra stretto[mooncake], and libibverbs1 and "
            f"libnuma1: {error}",
            param="connector",
        ) from error
    return cast(Callable[[], TransferEngine], TransferEngine)


def check_devices(options: EngineOptions) -> None:
    """The engine itself takes tcp, with a line in its log, where it finds no RDMA device."""
    there = sorted(p.name for p in DEVICES.glob("*"))
    if options.protocol == "rdma" and (not there or options.device not in ("", *there)):
        missing = f"no RDMA device {options.device!r}" if options.device else "no RDMA device"
        found = ", ".join(there) or "none"
        raise Invalid(
            f"connector 'mooncake' with protocol=rdma: this machine has {missing} (found: {found})",
            param="link_details",
        )


def _start_engine(options: EngineOptions) -> TransferEngine:
    # Read by the engine when it starts. Its own default lets a write to a frozen peer wait for
    # 30 s.
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
    check_devices(options)
    engine = _import_engine()()
    if engine.initialize(options.host, _HANDSHAKE, options.protocol, options.device) != 0:
        raise Invalid(f"Mooncake's transfer engine does not start: {options}", param="connector")
    return engine


@dataclass(slots=True)
class _Engines:
    """The process's engines, each kept as long as a link uses it. An engine owns threads and a
    port."""

    _engines: dict[EngineOptions, tuple[TransferEngine, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def acquire(self, options: EngineOptions) -> TransferEngine:
        with self._lock:
            engine, users = self._engines.get(options, (None, 0))
            if engine is None:
                engine = _start_engine(options)
            self._engines[options] = (engine, users + 1)
            return engine

    def release(self, options: EngineOptions) -> None:
        with self._lock:
            engine, users = self._engines.pop(options)
            if users > 1:
                self._engines[options] = (engine, users - 1)


_engines = _Engines()


class _SlotMemory:
    """Registered memory for the slots of one end."""

    def __init__(self, slots: int, slot_bytes: int, options: EngineOptions) -> None:
        self._engine_options = options
        self.engine = _engines.acquire(options)
        self.stride = stride_of(slot_bytes)
        memory = mmap.mmap(-1, slots * self.stride)
        self.slots = split_slots(memory, slots, slot_bytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self.engine.register_memory(self.base, slots * self.stride) != 0:
            _engines.release(options)
            raise Invalid(
                f"Mooncake cannot register {slots * self.stride} bytes", param="slot_bytes"
            )

    @property
    def port(self) -> int:
        return int(self.engine.get_rpc_port())

    def close(self) -> None:
        """The engine may not write here from now on; taken chunks keep their memory until they are
        released."""
        self.engine.unregister_memory(self.base)
        del self.engine
        self.slots = []
        _engines.release(self._engine_options)


class _MooncakeSendTransport:
    """`slot_transport.SendTransport`."""

    detects_hangup = False

    def __init__(self, endpoint: Endpoint, dialer: ZmqDialer, memory: _SlotMemory) -> None:
        self._dialer = dialer
        self._memory = memory
        self._session = endpoint.details["session"]
        self._remote = int(endpoint.details["base"])
        self.pages = memory.slots
        self.messages = dialer.messages
        self.wake = dialer.wake

    def send_chunk(self, slot: int, seq: int, size: int) -> None:
        memory = self._memory
        at = slot * memory.stride
        if (
            memory.engine.transfer_sync_write(
                self._session, memory.base + at, self._remote + at, size
            )
            != 0
        ):
            raise PutFailed("Mooncake could not write the chunk")
        self._dialer.send_message(MessageKind.CHUNK, slot, seq, size)

    def close(self) -> None:
        self._dialer.close()
        self._memory.close()


class _MooncakeReceiveTransport:
    """`slot_transport.ReceiveTransport`."""

    def __init__(self, listener: ZmqListener, memory: _SlotMemory) -> None:
        self._listener = listener
        self._memory = memory
        self.reply = listener.reply
        self.wake = listener.wake

    def arrivals(self, timeout: float) -> list[tuple[LinkMessage, wire.Page]]:
        arrivals = self._listener.arrivals(timeout)
        return [(message, self._page_of(message)) for message, _frame in arrivals]

    def _page_of(self, message: LinkMessage) -> wire.Page:
        try:
            return self._memory.slots[message[1]]
        except IndexError:
            raise Hangup(f"the peer named slot {message[1]}: there is none") from None

    def close(self) -> None:
        self._listener.close()
        self._memory.close()
