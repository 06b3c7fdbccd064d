"""The couriers: the only threads that wait for a link, so that a stage loop never does.

    loop --offer--> [queue] --Outgoing: pack, put--> connector --Incoming: take, upload--> [queue] --poll--> loop

Each end of a link has one courier with one thread. The stage loop's side of it (`offer`, `poll`, `faults`, `purge`)
never blocks. Whatever goes wrong is a typed error in `faults()`, counted, with the request named where it is known,
and the loop is woken: a failed put or a refused chunk fails its request and the link goes on; a dead or closed peer
ends the link. Links inside one host need no threads: see `inline`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from stretto.connector import wire
from stretto.connector.contract import (
    Chunk,
    Fences,
    LinkClosed,
    OnLink,
    PeerDead,
    PutFailed,
    Receiver,
    Refused,
    Sender,
)
from stretto.connector.handoff import Faults, Handoff
from stretto.connector.metrics import LinkMetrics
from stretto.errors import Bug, StrettoError, WireError
from stretto.types import RequestId

GRACE_S = 0.002
"""How long uploaded slots may wait for their courier while the sender has others to go on with."""
HEARTBEAT_S = 0.1
"""How long a courier waits before it looks whether its peer still lives. Data does not wait for it."""


class CourierBug(OnLink, Bug):
    """Something failed in a courier that should not be able to."""


class Parcel(Protocol):
    """A chunk to be, as the outbox hands it over."""

    @property
    def request(self) -> RequestId: ...

    @property
    def epoch(self) -> int: ...

    def pack(self) -> Chunk:
        """Make the chunk; may wait for copies to the host. Called once."""
        ...

    def drop(self) -> None:
        """Instead of `pack`, or after one that raised: it will not be sent."""
        ...


class Uploader(Protocol):
    """What brings chunks to the device (`stage.payload.copies.HostToDevice`)."""

    def upload(self, chunk: Chunk) -> Chunk: ...

    def reap(self) -> int:
        """Release the sources of the uploads that are done. Returns how many are running."""
        ...

    def wait_one(self) -> None:
        """Until the oldest upload is done, and its source released."""
        ...

    def wait(self) -> None:
        """Until all are."""
        ...


class OutLink(Protocol):
    """A stage loop's view of a link that it sends on."""

    @property
    def metrics(self) -> LinkMetrics: ...

    @property
    def ended(self) -> bool: ...

    def offer(self, parcel: Parcel) -> bool: ...

    def wake_when_sent(self) -> None: ...

    def purge(self, request: RequestId, epoch: int) -> None: ...

    def faults(self) -> list[StrettoError]: ...

    def close(self, *, drain: bool = True) -> None: ...


class InLink(Protocol):
    """A stage loop's view of a link that it receives on."""

    @property
    def metrics(self) -> LinkMetrics: ...

    @property
    def ended(self) -> bool: ...

    def poll(self) -> Chunk | None: ...

    def purge(self, request: RequestId, epoch: int) -> None: ...

    def faults(self) -> list[StrettoError]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Packed:
    """A parcel that was packed by the loop itself, with its rows on the host, or the error that came of it."""

    request: RequestId
    epoch: int
    chunk: Chunk | None
    error: Exception | None = None

    @classmethod
    def on_host(cls, parcel: Parcel) -> _Packed:
        try:
            chunk = parcel.pack()
            far = [tensor for tensor in chunk.tensors.values() if not tensor.is_cpu]
            if far:
                if chunk.event is not None:
                    torch.cuda.current_stream(far[0].device).wait_event(chunk.event)
                host = Chunk(chunk.header, {name: tensor.cpu() for name, tensor in chunk.tensors.items()})
                chunk.release()
                chunk = host
        except Exception as error:  # noqa: BLE001  told by the courier, as it tells those of its own packing
            parcel.drop()
            return cls(parcel.request, parcel.epoch, None, error)
        return cls(parcel.request, parcel.epoch, chunk)

    def pack(self) -> Chunk:
        if self.chunk is None:
            raise Bug("rows could not be packed") from self.error
        chunk, self.chunk = self.chunk, None
        return chunk

    def drop(self) -> None:
        chunk, self.chunk = self.chunk, None
        if chunk is not None:
            chunk.release()


class Outgoing:
    """The sending end's courier. All public methods are for the stage loop's thread.

    `stream` is where it joins rows that are still on the device and copies them to the link's slots. The copies of
    several chunks run one behind the other while it waits for the first. With `async_d2h` off there is none of that:
    `offer` itself brings the rows to the host and waits for them."""

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
    ) -> None:
        self.metrics = LinkMetrics(link)
        self._sender = sender
        self._stream = stream
        self._async_d2h = async_d2h
        self._leaving: deque[tuple[float, int, RequestId]] = deque()  # put, but not sent: since when, bytes, whose
        self._wake = wake
        self._clock = clock
        self._queue: Handoff[tuple[float, Parcel]] = Handoff(capacity)
        self._faults = Faults(self.metrics, wake)
        self._fences = Fences()
        self._heard = clock()
        self._hungry = False  # the loop wants to hear when something has left
        self._abandon = False  # closing, and the rest is not to be sent
        # A daemon, so that a host whose loop died exits and is restarted; in good order `close` joins it.
        self._thread = threading.Thread(target=self._run, name=f"stretto-out-{link}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def ended(self) -> bool:
        """The link is over, by `close` or by a fault."""
        return self._queue.closed

    def offer(self, parcel: Parcel) -> bool:
        """Hand over a parcel. False: no room (the loop is woken when there is), or the link has ended."""
        if not self._async_d2h and not self._queue.full:  # only we fill it, so there is room for what we make now
            parcel = _Packed.on_host(parcel)
        item = (self._clock(), parcel)
        accepted = self._queue.offer(item)
        if not accepted:
            # Say so first and then try again: the courier may have emptied the queue in between, and would then
            # have nothing left to wake us for.
            self._hungry = True
            accepted = self._queue.offer(item)
            self.metrics.refused_offers += not accepted
        self.metrics.queued = len(self._queue)
        return accepted

    def wake_when_sent(self) -> None:
        """Wake the loop once after the next chunk has left: what it held (a slot of the ring) is free then."""
        self._hungry = True

    def purge(self, request: RequestId, epoch: int) -> None:
        """Do not send chunks of `request` from before `epoch`, neither those that wait here nor those to come."""
        self._fences.purge(request, epoch)
        self._sender.purge(request, epoch)

    def faults(self) -> list[StrettoError]:
        return self._faults.take()

    def close(self, *, drain: bool = True, timeout: float = 5.0) -> None:
        """Send what is queued (or drop it), close the sender, join the thread. Waits; for the end of a host."""
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
        except Exception as error:  # noqa: BLE001  a courier that dies in silence would hang its requests
            self._end(CourierBug(repr(error), link=self.metrics.link))
        self._queue.close()
        self._drop_rest()
        self._sender.close()
        self._wake()

    def _step(self) -> bool:
        # With copies running, only look: with nothing more to start, the time is theirs.
        item = self._queue.poll() if self._leaving else self._queue.wait_item(HEARTBEAT_S)
        if item is None and self._leaving:
            self._settle(wait=True)
            return True
        now = self._clock()
        if item is None or now - self._heard >= HEARTBEAT_S:
            self._heard = now
            self._hear()
        if item is None:
            if not self._queue.closed:
                self._sender.check()
            return not self._queue.closed
        since, parcel = item
        self.metrics.queued = len(self._queue)
        self.metrics.queue.observe(now - since)
        if self._abandon or self._fences.stale(parcel):
            parcel.drop()
            self.metrics.purged += 1
        else:
            self._send(parcel)
        if self._hungry:
            self._hungry = False
            self._wake()
        return True

    def _send(self, parcel: Parcel) -> None:
        request = parcel.request
        try:
            chunk = parcel.pack()
        except Exception as error:  # noqa: BLE001  rows that cannot be packed are their request's end, not the link's
            parcel.drop()
            self._fail(CourierBug(repr(error), link=self.metrics.link, request=request), parcel.epoch)
            return
        try:
            self._put(chunk)
        except PutFailed as error:
            chunk.release()
            self._fail(PutFailed(error.message, link=self.metrics.link, request=request), parcel.epoch)
        except (PeerDead, LinkClosed) as error:
            chunk.release()
            raise type(error)(error.message, link=self.metrics.link, request=request) from error
        self._settle(wait=False)  # outside: by now the chunk may be the sender's, and what it says about another

    def _put(self, chunk: Chunk) -> None:
        metrics = self.metrics
        size, start = wire.blob_bytes(chunk.header), self._clock()
        if not self._sender.put(chunk, 0.0):
            metrics.stalls += 1
            while not self._sender.put(chunk, HEARTBEAT_S):
                self._hear()
                if self._abandon:
                    chunk.release()
                    metrics.purged += 1
                    return
        self._leaving.append((start, size, chunk.header.request))

    def _settle(self, *, wait: bool) -> None:
        """Count what has left since the last look."""
        left = self._sender.settle(wait=wait)
        metrics, now = self.metrics, self._clock()
        while len(self._leaving) > left:
            start, size, _request = self._leaving.popleft()
            metrics.put.observe(now - start)
            metrics.chunks += 1
            metrics.bytes += size

    def _hear(self) -> None:
        """What the other end has to say. Not with every chunk: each of these may be a system call."""
        self.metrics.credits = self._sender.credits()
        for refused in self._sender.refusals():
            self._fail(Refused(refused.message, link=self.metrics.link, request=refused.request))

    def _fail(self, error: OnLink, epoch: int | None = None) -> None:
        """One request is lost on this link. Its later chunks would only be gaps at the other end: stop them."""
        if error.request is not None and epoch is not None:
            self._fences.purge(error.request, epoch + 1)
        self._faults.add(error)

    def _end(self, error: OnLink) -> None:
        """The link is over: tell each request that had something on its way (or, if none had, just that)."""
        self._queue.close()
        requests = {request for _start, _size, request in self._leaving}
        if error.request is not None:
            requests.add(error.request)
        while (item := self._queue.poll()) is not None:
            requests.add(item[1].request)
            item[1].drop()
        for request in sorted(requests):
            self._faults.add(type(error)(error.message, link=self.metrics.link, request=request))
        if not requests:
            self._faults.add(error)

    def _drop_rest(self) -> None:
        while (item := self._queue.poll()) is not None:
            item[1].drop()
            self.metrics.purged += 1
        self.metrics.queued = 0


class Incoming:
    """The receiving end's courier. All public methods are for the stage loop's thread.

    Without an `uploader` chunks are handed on as views that hold their credit until the stage releases them."""

    def __init__(
        self,
        receiver: Receiver,
        link: str,
        wake: Callable[[], None],
        *,
        uploader: Uploader | None = None,
        capacity: int = 64,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.metrics = LinkMetrics(link)
        self._receiver = receiver
        self._wake = wake
        self._clock = clock
        self._uploader = uploader
        self._queue: Handoff[tuple[float, Chunk]] = Handoff(capacity)
        self._faults = Faults(self.metrics, wake)
        self._fences = Fences()
        self._closing = False
        self._looked = clock()
        self._thread = threading.Thread(target=self._run, name=f"stretto-in-{link}", daemon=True)  # as in Outgoing

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
            if not self._fences.stale(chunk.header):
                return chunk
            chunk.release()
            self.metrics.purged += 1
        return None

    def purge(self, request: RequestId, epoch: int) -> None:
        """Drop chunks of `request` from before `epoch`, both those that wait here and those to come."""
        self._fences.purge(request, epoch)
        self._receiver.purge(request, epoch)

    def faults(self) -> list[StrettoError]:
        return self._faults.take()

    def close(self, *, timeout: float = 5.0) -> None:
        """Close the receiver, join the thread, release what was not polled. Waits; for the end of a host."""
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
        except Exception as error:  # noqa: BLE001  a courier that dies in silence would hang its requests
            self._faults.add(CourierBug(repr(error), link=self.metrics.link))
        self._queue.close()
        if self._uploader is not None:
            self._uploader.wait()
        self._receiver.close()
        self._wake()

    def _step(self) -> bool:
        uploading = self._uploader.reap() if self._uploader is not None else 0
        try:
            chunk = self._receiver.take(self._patience(uploading))
        except WireError as error:
            self._faults.add(error)
            return True
        if chunk is not None:
            return self._hand_over(chunk)
        if uploading and self._uploader is not None:
            self._uploader.wait_one()
        else:
            self.metrics.credits = self._receiver.credits()
        return not self._closing

    def _patience(self, uploading: int) -> float:
        """How long to wait for the next chunk. Uploads hold slots: while they hold few, the next chunk is worth waiting
        for, so that its upload is queued behind theirs; when they hold many, the sender waits for us."""
        if not uploading:
            return HEARTBEAT_S
        return GRACE_S if 2 * uploading <= self._receiver.endpoint.slots else 0.0

    def _hand_over(self, chunk: Chunk) -> bool:
        metrics = self.metrics
        size, start = wire.blob_bytes(chunk.header), self._clock()
        landed = chunk if self._uploader is None else self._uploader.upload(chunk)
        if not self._queue.offer((start, landed)):
            metrics.stalls += 1
            if self._uploader is not None:
                self._uploader.wait()
            while not self._queue.offer((start, landed)):
                if self._closing:
                    landed.release()
                    return False
                self._queue.wait_room(HEARTBEAT_S)
        metrics.take.observe(self._clock() - start)
        metrics.chunks += 1
        metrics.bytes += size
        metrics.queued = len(self._queue)
        if start - self._looked >= HEARTBEAT_S:  # not with every chunk: it may be a system call
            self._looked = start
            metrics.credits = self._receiver.credits()
        self._wake()
        return True
