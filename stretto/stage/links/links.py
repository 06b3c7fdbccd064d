"""The links of a host's stages: outlets that stages send on, inlets that they receive on. Made and
used by the host; on the loop thread.

Between stages of one host a payload is handed over as it is. Between hosts it goes as chunks:
`remote.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from stretto.errors import StrettoError
from stretto.stage.links.remote import RemoteInlet, RemoteOutlet
from stretto.stage.payload import Payload, unpack
from stretto.stage.stage import Arrival, Stage, ToLink
from stretto.transport.contract import Chunk
from stretto.types import Mark, RequestId


class Inlet:
    """The receiving side: which requests were announced, and what comes for them from another
    host."""

    def __init__(self, link: str, kind: type[Payload], is_local: bool = False) -> None:
        """`is_local`: the sender is in this host."""
        self.link = link
        self.kind = kind
        self.is_local = is_local
        self._open: set[RequestId] = set()
        # of a sender in another host
        self.remote = RemoteInlet()

    def __len__(self) -> int:
        """Requests that it holds anything for."""
        return len(self._open) + self.remote.num_early

    def open(self, id: RequestId) -> None:
        """Announce a request; what came for it early is received next."""
        self._open.add(id)
        if not self.is_local:
            self.remote.open(id)

    def close(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        self._open.discard(id)
        if not self.is_local:
            self.remote.close(id, purge)

    def take(self, sent: ToLink) -> Arrival | None:
        """Of the sender in this host. None: the request is over here."""
        if sent.request not in self._open:
            return None
        if sent.mark is Mark.REQUEST_END:
            self._open.discard(sent.request)
        return Arrival(self.link, sent.request, sent.payload, sent.mark, sent.event)

    def receive(self) -> Iterator[tuple[RequestId, Arrival | StrettoError]]:
        """What has arrived from another host since the last call, or what went wrong with it."""
        for id, item in () if self.is_local else self.remote.receive():
            if isinstance(item, Chunk):
                try:
                    payload = unpack(self.kind, item)
                except StrettoError as e:
                    yield id, e
                else:
                    yield id, Arrival(self.link, id, payload, item.header.mark, item.event)
                if item.header.mark is Mark.REQUEST_END:
                    self._open.discard(id)
            else:
                yield id, item


class Outlet:
    """The sending side: which requests are open, and which must rest."""

    def __init__(self, link: str, kind: type[Payload], is_local: bool = False) -> None:
        """`is_local`: the receiver is in this host."""
        self.link = link
        self.kind = kind
        self.is_local = is_local
        # payloads, to a receiver in this host
        self.local_payloads = 0
        # to one in another host
        self.remote = RemoteOutlet()
        self._open: set[RequestId] = set()
        # whose listener does not keep up
        self._slow: set[RequestId] = set()

    def __len__(self) -> int:
        """Requests that it holds anything for."""
        return len(self._open)

    def __contains__(self, id: RequestId) -> bool:
        return id in self._open

    def open(self, id: RequestId) -> None:
        self._open.add(id)
        if not self.is_local:
            self.remote.open(id)

    def hand(self, sent: ToLink) -> None:
        """It goes to the receiver in this host."""
        if sent.mark is Mark.REQUEST_END:
            self._forget(sent.request)
        self.local_payloads += 1

    def send(self, sent: ToLink) -> bool:
        """To another host. False: there is no room for all; `flush` comes back to it."""
        sent_all = self.remote.send(sent.request, sent.payload, sent.mark, sent.event)
        if sent_all and sent.mark is Mark.REQUEST_END:
            self._forget(sent.request)
        return sent_all

    def flush(self) -> list[RequestId]:
        """Send what waited. Returns the requests of which nothing waits any more."""
        freed = self.remote.flush() if self.remote.full else []
        for id in freed:
            if self.remote.ended(id):
                self._forget(id)
        return freed

    def throttle(self, id: RequestId, on: bool) -> None:
        if on and id in self._open:
            self._slow.add(id)
        else:
            self._slow.discard(id)

    def blocked(self, id: RequestId) -> bool:
        """A request rests while its listener is slow or its chunks find no room: each may end
        before the other."""
        return id in self._slow or id in self.remote.full

    def close(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        self._slow.discard(id)
        if id in self._open and (purge or id not in self.remote.full):
            # else its last chunks still wait for room
            self._forget(id, purge)

    def _forget(self, id: RequestId, purge: bool = False) -> None:
        self._open.discard(id)
        self._slow.discard(id)
        self.remote.forget(id, purge)


class Links:
    """All links that begin or end at these stages."""

    def __init__(self, stages: Mapping[str, Stage]) -> None:
        self.inlets: dict[str, Inlet] = {}
        self.outlets: dict[str, Outlet] = {}
        # by link
        self.receivers: dict[str, Stage] = {}
        self.senders: dict[str, Stage] = {}
        # by stage
        self._inlets: dict[str, list[Inlet]] = {name: [] for name in stages}
        self._outlets: dict[str, list[Outlet]] = {name: [] for name in stages}
        into = {link for stage in stages.values() for link in stage.receives}
        out = {link for stage in stages.values() for link in stage.sends}
        for name, stage in stages.items():
            for link, kind in stage.receives.items():
                inlet = self.inlets[link] = Inlet(link, kind, link in out)
                self.receivers[link] = stage
                self._inlets[name].append(inlet)
            for link, kind in stage.sends.items():
                outlet = self.outlets[link] = Outlet(link, kind, link in into)
                self.senders[link] = stage
                self._outlets[name].append(outlet)

    def inlets_of(self, stage: str) -> list[Inlet]:
        return self._inlets[stage]

    def outlets_of(self, stage: str) -> list[Outlet]:
        return self._outlets[stage]

    def open(self, id: RequestId, stage: str, path: Set[str]) -> None:
        """A stage has admitted a request; `path` holds the names of all its stages, also those in
        other hosts."""
        for end in self._ends_of(stage):
            sender, _, receiver = end.link.partition(">")
            if sender in path and receiver in path:
                end.open(id)

    def close(self, id: RequestId, stage: str, purge: bool) -> None:
        """It is over there. With `purge`, so is what is on its way."""
        for end in self._ends_of(stage):
            end.close(id, purge)

    def _ends_of(self, stage: str) -> Iterator[Inlet | Outlet]:
        yield from self._inlets[stage]
        yield from self._outlets[stage]
