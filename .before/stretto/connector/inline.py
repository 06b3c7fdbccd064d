"""Links inside one host: what the couriers offer to a stage loop, without their threads.

For connectors that are `inline` (`local`): a put is a hand-over under a lock, so the loop does it itself, and a
chunk is with the next stage in the same pass of the loop. Same metrics, same faults, same purge."""

from __future__ import annotations

import time
from collections.abc import Callable

from stretto.connector import wire
from stretto.connector.contract import Chunk, Fences, InlineReceiver, LinkClosed, PeerDead, PutFailed, Sender
from stretto.connector.courier import Parcel
from stretto.connector.handoff import Faults
from stretto.connector.metrics import LinkMetrics
from stretto.errors import StrettoError, WireError
from stretto.types import RequestId


class InlineOut:
    """The sending end of a link inside the host."""

    def __init__(
        self,
        sender: Sender,
        link: str,
        wake: Callable[[], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.metrics = LinkMetrics(link)
        self.ended = False
        self._sender = sender
        self._clock = clock
        self._faults = Faults(self.metrics, wake)
        self._fences = Fences()

    def offer(self, parcel: Parcel) -> bool:
        """Hand over a parcel. False: no credit now, or the link has ended."""
        if self._fences.stale(parcel):
            parcel.drop()
            self.metrics.purged += 1
            return True
        self._check(parcel.request)
        if self.ended:
            return False
        if self._sender.credits() < 1:  # only we take credits, so there will be one below
            self.metrics.stalls += 1
            self.metrics.refused_offers += 1
            return False
        self._put(parcel.pack())
        return True

    def _put(self, chunk: Chunk) -> None:
        size, start = wire.blob_bytes(chunk.header), self._clock()
        try:
            self._sender.put(chunk, 0.0)
        except (PutFailed, PeerDead, LinkClosed) as error:
            request, epoch = chunk.header.request, chunk.header.epoch
            chunk.release()
            self._fences.purge(request, epoch + 1)
            self.ended = not isinstance(error, PutFailed)
            self._faults.add(type(error)(error.message, link=self.metrics.link, request=request))
            return
        self.metrics.put.observe(self._clock() - start)
        self.metrics.chunks += 1
        self.metrics.bytes += size
        self.metrics.credits = self._sender.credits()

    def _check(self, request: RequestId | None) -> None:
        """End the link if its peer is gone, once."""
        if self.ended:
            return
        try:
            self._sender.check()
        except (PeerDead, LinkClosed) as error:
            self.ended = True
            self._faults.add(type(error)(error.message, link=self.metrics.link, request=request))

    def wake_when_sent(self) -> None:
        """Nothing to do: chunks leave within `offer`."""

    def purge(self, request: RequestId, epoch: int) -> None:
        self._fences.purge(request, epoch)
        self._sender.purge(request, epoch)

    def faults(self) -> list[StrettoError]:
        self._check(None)
        for refused in self._sender.refusals():
            self._faults.add(refused)
        return self._faults.take()

    def close(self, *, drain: bool = True) -> None:
        self.ended = True
        self._sender.close()


class InlineIn:
    """The receiving end of a link inside the host."""

    def __init__(
        self,
        receiver: InlineReceiver,
        link: str,
        wake: Callable[[], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.metrics = LinkMetrics(link)
        self.ended = False
        self._receiver = receiver
        self._clock = clock
        self._faults = Faults(self.metrics, wake)
        receiver.on_arrival(wake)

    def poll(self) -> Chunk | None:
        if self.ended:
            return None
        start = self._clock()
        try:
            chunk = self._receiver.take(0.0)
        except (PeerDead, LinkClosed) as error:
            self.ended = True
            self._faults.add(type(error)(error.message, link=self.metrics.link))
            return None
        except WireError as error:
            self._faults.add(error)
            return self.poll()
        if chunk is not None:
            self.metrics.take.observe(self._clock() - start)
            self.metrics.chunks += 1
            self.metrics.bytes += wire.blob_bytes(chunk.header)
        self.metrics.credits = self._receiver.credits()
        return chunk

    def purge(self, request: RequestId, epoch: int) -> None:
        self._receiver.purge(request, epoch)

    def faults(self) -> list[StrettoError]:
        return self._faults.take()

    def close(self) -> None:
        self.ended = True
        self._receiver.close()
