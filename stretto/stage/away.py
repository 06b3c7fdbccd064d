"""The sides of a link whose other side is in another host. Payloads become chunks (several, if one exceeds a slot),
which couriers carry: `Departures` keeps what they have no room for and remembers whose it is, `Arrivals` puts what has
come in order. Used by `links.py`, on the loop thread."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stretto.connector.contract import Chunk
from stretto.connector.courier import Incoming, Outgoing
from stretto.errors import StrettoError
from stretto.stage.inbox import Inboxes
from stretto.stage.outbox import Outbox
from stretto.stage.payload.schema import Payload
from stretto.types import Mark, RequestId


class Departures:
    """What has not left yet of each request."""

    def __init__(self) -> None:
        # Whose chunks wait for room, longest first. Few, so that a turn need not look at all boxes.
        self.full: dict[RequestId, None] = {}
        self._courier: Outgoing | None = None
        self._boxes: dict[RequestId, Outbox] = {}
        self._slot_bytes = 0  # of a chunk; known when the link is laid, which is before any request

    def attach(self, courier: Outgoing) -> None:
        self._courier, self._slot_bytes = courier, courier.slot_bytes

    def detach(self) -> None:
        self._courier = None

    def open(self, id: RequestId) -> None:
        self._boxes[id] = Outbox(id, self._offer)

    def send(self, id: RequestId, payload: Payload | None, mark: Mark, event: torch.cuda.Event | None) -> bool:
        sent = self._boxes[id].send(payload, self._slot_bytes, mark, event)
        if not sent:
            self.full[id] = None
        return sent

    def flush(self) -> list[RequestId]:
        """Send what waited. Returns the requests of which nothing waits any more."""
        freed = [id for id in self.full if self._boxes[id].flush()]
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

    def _offer(self, chunk: Chunk) -> bool:
        return self._courier is not None and self._courier.offer(chunk)


class Arrivals:
    """`read` is given each chunk in order, `fail` what went wrong with a request, `ended` those whose last chunk was
    read."""

    def __init__(
        self,
        read: Callable[[RequestId, Chunk], None],
        fail: Callable[[RequestId, StrettoError], None],
        ended: Callable[[RequestId], None],
    ) -> None:
        self._read, self._fail, self._ended = read, fail, ended
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
        """Announce a request, and take what came for it early."""
        self._boxes.announce(id)
        self._take(id)

    def close(self, id: RequestId, purge: bool) -> None:
        self._boxes.forget(id)
        if purge and self._courier is not None:
            self._courier.purge(id)

    def turn(self) -> bool:
        """Take what has arrived. True: something had."""
        did = False
        while self._courier is not None and (chunk := self._courier.poll()) is not None:
            did = True
            id = chunk.header.request
            try:
                self._boxes.push(chunk)
                self._take(id)
            except StrettoError as e:
                self._fail(id, e)
        return did

    def _take(self, id: RequestId) -> None:
        if id not in self._boxes:
            return
        inbox = self._boxes[id]
        while (chunk := inbox.pop()) is not None:
            try:
                self._read(id, chunk)
            finally:
                chunk.release()
            if inbox.ended and not len(inbox):
                self._boxes.forget(id)
                self._ended(id)
                return
