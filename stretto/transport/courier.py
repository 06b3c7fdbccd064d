"""The couriers: the only threads that wait for a link, so that a stage loop never does.

    loop --offer--> [queue] --Outgoing: put--> connector --Incoming: take, upload--> [queue]
    --poll--> loop

Each end of a link has one courier with one thread. The methods that the stage loop calls (`offer`,
`poll`, `faults`, `purge`) never block. Every failure is a typed error in `faults()`: counted, with
the request named where it is known, and the loop is woken. A failed put or a refused chunk fails
its request, and the link goes on. A dead or closed peer ends the link."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from stretto.errors import Bug, Gone, StrettoError, WireError
from stretto.observe.recorder import Histogram, Recorder
from stretto.transport import wire
from stretto.transport.bounded_queue import BoundedQueue
from stretto.transport.contract import (
    Chunk,
    ChunkRefused,
    LinkClosed,
    OnLink,
    PeerDead,
    PurgedRequests,
    PutFailed,
    Receiver,
    Sender,
)
from stretto.types import RequestId

log = logging.getLogger(__name__)

GRACE_S = 0.002
"""How long the receiving courier waits for the next chunk while uploads hold a few slots."""
HEARTBEAT_S = 0.1
"""How long a courier waits before it checks whether its peer is alive. Data does not wait for
it."""


class CourierBug(OnLink, Bug):
    """A courier failed in a way that should be impossible."""


class Uploader(Protocol):
    """Copies chunks to the device (`stage.payload.copies.HostToDevice`)."""

    def upload(self, chunk: Chunk) -> Chunk: ...

    def reap(self) -> int:
        """Release the sources of finished uploads. Returns how many are running."""
        ...

    def wait_one(self) -> None:
        """Until the oldest upload is done and its source released."""
        ...

    def wait(self) -> None:
        """Until all uploads are done and their sources released."""
        ...


@dataclass(slots=True)
class LinkMetrics:
    """Metrics of one end of a link, which the host reads. The sending end fills `put`, the
    receiving one `take`, both the rest.

    Every number has one writing thread (the courier's, or the stage loop's for queues), so plain
    integers suffice; readers on other threads see a value that is at most one update old."""

    link: str
    chunks: int = 0
    bytes: int = 0  # of payload
    # from the first attempt to the end of the put, credits included
    put: Histogram = field(default_factory=Histogram)
    # from a chunk's arrival to its hand-over, upload included
    take: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)  # between stage loop and courier
    # Of chunks with rows on a GPU: from the start of their copy until it was found to be done.
    # Sending: device to host, and the sending behind it; receiving: host to device.
    copy: Histogram = field(default_factory=Histogram)
    credits: int = 0  # when last read
    queued: int = 0  # chunks now between stage loop and courier
    stalls: int = 0  # chunks that found no credit (receiving: no room in the queue)
    purged: int = 0  # chunks dropped because their request was over
    errors: Counter[str] = field(default_factory=Counter)  # by class name
    recorder: Recorder = field(default_factory=Recorder)  # of spans

    def hop(self, what: str, start: float, stop: float, size: int) -> None:
        """A chunk was put or taken; seconds of the monotonic clock."""
        self.recorder.span(
            f"{self.link} {what}", f"{size} bytes", int(1e9 * start), int(1e9 * stop)
        )

    def error(self, error: Exception) -> None:
        self.errors[type(error).__name__] += 1


@dataclass(slots=True)
class ErrorQueue:
    """Errors for the stage loop. Each is counted and logged, and wakes the loop."""

    metrics: LinkMetrics
    wake: Callable[[], None]
    _queue: deque[StrettoError] = field(default_factory=deque)

    def add(self, error: StrettoError) -> None:
        # A close in good order is reported too, since requests may depend on the link, but it is
        # not worth a warning.
        level = logging.INFO if isinstance(error, Gone) else logging.WARNING
        log.log(level, "link %s: %s: %s", self.metrics.link, type(error).__name__, error)
        self.metrics.error(error)
        self._queue.append(error)
        self.wake()

    def take(self) -> list[StrettoError]:
        taken: list[StrettoError] = []
        while self._queue:
            taken.append(self._queue.popleft())
        return taken


class Outgoing:
    """The sending end's courier. All public methods are for the stage loop's thread.

    `stream` is where it copies device rows to the link's slots. It starts the copies of several
    chunks before it waits for the first. With `async_d2h` off, `offer` itself copies the rows to
    the host and waits for them."""

    def __init__(
        self,
        sender: Sender,
        link: str,
        wake: Callable[[], None],
        *,
        stream: torch.cuda.Stream | None = None,
        async_d2h: bool = True,
        capacity: int = 64,
        clock: Callable[[], float] = time.perf_counter,
        recorder: Recorder | None = None,
    ) -> None:
        self.metrics = LinkMetrics(link, recorder=recorder or Recorder())
        self.slot_bytes = sender.endpoint.slot_bytes
        """The most bytes that an encoded chunk may have."""
        self._sender = sender
        self._stream = stream
        self._async_d2h = async_d2h
        # put, but not sent: since when, bytes, ...
        self._pending: deque[tuple[float, int, RequestId, bool]] = deque()
        self._wake = wake
        self._clock = clock
        self._queue: BoundedQueue[tuple[float, Chunk]] = BoundedQueue(capacity)
        self._faults = ErrorQueue(self.metrics, wake)
        self._purged = PurgedRequests()
        self._polled = clock()
        self._wake_requested = False  # the loop waits for room
        self._abandon = False  # closing, and the rest is not to be sent
        # A daemon, so that a host whose loop died exits and is restarted; in good order `close`
        # joins it.
        self._thread = threading.Thread(target=self._run, name=f"stretto-out-{link}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ended(self) -> bool:
        """The link is over, by `close` or by a fault."""
        return self._queue.closed

    def offer(self, chunk: Chunk) -> bool:
        """Take over a chunk. False: no room (the loop is woken when there is), or the link has
        ended."""
        if (
            not self._async_d2h and not self._queue.full
        ):  # only the loop fills the queue, so the room stays
            _move_to_host(chunk)
        item = (self._clock(), chunk)
        accepted = self._queue.offer(item)
        if not accepted:
            # Ask for a wake-up first and then try again: the courier may have emptied the queue in
            # between, and would then have nothing left to wake the loop for.
            self._wake_requested = True
            accepted = self._queue.offer(item)
        self.metrics.queued = len(self._queue)
        return accepted

    def wake_when_sent(self) -> None:
        """Wake the loop once after the next chunk has left the queue."""
        self._wake_requested = True

    def purge(self, request: RequestId) -> None:
        """Do not send chunks of `request`, neither those that wait here nor those to come."""
        self._purged.purge(request)
        self._sender.purge(request)

    def faults(self) -> list[StrettoError]:
        return self._faults.take()

    def close(self, *, drain: bool = True, timeout: float = 5.0) -> None:
        """Send what is queued (or drop it), close the sender, join the thread. Waits; for the end
        of a host."""
        self._abandon = self._abandon or not drain
        self._queue.close()
        if self._thread.is_alive() and drain:
            self._thread.join(timeout)
            self._abandon = True
        self._sender.close()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self._drop_rest()

    def _run(self) -> None:
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                while self._step():
                    pass
        except (PeerDead, LinkClosed) as error:
            if not self._abandon:
                self._end(error)
        except Exception as error:  # noqa: BLE001  a silent death would hang its requests
            self._end(CourierBug(repr(error), link=self.metrics.link))
        self._queue.close()
        self._drop_rest()
        self._sender.close()
        self._wake()

    def _step(self) -> bool:
        # While copies run, do not wait for the queue: with nothing more to start, wait for the
        # copies.
        item = self._queue.poll() if self._pending else self._queue.wait_item(HEARTBEAT_S)
        if item is None and self._pending:
            self._progress(wait=True)
            return True
        now = self._clock()
        if item is None or now - self._polled >= HEARTBEAT_S:
            self._polled = now
            self._poll_sender()
        if item is None:
            if not self._queue.closed:
                self._sender.check()
            # the length second, so that what came before the end is sent
            return not self._queue.closed or len(self._queue) > 0
        since, chunk = item
        self.metrics.queued = len(self._queue)
        self.metrics.queue.observe(now - since)
        if self._abandon or self._purged.stale(chunk.header):
            chunk.release()
            self.metrics.purged += 1
        else:
            self._send(chunk)
        if self._wake_requested:
            self._wake_requested = False
            self._wake()
        return True

    def _send(self, chunk: Chunk) -> None:
        request = chunk.header.request
        try:
            self._put(chunk)
        except PutFailed as error:
            chunk.release()
            self._purged.purge(request)  # its later chunks would only be gaps at the other end
            self._faults.add(PutFailed(error.message, link=self.metrics.link, request=request))
        except (PeerDead, LinkClosed) as error:
            chunk.release()
            raise type(error)(error.message, link=self.metrics.link, request=request) from error
        # outside: an error here may be about another chunk, and this one is the sender's
        self._progress(wait=False)

    def _put(self, chunk: Chunk) -> None:
        metrics = self.metrics
        size, start = wire.blob_bytes(chunk.header), self._clock()
        if not self._sender.put(chunk, 0.0):
            metrics.stalls += 1
            while not self._sender.put(chunk, HEARTBEAT_S):
                self._poll_sender()
                if self._abandon:
                    chunk.release()
                    metrics.purged += 1
                    return
        on_device = any(t.is_cuda for t in chunk.tensors.values())
        self._pending.append((start, size, chunk.header.request, on_device))

    def _progress(self, *, wait: bool) -> None:
        """Count the chunks whose copies are done and that have been sent since."""
        left = self._sender.progress(wait=wait)
        metrics, now = self.metrics, self._clock()
        while len(self._pending) > left:
            start, size, _request, on_device = self._pending.popleft()
            metrics.put.observe(now - start)
            if on_device:
                metrics.copy.observe(now - start)
            metrics.hop("put", start, now, size)
            metrics.chunks += 1
            metrics.bytes += size

    def _poll_sender(self) -> None:
        """Read credits and refusals. Not with every chunk: each of these may be a system call."""
        self.metrics.credits = self._sender.credits()
        for refused in self._sender.refusals():
            self._faults.add(
                ChunkRefused(refused.message, link=self.metrics.link, request=refused.request)
            )

    def _end(self, error: OnLink) -> None:
        """The link is over: report a fault for each request that had a chunk in flight (or one
        fault without a request, if none had)."""
        self._queue.close()
        requests = {request for _start, _size, request, _on_device in self._pending}
        if error.request is not None:
            requests.add(error.request)
        while (item := self._queue.poll()) is not None:
            requests.add(item[1].header.request)
            item[1].release()
        for request in sorted(requests):
            self._faults.add(type(error)(error.message, link=self.metrics.link, request=request))
        if not requests:
            self._faults.add(error)

    def _drop_rest(self) -> None:
        while (item := self._queue.poll()) is not None:
            item[1].release()
            self.metrics.purged += 1
        self.metrics.queued = 0


class Incoming:
    """The receiving end's courier. All public methods are for the stage loop's thread."""

    def __init__(
        self,
        receiver: Receiver,
        link: str,
        wake: Callable[[], None],
        *,
        uploader: Uploader,
        capacity: int = 64,
        clock: Callable[[], float] = time.perf_counter,
        recorder: Recorder | None = None,
        copy: Histogram | None = None,
    ) -> None:
        """`copy`: where the uploader records how long its copies take."""
        self.metrics = LinkMetrics(link, copy=copy or Histogram(), recorder=recorder or Recorder())
        self._receiver = receiver
        self._wake = wake
        self._clock = clock
        self._uploader = uploader
        self._queue: BoundedQueue[tuple[float, Chunk]] = BoundedQueue(capacity)
        self._faults = ErrorQueue(self.metrics, wake)
        self._purged = PurgedRequests()
        self._closing = False
        self._polled = clock()
        # as in Outgoing
        self._thread = threading.Thread(target=self._run, name=f"stretto-in-{link}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Nothing more will come, by `close` or by a fault; what has come can still be polled."""
        return self._queue.closed

    def poll(self) -> Chunk | None:
        """The next chunk, which is then the caller's to release."""
        while (item := self._queue.poll()) is not None:
            since, chunk = item
            self.metrics.queued = len(self._queue)
            self.metrics.queue.observe(self._clock() - since)
            if not self._purged.stale(chunk.header):
                return chunk
            chunk.release()
            self.metrics.purged += 1
        return None

    def purge(self, request: RequestId) -> None:
        """Drop chunks of `request`, both those that wait here and those to come."""
        self._purged.purge(request)
        self._receiver.purge(request)

    def faults(self) -> list[StrettoError]:
        return self._faults.take()

    def close(self, *, timeout: float = 5.0) -> None:
        """Close the receiver, join the thread, release what was not polled. Waits; for the end of a
        host."""
        self._closing = True
        self._queue.close()
        self._receiver.close()
        if self._thread.is_alive():
            self._thread.join(timeout)
        while (item := self._queue.poll()) is not None:
            item[1].release()
        self.metrics.queued = 0

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except (PeerDead, LinkClosed) as error:
            if not self._closing:
                self._faults.add(type(error)(error.message, link=self.metrics.link))
        except Exception as error:  # noqa: BLE001  a silent death would hang its requests
            self._faults.add(CourierBug(repr(error), link=self.metrics.link))
        self._queue.close()
        self._uploader.wait()
        self._receiver.close()
        self._wake()

    def _step(self) -> bool:
        uploading = self._uploader.reap()
        try:
            chunk = self._receiver.take(self._timeout(uploading))
        except WireError as error:
            self._faults.add(error)
            return True
        if chunk is not None:
            return self._hand_over(chunk)
        if uploading:
            self._uploader.wait_one()
        else:
            self.metrics.credits = self._receiver.credits()
        return not self._closing

    def _timeout(self, uploading: int) -> float:
        """How long to wait for the next chunk. Uploads hold slots. While they hold few, waiting
        lets the next upload queue behind theirs; when they hold more than half of the slots, finish
        them first: the sender needs slots."""
        if not uploading:
            return HEARTBEAT_S
        return GRACE_S if 2 * uploading <= self._receiver.endpoint.slots else 0.0

    def _hand_over(self, chunk: Chunk) -> bool:
        metrics = self.metrics
        size, start = wire.blob_bytes(chunk.header), self._clock()
        uploaded = self._uploader.upload(chunk)
        if not self._queue.offer((start, uploaded)):
            metrics.stalls += 1
            self._uploader.wait()
            while not self._queue.offer((start, uploaded)):
                if self._closing:
                    uploaded.release()
                    return False
                self._queue.wait_room(HEARTBEAT_S)
        now = self._clock()
        metrics.take.observe(now - start)
        metrics.hop("take", start, now, size)
        metrics.chunks += 1
        metrics.bytes += size
        metrics.queued = len(self._queue)
        if start - self._polled >= HEARTBEAT_S:  # not with every chunk: it may be a system call
            self._polled = start
            metrics.credits = self._receiver.credits()
        self._wake()
        return True


def _move_to_host(chunk: Chunk) -> None:
    """Replace a chunk's device tensors by copies on the host. Waits for them."""
    on_device = [tensor for tensor in chunk.tensors.values() if not tensor.is_cpu]
    if on_device:
        if chunk.event is not None:
            torch.cuda.current_stream(on_device[0].device).wait_event(chunk.event)
        chunk.tensors = {name: tensor.cpu() for name, tensor in chunk.tensors.items()}
        chunk.event = None
