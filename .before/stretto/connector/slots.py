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

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from time import monotonic
from typing import NoReturn

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
from stretto.connector.notes import Hangup, Inward, Kind, Note, Outward
from stretto.errors import Bug
from stretto.types import RequestId

LARGE = 64 << 10
"""Bytes of a chunk that is better put where the caches still know the memory."""
_VERDICT_S = 0.2  # from a failed transfer to the note, or the silence, that explains it

# As plain numbers: an enum's comparison is a call, and each chunk makes several.
_CHUNK, _RELEASE, _REFUSE, _CLOSE = int(Kind.CHUNK), int(Kind.RELEASE), int(Kind.REFUSE), int(Kind.CLOSE)
_NOTHING_SENT = (-1, RequestId(""))
_device_copies = wire.DeviceCopies()


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
class Leaving:
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
        self._pages = carrier.pages
        self._ship_note = carrier.ship
        self._notes = carrier.notes
        self._most_copies = options.copies
        self._checksum = checksum if options.checksum is None else options.checksum
        self._zero_copy = options.zero_copy
        self._free = list(range(endpoint.slots - 1, -1, -1))
        self._leaving: deque[Leaving] = deque()
        self._flight: dict[int, tuple[int, RequestId]] = {}  # slot -> what it carries
        self._refused: deque[Refused] = deque()
        self._fences = Fences()
        self._floor = self._fences.floor
        self._seq = 0

    def put(self, chunk: Chunk, timeout: float) -> bool:
        with self._turn:
            return self._put(chunk, timeout)

    def _put(self, chunk: Chunk, timeout: float) -> bool:
        header = chunk.header
        self._await_slot(chunk, timeout)
        if not self._fences.stale(header):
            if not self._free:
                return False
            slot = self._free[-1]
            page = self._pages[slot]
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
            self._free.pop()
            if landed is not None or self._leaving:
                self._leaving.append(Leaving(slot, page, chunk, landed))
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
        deadline = monotonic() + timeout
        left = timeout
        while not self._free and not self._fences.stale(chunk.header):
            while self._leaving and left > 0:
                self._depart(wait=True)  # what has not left cannot come back
            # Sending takes slots back too: wait for one only if it did not.
            self._pump(0.0 if self._free else left)
            self._raise_if_ended(request)
            if (left := deadline - monotonic()) <= 0:
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
        except (Hangup, PutFailed) as failed:
            self._not_sent(slot, failed)
        # Take slots back when none is left, many by one call, and before they get cold where chunks are large.
        if size > LARGE or not self._free:
            self._pump(0.0)

    def _not_sent(self, slot: int, failed: Hangup | PutFailed) -> NoReturn:
        self._seq, request = self._flight.pop(slot)
        self._free.append(slot)
        if isinstance(failed, Hangup):
            self._hung_up(failed)
            self._raise_if_ended(request)
            raise Bug(f"link {self.link}: hung up and yet open") from failed
        # To what moves the bytes, a peer that left looks like a failed transfer. The notes know better, soon.
        self._await_end(_VERDICT_S)
        self._raise_if_ended(request)
        failed.link, failed.request = self.link, request
        raise failed

    def _pump(self, timeout: float) -> bool:
        """Whether anything came: there may be more."""
        try:
            notes = self._notes(timeout)
            self._hear(notes)
        except Hangup as hangup:
            self._finish(State.DEAD, str(hangup))
            return False
        return bool(notes)

    def _hear(self, notes: Sequence[Note]) -> None:
        for note in notes:
            kind, slot, seq, _size, generation = note
            sent, request = self._flight.pop(slot, _NOTHING_SENT)
            if kind == _RELEASE and sent == seq and generation == self._generation:
                self._free.append(slot)
            else:
                self._on_other(note, sent, request)

    def _await_end(self, timeout: float) -> None:
        deadline = monotonic() + timeout
        while self._state is _OPEN and (left := deadline - monotonic()) > 0:
            self._pump(left)

    def _hung_up(self, hangup: Hangup) -> None:
        # A good-bye may still lie unread in front of the hang-up: read it, or a close would look like a death.
        self._pump_all()
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

    def _pump_all(self) -> None:
        while self._state is _OPEN and self._pump(0.0):
            pass

    def _look(self) -> None:
        if self._turn.acquire(blocking=False):
            try:
                self._pump_all()
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


class SlotLease(msgspec.Struct, gc=False):
    """A taken chunk's right to its slot. A struct, since that is made without a call into Python."""

    receiver: SlotReceiver
    seq: int

    def release(self) -> None:
        self.receiver.give_back(self.seq, _RELEASE)


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
        self._floor = self._fences.floor
        self._next = 0

    def take(self, timeout: float) -> Chunk | None:
        with self._turn:
            return self._take(timeout)

    def _take(self, timeout: float) -> Chunk | None:
        deadline = monotonic() + timeout
        if not self._arrived and self._state is _OPEN:
            self._pump(timeout)  # at least one look, even with no time
        return self._take_by(deadline)

    def _take_by(self, deadline: float) -> Chunk | None:
        while True:
            while self._arrived:
                chunk = self._open(*self._arrived.popleft())
                if not self._fences.stale(chunk.header):
                    return chunk
                chunk.release()
            self._raise_if_ended()
            if (left := deadline - monotonic()) <= 0:
                return None
            self._pump(left)

    def _open(self, seq: int, page: wire.Page, size: int) -> Chunk:
        try:
            return wire.read(page, size, SlotLease(self, seq))
        except (Corrupt, VersionMismatch) as error:
            self._refuse(seq, error)
            raise

    def _refuse(self, seq: int, error: Corrupt | VersionMismatch) -> None:
        self.give_back(seq, _REFUSE)
        error.link = self.link

    def _pump(self, timeout: float) -> None:
        try:
            self._accept(self._carrier.arrivals(timeout))
        except Hangup as hangup:
            self._finish(State.DEAD, str(hangup))

    def _accept(self, arrivals: Sequence[tuple[Note, wire.Page]]) -> None:
        held = self._held
        for note, page in arrivals:
            kind, slot, seq, size, generation = note
            if seq == self._next and kind == _CHUNK and generation == self._generation and len(held) < self._slots:
                self._next = seq + 1
                held[seq] = slot
                self._arrived.append((seq, page, size))
            else:
                self._on_other(note)

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
        try:
            self._carrier.reply(kind, slot, seq)
        except Hangup:
            return  # nobody needs the credit any more; `take` and `check` say why

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
