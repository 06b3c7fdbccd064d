"""The links of a host's stages. Made and used by the host; on the loop thread.

Between stages of one host the payload itself is handed over: `LocalLink`. Between hosts it goes as
chunks: `Outlet` (`outbox.py`) is the sending end, `Inlet` (`inbox.py`) the receiving one."""

from __future__ import annotations

from collections.abc import Mapping

from stretto.stage.links.inbox import Inlet
from stretto.stage.links.outbox import Outlet
from stretto.stage.stage import Stage, Transfer
from stretto.types import Mark, RequestId


class LocalLink:
    """A link between two stages of this host."""

    def __init__(self, name: str, sender: Stage, receiver: Stage) -> None:
        self.name = name
        self.sender = sender
        self.receiver = receiver
        # handed over so far
        self.num_payloads = 0
        # requests that the sender may send of: whether their listener is slow
        self._sending: dict[RequestId, bool] = {}
        # requests that the receiver has admitted
        self._receiving: set[RequestId] = set()

    @property
    def num_sending(self) -> int:
        return len(self._sending)

    @property
    def num_receiving(self) -> int:
        return len(self._receiving)

    def start_sending(self, id: RequestId) -> None:
        self._sending[id] = False

    def stop_sending(self, id: RequestId, purge: bool) -> None:
        self._sending.pop(id, None)

    def start_receiving(self, id: RequestId) -> None:
        self._receiving.add(id)

    def stop_receiving(self, id: RequestId, purge: bool) -> None:
        self._receiving.discard(id)

    def hand_over(self, transfer: Transfer) -> bool:
        """Whether the receiver is to have it: the request is over on neither side."""
        id = transfer.request
        if id not in self._sending:
            return False
        self.num_payloads += 1
        accepted = id in self._receiving
        if transfer.mark is Mark.REQUEST_END:
            del self._sending[id]
            self._receiving.discard(id)
        return accepted

    def throttle(self, id: RequestId, on: bool) -> None:
        if id in self._sending:
            self._sending[id] = on

    def blocked(self, id: RequestId) -> bool:
        """Whether the sender should make no more of it for now."""
        return self._sending.get(id, False)


class Links:
    """All links that begin or end at these stages, by name."""

    def __init__(self, stages: Mapping[str, Stage]) -> None:
        self.local: dict[str, LocalLink] = {}
        # to and from other hosts
        self.outlets: dict[str, Outlet] = {}
        self.inlets: dict[str, Inlet] = {}
        receivers = {link: stage for stage in stages.values() for link in stage.receives}
        for stage in stages.values():
            for name in stage.sends:
                receiver = receivers.pop(name, None)
                if receiver is None:
                    self.outlets[name] = Outlet(name, stage)
                else:
                    self.local[name] = LocalLink(name, stage, receiver)
        for name, stage in receivers.items():
            self.inlets[name] = Inlet(name, stage)

    def open(self, id: RequestId, stage: Stage, path: set[str]) -> None:
        """A stage has admitted a request; `path` holds the names of all its stages, also those in
        other hosts."""
        for outgoing in self.sent_by(stage):
            if path.issuperset(outgoing.name.split(">")):
                outgoing.start_sending(id)
        for incoming in self.received_by(stage):
            if path.issuperset(incoming.name.split(">")):
                incoming.start_receiving(id)

    def close(self, id: RequestId, stage: Stage, purge: bool) -> None:
        """The request is over in a stage. With `purge`, so is what is on its way."""
        for outgoing in self.sent_by(stage):
            outgoing.stop_sending(id, purge)
        for incoming in self.received_by(stage):
            incoming.stop_receiving(id, purge)

    def sent_by(self, stage: Stage) -> list[LocalLink | Outlet]:
        links: list[LocalLink | Outlet] = [*self.local.values(), *self.outlets.values()]
        return [link for link in links if link.sender is stage]

    def received_by(self, stage: Stage) -> list[LocalLink | Inlet]:
        links: list[LocalLink | Inlet] = [*self.local.values(), *self.inlets.values()]
        return [link for link in links if link.receiver is stage]
