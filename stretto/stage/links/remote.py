"""The sides of a link whose other side is in another host. Payloads become chunks (several, if one
exceeds a slot), which couriers carry: `RemoteOutlet` keeps what they have no room for and remembers
whose it is, `RemoteInlet` puts what has come in order. Used by `links.py`, on the loop thread."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from stretto.errors import StrettoError
from stretto.stage.links.inbox import Inboxes
from stretto.stage.links.outbox import Outbox
from stretto.stage.payload import Payload
from stretto.transport.contract import Chunk
from stretto.transport.courier import Incoming, Outgoing
from stretto.types import Mark, RequestId


class RemoteOutlet:
    """What has not left yet of each request."""

    def __init__(self) -> None:
        # Whose chunks wait for room, longest first. Few, so that a poll need not look at all boxes.
        self.full: dict[RequestId, None] = {}
        self._courier: Outgoing | None = None
        self._boxes: dict[RequestId, Outbox] = {}
        # of a chunk; known when the link is laid, which is before any request
        self._slot_bytes = 0

    def attach(self, courier: Outgoing) -> None:
        self._courier = courier
        self._slot_bytes = courier.slot_bytes

    def detach(self) -> None:
        self._courier = None

    def open(self, id: RequestId) -> None:
        self._boxes[id] = Outbox(id)

    def send(
        self, id: RequestId, payload: Payload | None, mark: Mark, event: torch.cuda.Event | None
    ) -> bool:
        """False: some of it found no room; `flush` comes back to it."""
        box = self._boxes[id]
        box.add(payload, self._slot_bytes, mark, event)
        sent = box.flush(self._courier)
        if not sent:
            self.full[id] = None
        return sent

    def flush(self) -> list[RequestId]:
        """Send what waited. Returns the requests of which nothing waits any more."""
        freed = [id for id in self.full if self._boxes[id].flush(self._courier)]
        for id in freed:
            del self.full[id]
        if self.full and self._courier is not None:
            self._courier.wake_when_sent()
        return freed

    def ended(self, id: RequestId) -> bool:
        """Its last chunk was sent, or waits."""
        return self._boxes[id].ended

    def forget(self, id: RequestId, purge: bool = False) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        box = self._boxes.pop(id, None)
        self.full.pop(id, None)
        if box is not None:
            box.drop()
        if purge and self._courier is not None:
            self._courier.purge(id)


class RemoteInlet:
    """What has come, in order."""

    def __init__(self) -> None:
        # Since the last `receive`: chunks of theirs may have come early.
        self._announced: list[RequestId] = []
        self._courier: Incoming | None = None
        self._boxes = Inboxes()

    @property
    def num_early(self) -> int:
        """Chunks of requests that are not announced yet."""
        return self._boxes.num_early

    def attach(self, courier: Incoming) -> None:
        self._courier = courier

    def detach(self) -> None:
        self._courier = None

    def open(self, id: RequestId) -> None:
        """Announce a request. What came for it early is received next."""
        self._boxes.announce(id)
        self._announced.append(id)

    def close(self, id: RequestId, purge: bool) -> None:
        self._boxes.forget(id)
        if purge and self._courier is not None:
            self._courier.purge(id)

    def receive(self) -> Iterator[tuple[RequestId, Chunk | StrettoError]]:
        """What has arrived: chunks, which are released when the next one is asked for, and what
        went wrong with a request."""
        announced = self._announced
        self._announced = []
        for id in announced:
            yield from self._take(id)
        while self._courier is not None and (chunk := self._courier.poll()) is not None:
            id = chunk.header.request
            try:
                self._boxes.push(chunk)
            except StrettoError as e:
                yield id, e
            else:
                yield from self._take(id)

    def _take(self, id: RequestId) -> Iterator[tuple[RequestId, Chunk]]:
        if id not in self._boxes:
            return
        inbox = self._boxes[id]
        while (chunk := inbox.pop()) is not None:
            try:
                yield id, chunk
            finally:
                chunk.release()
            if inbox.ended and not len(inbox):
                self._boxes.forget(id)
                return
