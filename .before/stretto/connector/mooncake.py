"""The connector between machines with RDMA: Mooncake's Transfer Engine writes chunks into the receiver's memory.

Called by the two courier threads of a link; the engine's own threads (one engine per process, for all links) move
the bytes. The receiver registers a ring of slots and tells where it lies in its endpoint. The sender encodes into a
slot of its own, registered too, writes it into the same slot of the receiver's ring, and then announces it on the
link's ZeroMQ connection (`netbell`), which also brings the credits back, tells a death and says who may talk. The
engine's own notifications are polled and cost about a millisecond; the doorbell wakes the receiver at once.

`details`: `protocol` (`tcp`, the default, or `rdma`) and `device` (names of RDMA devices, empty for all).
The engine itself knows no authentication: whoever reaches its port can write to registered memory. Blob checksums
are on, and the wire format refuses what was damaged, but put it on networks that you trust. Needs the optional
extra `stretto[mooncake]` and, from the distribution, libibverbs1 and libnuma1."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

from stretto.connector import wire
from stretto.connector.contract import Endpoint, LinkOptions, PutFailed
from stretto.connector.endpoint import check_endpoint, check_options, make_endpoint, new_nonce
from stretto.connector.netbell import NetDialer, NetListener
from stretto.connector.notes import Hangup, Kind, Note, split_slots, stride_of
from stretto.connector.slots import SlotReceiver, SlotSender
from stretto.errors import Invalid

if TYPE_CHECKING:
    from mooncake.engine import TransferEngine

_HANDSHAKE = "P2PHANDSHAKE"  # the engine's own word for: no metadata server, peers ask each other


class MooncakeConnector:
    name: ClassVar[str] = "mooncake"
    inline: ClassVar[bool] = False

    def __init__(self) -> None:
        _import_engine()  # now, so that a missing package is an error of the configuration, not of the first link

    def listen(self, link: str, options: LinkOptions) -> SlotReceiver:
        check_options(link, options)
        bell = NetListener(link, options, most_bytes=0)
        nonce = new_nonce()
        address = bell.bind(nonce)
        try:
            ring = _Ring(options.slots, options.slot_bytes, _wanted(options))
        except Invalid:
            bell.close()
            raise
        details = {"session": f"{address.rpartition(':')[0]}:{ring.port}", "base": str(ring.base)}
        endpoint = make_endpoint(self.name, link, options, address, nonce, details)
        bell.expect(endpoint)
        return SlotReceiver(endpoint, _MooncakeInward(bell, ring))

    def connect(self, endpoint: Endpoint, options: LinkOptions) -> SlotSender:
        check_endpoint(self.name, endpoint, options)
        bell = NetDialer(endpoint, options)
        try:
            ring = _Ring(endpoint.slots, endpoint.slot_bytes, _wanted(options))
        except Invalid:
            bell.close()
            raise
        return SlotSender(endpoint, options, _MooncakeOutward(endpoint, bell, ring), checksum=True)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What an engine is made for. Links that agree on it share one."""

    host: str
    protocol: str
    device: str


def _wanted(options: LinkOptions) -> _Wanted:
    host = options.details.get("advertise", options.host)
    return _Wanted(host, options.details.get("protocol", "tcp"), options.details.get("device", ""))


def _import_engine() -> Callable[[], TransferEngine]:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise Invalid(
            f"connector 'mooncake' needs the extra stretto[mooncake], and libibverbs1 and libnuma1: {error}",
            param="connector",
        ) from error
    return cast(Callable[[], TransferEngine], TransferEngine)


@dataclass(slots=True)
class _Engines:
    """The process's engines, each there as long as a link uses it. An engine owns threads and a port."""

    _engines: dict[_Wanted, tuple[TransferEngine, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def acquire(self, wanted: _Wanted) -> TransferEngine:
        with self._lock:
            engine, users = self._engines.get(wanted, (None, 0))
            if engine is None:
                # Read by the engine when it starts. Its own default lets a write to a frozen peer wait for 30 s.
                os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
                engine = _import_engine()()
                if engine.initialize(wanted.host, _HANDSHAKE, wanted.protocol, wanted.device) != 0:
                    raise Invalid(f"Mooncake's transfer engine does not start: {wanted}", param="connector")
            self._engines[wanted] = (engine, users + 1)
            return engine

    def release(self, wanted: _Wanted) -> None:
        with self._lock:
            engine, users = self._engines.pop(wanted)
            if users > 1:
                self._engines[wanted] = (engine, users - 1)


_engines = _Engines()


class _Ring:
    """Registered memory for the slots of one end."""

    def __init__(self, slots: int, slot_bytes: int, wanted: _Wanted) -> None:
        self._wanted = wanted
        self.engine = _engines.acquire(wanted)
        self.stride = stride_of(slot_bytes)
        memory = mmap.mmap(-1, slots * self.stride)
        self.slots = split_slots(memory, slots, slot_bytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self.engine.register_memory(self.base, slots * self.stride) != 0:
            _engines.release(wanted)
            raise Invalid(f"Mooncake cannot register {slots * self.stride} bytes", param="slot_bytes")

    @property
    def port(self) -> int:
        return int(self.engine.get_rpc_port())

    def close(self) -> None:
        """Nobody may write here from now on; taken chunks keep their memory until they are released."""
        self.engine.unregister_memory(self.base)
        del self.engine
        self.slots = []
        _engines.release(self._wanted)


class _MooncakeOutward:
    """A sender's carrier (`notes.Outward`)."""

    ship_tells = False

    def __init__(self, endpoint: Endpoint, bell: NetDialer, ring: _Ring) -> None:
        self._bell = bell
        self._ring = ring
        self._session = endpoint.details["session"]
        self._remote = int(endpoint.details["base"])
        self.pages = ring.slots
        self.notes = bell.notes
        self.wake = bell.wake

    def ship(self, slot: int, seq: int, size: int) -> None:
        ring = self._ring
        at = slot * ring.stride
        if ring.engine.transfer_sync_write(self._session, ring.base + at, self._remote + at, size) != 0:
            raise PutFailed("Mooncake could not write the chunk")
        self._bell.ring(Kind.CHUNK, slot, seq, size)

    def close(self) -> None:
        self._bell.close()
        self._ring.close()


class _MooncakeInward:
    """A receiver's carrier (`notes.Inward`)."""

    def __init__(self, bell: NetListener, ring: _Ring) -> None:
        self._bell = bell
        self._ring = ring
        self.reply = bell.reply
        self.wake = bell.wake

    def arrivals(self, timeout: float) -> list[tuple[Note, wire.Page]]:
        return [(note, self._page_of(note)) for note, _frame in self._bell.arrivals(timeout)]

    def _page_of(self, note: Note) -> wire.Page:
        try:
            return self._ring.slots[note[1]]
        except IndexError:
            raise Hangup(f"the peer named slot {note[1]}: there is none") from None

    def close(self) -> None:
        self._bell.close()
        self._ring.close()
