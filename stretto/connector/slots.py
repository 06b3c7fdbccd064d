"""Slots, credits and notes: the half of the contract that shm, tcp and mooncake have in common.

An end of a link is one `SlotSender` or `SlotReceiver` over a *carrier*, which moves the bytes and the notes. The
sender owns the free slots: a credit is a free slot. A chunk is encoded into one and announced by a CHUNK note;
RELEASE (or REFUSE) comes back when the receiver is done with it, and only then is the slot used again. So a slot
in flight is never overwritten, whatever the carrier does with its memory, and slots + 1 notes is the most that is
ever queued in one direction. The last freed slot is used first: it is warm in the cache, and memory that peak
traffic never needed is never touched.

Threads: `put` and `take` hold `_turn` for as long as they run or wait. Every other method that wants to look at
the carrier only tries for it: if it is taken, the thread that holds it sees any news itself."""

from __future__ import annotations

import hmac
import mmap
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, IntEnum
from hashlib import sha256
from types import MappingProxyType
from typing import Protocol

import msgspec

from stretto.connector import wire
from stretto.connector.contract import (
    Chunk,
    Corrupt,
    Endpoint,
    Event,
    Fences,
    LinkClosed,
    LinkOptions,
    PeerDead,
    PutFailed,
    Refused,
    VersionMismatch,
)
from stretto.errors import Bug
from stretto.types import RequestId

MAX_SLOTS = 256
"""Keeps the notes in flight well inside the smallest queue that carries them (a unix socket's send buffer)."""

_LARGE = 64 << 10  # bytes of a chunk that is better put where the caches still know the memory
_VERDICT_S = 0.2  # from a failed transfer to the note, or the silence, that explains it


class Kind(IntEnum):
    CHUNK = 1  # sender -> receiver
    RELEASE = 2  # receiver -> sender
    REFUSE = 3  # receiver -> sender: not to be trusted, slot free again
    CLOSE = 4  # both ways: the last note
    HELLO = 5  # sender -> receiver, first note, where the carrier needs one
    REJECT = 6  # receiver -> sender: your HELLO is not of this link


Note = tuple[int, int, int, int, int]
"""One small fixed-size record beside the data: kind, slot, seq, size, generation. A bare tuple, since one is made and
read for every chunk. What carries it (a unix socket, a ZeroMQ frame) delivers it whole and unchanged or not at all;
the checksum of what it announces is in the chunk's own prefix."""

_NOTE = struct.Struct("<IIQQQ")
NOTE_BYTES = _NOTE.size
pack_note = _NOTE.pack
unpack_note = _NOTE.unpack_from
unpack_notes = _NOTE.iter_unpack


# As plain numbers: an enum's comparison is a call, and each chunk makes several.
_CHUNK, _RELEASE, _REFUSE, _CLOSE = int(Kind.CHUNK), int(Kind.RELEASE), int(Kind.REFUSE), int(Kind.CLOSE)
_NOTHING_SENT = (-1, RequestId(""))
_device_copies = wire.DeviceCopies()


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
    def buffer(self) -> Callable[[int], wire.Page]:
        """The memory to encode into for a slot, `slot_bytes` long."""
        ...

    def ship(self, slot: int, seq: int, size: int) -> None:
        """Send the chunk that lies in the slot. `Hangup` if the peer is known to be gone, or `PutFailed`."""
        ...

    def notes(self, timeout: float) -> list[Note]:
        """What came back; waits for the first at most `timeout`. `Hangup` once all was handed out."""
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


class State(Enum):
    OPEN = "open"
    CLOSED_HERE = "this end was closed"
    CLOSED_THERE = "the other end was closed"
    DEAD = "the other end died"


_OPEN = State.OPEN  # to look a member up in its enum costs more than to compare it


class _End:
    """How an end ends: one state, set once, and the exception that says it."""

    def __init__(self, link: str) -> None:
        self.link = link
        self._turn = threading.Lock()
        self._state = State.OPEN
        self._why = ""

    def _finish(self, state: State, why: str = "") -> None:
        if self._state is _OPEN:
            self._why, self._state = why, state

    def _raise_if_ended(self, request: RequestId | None = None) -> None:
        if self._state is _OPEN:
            return
        message = f"{self._state.value}: {self._why}" if self._why else self._state.value
        if self._state is State.DEAD:
            raise PeerDead(message, link=self.link, request=request)
        raise LinkClosed(message, link=self.link, request=request)


@dataclass(slots=True)
class _Leaving:
    """A chunk in its slot that was not sent yet: its copy from the device runs, or that of one before it."""

    slot: int
    page: wire.Page
    chunk: Chunk
    landed: Event | None


class SlotSender(_End):
    """`contract.Sender` over any `Outward` carrier."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: LinkOptions,
        carrier: Outward,
        checksum: bool,
        copies: wire.Copies = _device_copies,
    ) -> None:
        super().__init__(endpoint.link)
        self._carrier = carrier
        self._copies = copies
        self._generation = endpoint.generation
        self._slot_bytes = endpoint.slot_bytes
        self._ship_tells = carrier.ship_tells
        self._buffer = carrier.buffer
        self._ship_note = carrier.ship
        self._notes = carrier.notes
        self._most_copies = options.copies
        self._checksum = checksum if options.checksum is None else options.checksum
        self._zero_copy = options.zero_copy
        self._free = list(range(endpoint.slots - 1, -1, -1))
        self._leaving: deque[_Leaving] = deque()
        self._flight: dict[int, tuple[int, RequestId]] = {}  # slot -> what it carries
        self._refused: deque[Refused] = deque()
        self._fences = Fences()
        self._floor_of = self._fences.floor.get
        self._seq = 0

    def put(self, chunk: Chunk, timeout: float) -> bool:
        header = chunk.header
        free = self._free
        with self._turn:
            # Mostly there is a slot and nothing to look at first.
            if not self._ship_tells or not free or self._leaving or self._state is not _OPEN:
                self._await_slot(chunk, timeout)
            if header.epoch >= self._floor_of(header.request, 0):
                if not free:
                    return False
                slot = free[-1]
                page = self._buffer(slot)
                landed = None
                try:
                    if self._zero_copy:
                        landed = wire.write_blobs(page, chunk, self._copies)
                        size = 0 if landed is not None else wire.write_head(page, header, checksum=self._checksum)
                    else:
                        size = wire.encode_into(page, chunk, checksum=self._checksum, zero_copy=False)
                except PutFailed as failed:
                    failed.link = self.link
                    raise
                free.pop()
                if landed is not None or self._leaving:
                    self._leaving.append(_Leaving(slot, page, chunk, landed))
                    return True
                self._ship(slot, size, header.request)
        chunk.release()
        return True

    def _await_slot(self, chunk: Chunk, timeout: float) -> None:
        request = chunk.header.request
        if not self._ship_tells and self._state is _OPEN:
            self._pump(0.0)
        self._raise_if_ended(request)
        if self._free and len(self._leaving) < self._most_copies:
            return
        self._check_size(chunk)  # or it would wait for a slot that cannot help it
        if len(self._leaving) >= self._most_copies:
            self._depart(wait=True)
        deadline = time.monotonic() + timeout
        left = timeout
        while not self._free and not self._fences.stale(chunk.header):
            while self._leaving and left > 0:
                self._depart(wait=True)  # what has not left cannot come back
            # Sending takes slots back too: wait for one only if it did not.
            self._pump(0.0 if self._free else left)
            self._raise_if_ended(request)
            if (left := deadline - time.monotonic()) <= 0:
                return

    def _check_size(self, chunk: Chunk) -> None:
        if (size := wire.encoded_size(chunk)) > self._slot_bytes:
            raise PutFailed(
                f"a chunk of {size} bytes does not fit a slot of {self._slot_bytes}",
                link=self.link,
                request=chunk.header.request,
            )

    def settle(self, *, wait: bool) -> int:
        if self._leaving:
            with self._turn:
                self._depart(wait)
        return len(self._leaving)

    def _depart(self, wait: bool) -> None:
        """Send what has landed, in order; with `wait`, at least the first."""
        while self._leaving:
            first = self._leaving[0]
            if first.landed is not None and not first.landed.query():
                if not wait:
                    return
                first.landed.synchronize()
            wait = False
            header = first.chunk.header
            if not self._ship_tells and self._state is _OPEN:
                self._pump(0.0)
            self._raise_if_ended(header.request)
            self._leaving.popleft()
            try:
                if self._fences.stale(header):
                    self._free.append(first.slot)
                else:
                    size = wire.write_head(first.page, header, checksum=self._checksum)
                    self._ship(first.slot, size, header.request)
            except PutFailed as failed:
                # Its put is long over, and another's may be running: told like a refusal.
                self._refused.append(Refused(failed.message, link=self.link, request=header.request))
            finally:
                first.chunk.release()

    def _ship(self, slot: int, size: int, request: RequestId) -> None:
        """Announce what lies in the slot, which is free again if that fails. What can be done before is: where both
        processes share a core, the receiver wakes when this one is done."""
        seq = self._seq
        self._flight[slot] = (seq, request)
        self._seq = seq + 1
        try:
            self._ship_note(slot, seq, size)
        except Hangup as hangup:
            self._not_sent(slot, seq)
            self._hung_up(hangup)
            self._raise_if_ended(request)
            raise Bug(f"link {self.link}: hung up and yet open") from hangup
        except PutFailed as failed:
            self._not_sent(slot, seq)
            # To what moves the bytes, a peer that left looks like a failed transfer. The notes know better, soon.
            self._await_end(_VERDICT_S)
            self._raise_if_ended(request)
            failed.link, failed.request = self.link, request
            raise
        # Take slots back when none is left, many by one call, and before they get cold where chunks are large.
        if size > _LARGE or not self._free:
            self._pump(0.0)

    def _not_sent(self, slot: int, seq: int) -> None:
        del self._flight[slot]
        self._seq = seq
        self._free.append(slot)

    def _pump(self, timeout: float) -> None:
        try:
            for note in self._notes(timeout):
                kind, slot, seq, _size, generation = note
                sent, request = self._flight.pop(slot, _NOTHING_SENT)
                if kind == _RELEASE and sent == seq and generation == self._generation:
                    self._free.append(slot)
                else:
                    self._on_other(note, sent, request)
        except Hangup as hangup:
            self._finish(State.DEAD, str(hangup))

    def _await_end(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._state is _OPEN and (left := deadline - time.monotonic()) > 0:
            self._pump(left)

    def _hung_up(self, hangup: Hangup) -> None:
        # A good-bye may still lie unread in front of the hang-up: read it, or a close would look like a death.
        self._pump(0.0)
        self._finish(State.DEAD, str(hangup))

    def _on_other(self, note: Note, sent: int, request: RequestId) -> None:
        """A note that is no plain release of what is in flight: the sequence number and request that the slot had."""
        kind, slot, seq, _size, generation = note
        if generation != self._generation:
            raise Hangup(f"the peer speaks as generation {generation}, this link is {self._generation}")
        if kind == _CLOSE:
            self._finish(State.CLOSED_THERE)
            return
        if kind != _REFUSE or sent != seq:
            raise Hangup(f"the peer gave back slot {slot} seq {seq}, which it does not have")
        self._free.append(slot)
        self._refused.append(Refused("the receiver refused a chunk", link=self.link, request=request))

    def _look(self) -> None:
        if self._turn.acquire(blocking=False):
            try:
                if self._state is _OPEN:
                    self._pump(0.0)
            finally:
                self._turn.release()

    def credits(self) -> int:
        self._look()
        return len(self._free)

    def refusals(self) -> list[Refused]:
        self._look()
        return [self._refused.popleft() for _ in range(len(self._refused))]

    def purge(self, request: RequestId, epoch: int) -> None:
        self._fences.purge(request, epoch)

    def check(self) -> None:
        self._look()
        self._raise_if_ended()

    def close(self) -> None:
        if self._leaving and self._turn.acquire(blocking=False):  # else the courier is at it
            try:
                with suppress(PeerDead, LinkClosed):
                    while self._leaving:
                        self._depart(wait=True)
            finally:
                self._turn.release()
        _close(self, self._carrier, self._abandon)

    def _abandon(self) -> None:
        """Let go of what will not be sent, when its copies are done: they write to memory that goes next."""
        while self._leaving:
            first = self._leaving.popleft()
            if first.landed is not None:
                first.landed.synchronize()
            first.chunk.release()


class SlotLease:
    """A taken chunk's right to its slot."""

    __slots__ = ("_receiver", "_seq")

    def __init__(self, receiver: SlotReceiver, seq: int) -> None:
        self._receiver = receiver
        self._seq = seq

    def release(self) -> None:
        self._receiver.give_back(self._seq, _RELEASE)


class SlotReceiver(_End):
    """`contract.Receiver` over any `Inward` carrier."""

    def __init__(self, endpoint: Endpoint, carrier: Inward) -> None:
        super().__init__(endpoint.link)
        self.endpoint = endpoint
        self._generation = endpoint.generation
        self._slots = endpoint.slots
        self._carrier = carrier
        self._arrived: deque[tuple[int, wire.Page, int]] = deque()  # seq, memory and size
        self._held: dict[int, int] = {}  # seq -> slot, from arrival to release; popping is what makes it once
        self._fences = Fences()
        self._floor_of = self._fences.floor.get
        self._next = 0

    def take(self, timeout: float) -> Chunk | None:
        arrived = self._arrived
        with self._turn:
            start = time.monotonic()
            if not arrived and self._state is _OPEN:
                self._pump(timeout)  # at least one look, even with no time
            if arrived and (chunk := self._open(*arrived.popleft())) is not None:
                return chunk
            return self._take_by(start + timeout)

    def _take_by(self, deadline: float) -> Chunk | None:
        while True:
            while self._arrived:
                if (chunk := self._open(*self._arrived.popleft())) is not None:
                    return chunk
            self._raise_if_ended()
            if (left := deadline - time.monotonic()) <= 0:
                return None
            self._pump(left)

    def _open(self, seq: int, page: wire.Page, size: int) -> Chunk | None:
        """None: it was purged."""
        try:
            chunk = wire.read(page, size, SlotLease(self, seq))
        except (Corrupt, VersionMismatch) as error:
            self.give_back(seq, _REFUSE)
            error.link = self.link
            raise
        header = chunk.header
        if header.epoch >= self._floor_of(header.request, 0):
            return chunk
        chunk.release()
        return None

    def _pump(self, timeout: float) -> None:
        held = self._held
        try:
            for note, page in self._carrier.arrivals(timeout):
                kind, slot, seq, size, generation = note
                if seq == self._next and kind == _CHUNK and generation == self._generation and len(held) < self._slots:
                    self._next = seq + 1
                    held[seq] = slot
                    self._arrived.append((seq, page, size))
                else:
                    self._on_other(note)
        except Hangup as hangup:
            self._finish(State.DEAD, str(hangup))

    def _on_other(self, note: Note) -> None:
        """A note that is no chunk, or not the one that is due."""
        kind, _slot, seq, _size, generation = note
        if generation != self._generation:
            raise Hangup(f"the peer speaks as generation {generation}, this link is {self._generation}")
        if kind == _CLOSE:
            self._finish(State.CLOSED_THERE)
        elif kind == _CHUNK and len(self._held) >= self._slots:
            raise Hangup("the peer sent more chunks than it has credits")
        else:
            raise Hangup(f"the peer sent kind {kind} seq {seq} where chunk {self._next} was due")

    def give_back(self, seq: int, kind: int) -> None:
        if (slot := self._held.pop(seq, None)) is None:
            return
        with suppress(Hangup):  # nobody needs the credit any more; `take` and `check` say why
            self._carrier.reply(kind, slot, seq)

    def _look(self) -> None:
        if self._turn.acquire(blocking=False):
            try:
                if self._state is _OPEN:
                    self._pump(0.0)
            finally:
                self._turn.release()

    def credits(self) -> int:
        self._look()
        return self.endpoint.slots - len(self._held)

    def purge(self, request: RequestId, epoch: int) -> None:
        self._fences.purge(request, epoch)

    def check(self) -> None:
        self._look()
        self._raise_if_ended()

    def close(self) -> None:
        _close(self, self._carrier, self._arrived.clear)


def _close(end: SlotSender | SlotReceiver, carrier: Outward | Inward, let_go: Callable[[], None]) -> None:
    """Wakes the courier first, then waits for it to leave before memory goes. Once."""
    with _closing:
        if end._state is State.CLOSED_HERE:
            return
        end._state, end._why = State.CLOSED_HERE, ""
    carrier.wake()
    with end._turn:
        try:
            let_go()
        finally:
            carrier.close()


_closing = threading.Lock()


def new_nonce() -> str:
    return secrets.token_hex(16)


def make_endpoint(
    connector: str,
    link: str,
    options: LinkOptions,
    address: str,
    nonce: str,
    details: Mapping[str, str] = MappingProxyType({}),
) -> Endpoint:
    """A sealed endpoint."""
    plain = Endpoint(
        connector, link, address, options.generation, nonce, options.slots, options.slot_bytes, dict(details)
    )
    return msgspec.structs.replace(plain, details={**details, "seal": _seal_of(plain, options.secret)})


def check_options(link: str, options: LinkOptions) -> None:
    if options.slots > MAX_SLOTS:
        raise ValueError(f"link {link}: at most {MAX_SLOTS} slots, {options.slots} asked for")


def check_endpoint(connector: str, endpoint: Endpoint, options: LinkOptions) -> None:
    """Raise `WireError` unless the endpoint is one that a listener with our secret made, unchanged."""
    if endpoint.connector != connector:
        raise Corrupt(f"an endpoint of {endpoint.connector}, not of {connector}", link=endpoint.link)
    if not hmac.compare_digest(endpoint.details.get("seal", ""), _seal_of(endpoint, options.secret)):
        raise Corrupt("the endpoint's seal does not match: it was changed, or the secrets differ", link=endpoint.link)


def _seal_of(endpoint: Endpoint, secret: bytes | None) -> str:
    # Without a secret the key is empty: the seal then catches mix-ups, not forgers.
    details = {name: text for name, text in endpoint.details.items() if name != "seal"}
    said = msgspec.msgpack.encode(msgspec.structs.replace(endpoint, details=dict(sorted(details.items()))))
    return hmac.new(secret or b"", said, sha256).hexdigest()
