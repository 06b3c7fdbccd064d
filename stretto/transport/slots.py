"""Slots, credits and messages: the half of the contract that shm, tcp and mooncake have in common.

An end of a link is one `SlotSender` or `SlotReceiver` over a *transport*, which moves the bytes and
the messages. The sender owns the free slots: a credit is a free slot. A chunk is encoded into one
and announced by a CHUNK message. RELEASE (or REFUSE) comes back when the receiver is done with it,
and only then is the slot used again. So a slot in flight is never overwritten, and at most slots +
1 messages are queued in one direction. The slot that was freed last is used first: it is warm in
the cache, and slots beyond the peak traffic are never touched.

Threads: `put` and `take` hold `_mutex` for as long as they run or wait. Every other method that
reads from the transport only tries to acquire it: if another thread holds it, that thread reads the
messages itself."""

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

from stretto.errors import Bug
from stretto.transport import wire
from stretto.transport.contract import (
    Chunk,
    ChunkRefused,
    CopyEvent,
    Corrupt,
    Endpoint,
    LinkClosed,
    LinkOptions,
    PeerDead,
    PurgedRequests,
    PutFailed,
    VersionMismatch,
)
from stretto.transport.slot_transport import (
    Hangup,
    LinkMessage,
    MessageKind,
    ReceiveTransport,
    SendTransport,
)
from stretto.types import RequestId

LARGE = 64 << 10
"""Bytes of a chunk from which it pays to reuse a slot while it is still in the caches."""
_CAUSE_S = 0.2  # how long a failed transfer waits for a message that explains it

# Plain integers: an enum's comparison is a call, and each chunk makes several.
_CHUNK, _RELEASE, _REFUSE, _CLOSE = (
    int(MessageKind.CHUNK),
    int(MessageKind.RELEASE),
    int(MessageKind.REFUSE),
    int(MessageKind.CLOSE),
)
_NOTHING_SENT = (-1, RequestId(""))
_device_copies = wire.DeviceCopies()


class EndState(Enum):
    OPEN = "open"
    CLOSED_HERE = "this end was closed"
    CLOSED_THERE = "the other end was closed"
    DEAD = "the other end died"


_OPEN = EndState.OPEN  # looking a member up in its enum costs more than comparing it


_closing = threading.Lock()


class _End:
    """The state of an end: open until it is set once, and the exception that it then raises."""

    def __init__(self, link: str) -> None:
        self.link = link
        self._mutex = threading.Lock()
        self.state = EndState.OPEN
        self._why = ""

    def _finish(self, state: EndState, why: str = "") -> None:
        if self.state is _OPEN:
            self._why = why
            self.state = state

    def _raise_if_ended(self, request: RequestId | None = None) -> None:
        if self.state is _OPEN:
            return
        message = f"{self.state.value}: {self._why}" if self._why else self.state.value
        if self.state is EndState.DEAD:
            raise PeerDead(message, link=self.link, request=request)
        raise LinkClosed(message, link=self.link, request=request)

    def _close(
        self, transport: SendTransport | ReceiveTransport, release: Callable[[], None]
    ) -> None:
        """Wake the courier, wait until it has left, then free the memory. Once."""
        with _closing:
            if self.state is EndState.CLOSED_HERE:
                return
            self.state = EndState.CLOSED_HERE
            self._why = ""
        transport.wake()
        with self._mutex:
            try:
                release()
            finally:
                transport.close()


@dataclass(slots=True)
class Pending:
    """A chunk in its slot that has not been sent: its copy from the device is running, or that of
    one before it."""

    slot: int
    page: wire.Page
    chunk: Chunk
    copied: CopyEvent | None


class SlotSender(_End):
    """`contract.Sender` over any `SendTransport`."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: LinkOptions,
        transport: SendTransport,
        checksum: bool,
        copies: wire.Copies = _device_copies,
    ) -> None:
        super().__init__(endpoint.link)
        self.endpoint = endpoint
        self.transport = transport
        self._copies = copies
        self._generation = endpoint.generation
        self._detects_hangup = transport.detects_hangup
        self._pages = transport.pages
        self._send_chunk = transport.send_chunk
        self._messages = transport.messages
        self._most_copies = options.copies
        self._checksum = checksum if options.checksum is None else options.checksum
        self._zero_copy = options.zero_copy
        self._free = list(range(endpoint.slots - 1, -1, -1))
        self._pending: deque[Pending] = deque()
        self._flight: dict[int, tuple[int, RequestId]] = {}  # slot -> seq and request of its chunk
        self._refused: deque[ChunkRefused] = deque()
        self._purged = PurgedRequests()
        self._seq = 0

    def put(self, chunk: Chunk, timeout: float) -> bool:
        with self._mutex:
            return self._put(chunk, timeout)

    def _put(self, chunk: Chunk, timeout: float) -> bool:
        header = chunk.header
        self._await_slot(chunk, timeout)
        if not self._purged.stale(header):
            if not self._free:
                return False
            slot = self._free[-1]
            page = self._pages[slot]
            copied = None
            try:
                if self._zero_copy:
                    copied = wire.write_blobs(page, chunk, self._copies)
                    size = (
                        0
                        if copied is not None
                        else wire.write_head(page, header, checksum=self._checksum)
                    )
                else:
                    size = wire.encode_into(page, chunk, checksum=self._checksum, zero_copy=False)
            except PutFailed as failed:
                failed.locate(self.link)
                raise
            self._free.pop()
            if copied is not None or self._pending:
                self._pending.append(Pending(slot, page, chunk, copied))
                return True
            self._announce(slot, size, header.request)
        chunk.release()
        return True

    def _await_slot(self, chunk: Chunk, timeout: float) -> None:
        request = chunk.header.request
        if not self._detects_hangup and self.state is _OPEN:
            self._pump(0.0)
        self._raise_if_ended(request)
        if self._free and len(self._pending) < self._most_copies:
            return
        self._check_size(chunk)  # before it waits for a slot that cannot hold it
        if len(self._pending) >= self._most_copies:
            self._send_copied(wait=True)
        deadline = monotonic() + timeout
        left = timeout
        while not self._free and not self._purged.stale(chunk.header):
            while self._pending and left > 0:
                self._send_copied(wait=True)  # a slot that was not sent cannot be returned
            # Sending reads returned slots too: wait for one only if there was none.
            self._pump(0.0 if self._free else left)
            self._raise_if_ended(request)
            if (left := deadline - monotonic()) <= 0:
                return

    def _check_size(self, chunk: Chunk) -> None:
        if (size := wire.encoded_size(chunk)) > self.endpoint.slot_bytes:
            raise PutFailed(
                f"a chunk of {size} bytes does not fit a slot of {self.endpoint.slot_bytes}",
                link=self.link,
                request=chunk.header.request,
            )

    def progress(self, *, wait: bool) -> int:
        if self._pending:
            with self._mutex:
                self._send_copied(wait)
        return len(self._pending)

    def _send_copied(self, wait: bool) -> None:
        """Send the chunks whose copies are done, in order; with `wait`, at least the first."""
        while self._pending:
            first = self._pending[0]
            if first.copied is not None and not first.copied.query():
                if not wait:
                    return
                first.copied.synchronize()
            wait = False
            header = first.chunk.header
            if not self._detects_hangup and self.state is _OPEN:
                self._pump(0.0)
            self._raise_if_ended(header.request)
            self._pending.popleft()
            try:
                if self._purged.stale(header):
                    self._free.append(first.slot)
                else:
                    size = wire.write_head(first.page, header, checksum=self._checksum)
                    self._announce(first.slot, size, header.request)
            except PutFailed as failed:
                # Its put has returned, and another's may be running: report it like a refusal.
                self._refused.append(
                    ChunkRefused(failed.message, link=self.link, request=header.request)
                )
            finally:
                first.chunk.release()

    def _announce(self, slot: int, size: int, request: RequestId) -> None:
        """Announce the chunk in the slot, which is free again if that fails. All bookkeeping comes
        before the send: where both processes share a core, the receiver runs right after it."""
        seq = self._seq
        self._flight[slot] = (seq, request)
        self._seq = seq + 1
        try:
            self._send_chunk(slot, seq, size)
        except (Hangup, PutFailed) as failed:
            self._not_sent(slot, failed)
        # Read returned slots when none is left, many by one call; with large chunks at once, while
        # they are cached.
        if size > LARGE or not self._free:
            self._pump(0.0)

    def _not_sent(self, slot: int, failed: Hangup | PutFailed) -> NoReturn:
        self._seq, request = self._flight.pop(slot)
        self._free.append(slot)
        if isinstance(failed, Hangup):
            self._hung_up(failed)
            self._raise_if_ended(request)
            raise Bug(f"link {self.link}: hung up and yet open") from failed
        # To the transport, a peer that left looks like a failed transfer. A message that tells them
        # apart comes soon.
        self._await_end(_CAUSE_S)
        self._raise_if_ended(request)
        failed.locate(self.link, request)
        raise failed

    def _pump(self, timeout: float) -> bool:
        """Read and handle messages. Whether any came: there may be more."""
        try:
            messages = self._messages(timeout)
            self._handle(messages)
        except Hangup as hangup:
            self._finish(EndState.DEAD, str(hangup))
            return False
        return bool(messages)

    def _handle(self, messages: Sequence[LinkMessage]) -> None:
        for message in messages:
            kind, slot, seq, _size, generation = message
            sent, request = self._flight.pop(slot, _NOTHING_SENT)
            if kind == _RELEASE and sent == seq and generation == self._generation:
                self._free.append(slot)
            else:
                self._handle_other(message, sent, request)

    def _await_end(self, timeout: float) -> None:
        deadline = monotonic() + timeout
        while self.state is _OPEN and (left := deadline - monotonic()) > 0:
            self._pump(left)

    def _hung_up(self, hangup: Hangup) -> None:
        # A CLOSE message may still be unread before the hang-up: read it, or a close would look
        # like a death.
        self._pump_all()
        self._finish(EndState.DEAD, str(hangup))

    def _handle_other(self, message: LinkMessage, sent: int, request: RequestId) -> None:
        """Any message but the release of the chunk in its slot, whose sequence number and request
        are given."""
        kind, slot, seq, _size, generation = message
        if generation != self._generation:
            raise Hangup(
                f"the peer speaks as generation {generation}, this link is {self._generation}"
            )
        if kind == _CLOSE:
            self._finish(EndState.CLOSED_THERE)
            return
        if kind != _REFUSE or sent != seq:
            raise Hangup(f"the peer gave back slot {slot} seq {seq}, which it does not have")
        self._free.append(slot)
        self._refused.append(
            ChunkRefused("the receiver refused a chunk", link=self.link, request=request)
        )

    def _pump_all(self) -> None:
        while self.state is _OPEN and self._pump(0.0):
            pass

    def _poll(self) -> None:
        if self._mutex.acquire(blocking=False):
            try:
                self._pump_all()
            finally:
                self._mutex.release()

    def credits(self) -> int:
        self._poll()
        return len(self._free)

    def refusals(self) -> list[ChunkRefused]:
        self._poll()
        return [self._refused.popleft() for _ in range(len(self._refused))]

    def purge(self, request: RequestId) -> None:
        self._purged.purge(request)

    def check(self) -> None:
        self._poll()
        self._raise_if_ended()

    def close(self) -> None:
        if self._pending and self._mutex.acquire(
            blocking=False
        ):  # else the courier is sending them
            try:
                with suppress(PeerDead, LinkClosed):
                    while self._pending:
                        self._send_copied(wait=True)
            finally:
                self._mutex.release()
        self._close(self.transport, self._abandon)

    def _abandon(self) -> None:
        """Release the chunks that will not be sent, after their copies: those write to memory that
        is freed next."""
        while self._pending:
            first = self._pending.popleft()
            if first.copied is not None:
                first.copied.synchronize()
            first.chunk.release()


class SlotLease(msgspec.Struct, gc=False):
    """A taken chunk's lease of its slot. A struct, since making one takes no call into Python."""

    receiver: SlotReceiver
    seq: int

    def release(self) -> None:
        self.receiver.give_back(self.seq, _RELEASE)


class SlotReceiver(_End):
    """`contract.Receiver` over any `ReceiveTransport`."""

    def __init__(self, endpoint: Endpoint, transport: ReceiveTransport) -> None:
        super().__init__(endpoint.link)
        self.endpoint = endpoint
        self._generation = endpoint.generation
        self._slots = endpoint.slots
        self.transport = transport
        self._arrived: deque[tuple[int, wire.Page, int]] = deque()  # seq, memory and size
        # from arrival to release; popping makes a second release harmless
        self._slot_by_seq: dict[int, int] = {}
        self._purged = PurgedRequests()
        self._next = 0

    def take(self, timeout: float) -> Chunk | None:
        with self._mutex:
            return self._take(timeout)

    def _take(self, timeout: float) -> Chunk | None:
        deadline = monotonic() + timeout
        if not self._arrived and self.state is _OPEN:
            self._pump(timeout)  # read once, even with a timeout of 0
        return self._take_by(deadline)

    def _take_by(self, deadline: float) -> Chunk | None:
        while True:
            while self._arrived:
                chunk = self._open(*self._arrived.popleft())
                if not self._purged.stale(chunk.header):
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
        error.locate(self.link)

    def _pump(self, timeout: float) -> None:
        try:
            self._accept(self.transport.arrivals(timeout))
        except Hangup as hangup:
            self._finish(EndState.DEAD, str(hangup))

    def _accept(self, arrivals: Sequence[tuple[LinkMessage, wire.Page]]) -> None:
        slot_by_seq = self._slot_by_seq
        for message, page in arrivals:
            kind, slot, seq, size, generation = message
            if (
                seq == self._next
                and kind == _CHUNK
                and generation == self._generation
                and len(slot_by_seq) < self._slots
            ):
                self._next = seq + 1
                slot_by_seq[seq] = slot
                self._arrived.append((seq, page, size))
            else:
                self._handle_other(message)

    def _handle_other(self, message: LinkMessage) -> None:
        """Any message but that of the next chunk."""
        kind, _slot, seq, _size, generation = message
        if generation != self._generation:
            raise Hangup(
                f"the peer speaks as generation {generation}, this link is {self._generation}"
            )
        if kind == _CLOSE:
            self._finish(EndState.CLOSED_THERE)
        elif kind == _CHUNK and len(self._slot_by_seq) >= self._slots:
            raise Hangup("the peer sent more chunks than it has credits")
        else:
            raise Hangup(f"the peer sent kind {kind} seq {seq} where chunk {self._next} was due")

    def give_back(self, seq: int, kind: int) -> None:
        if (slot := self._slot_by_seq.pop(seq, None)) is None:
            return
        try:
            self.transport.reply(kind, slot, seq)
        except Hangup:
            return  # nobody needs the credit any more; `take` and `check` raise the reason

    def _poll(self) -> None:
        if self._mutex.acquire(blocking=False):
            try:
                if self.state is _OPEN:
                    self._pump(0.0)
            finally:
                self._mutex.release()

    def credits(self) -> int:
        self._poll()
        return self.endpoint.slots - len(self._slot_by_seq)

    def purge(self, request: RequestId) -> None:
        self._purged.purge(request)

    def check(self) -> None:
        self._poll()
        self._raise_if_ended()

    def close(self) -> None:
        self._close(self.transport, self._arrived.clear)
