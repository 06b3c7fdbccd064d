"""The ends of links that are in a host: laid when the orchestrator says so, watched in each round, taken up again.

A link within the host has both of its ends here, and is a mere hand-over; others have couriers, which do the waiting.
Called by the host; on the loop thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import torch

from stretto.connector.contract import Endpoint, LinkOptions, OnLink, Receiver, Sender
from stretto.connector.courier import Incoming, InLink, Outgoing, OutLink
from stretto.connector.inline import InlineIn, InlineOut
from stretto.connector.registry import Registry
from stretto.connector.switches import OverlapSwitches
from stretto.errors import StrettoError, WireError
from stretto.orchestrator.messages import Connect, LinkDown, Linked, Listen, Listening
from stretto.orchestrator.settings import LINKS, HostSettings
from stretto.stage.nodes.code2wav import Code2WavNode
from stretto.stage.nodes.node import Node
from stretto.stage.nodes.report import Report
from stretto.stage.nodes.talker import TalkerNode
from stretto.stage.nodes.thinker import ThinkerNode
from stretto.stage.payload.copies import HostToDevice
from stretto.stage.payload.schema import CodecFrames, ThinkerRows
from stretto.stage.stage import Stage
from stretto.types import RequestId


@dataclass(slots=True, eq=False)
class LinkEnd:
    """What there is of one link: one of its ends, or both."""

    generation: int
    receiver: Receiver | None = None
    sender: Sender | None = None
    incoming: InLink | None = None
    outgoing: OutLink | None = None
    last: StrettoError | None = None  # fault
    down: bool = False  # and reported so


@dataclass(slots=True, eq=False)
class LinkEnds:
    """By the name of their link. Has a turn in the loop, to look for faults."""

    nodes: Mapping[str, Node]
    settings: HostSettings
    device: torch.device
    ring: Callable[[], None]  # the loop's bell
    report: Report
    fail: Callable[[RequestId, str, StrettoError], None]  # ends a request in all stages here, and says why
    registry: Registry = field(default_factory=Registry)
    ends: dict[str, LinkEnd] = field(init=False, default_factory=dict)
    streams: dict[str, torch.cuda.Stream] = field(init=False, default_factory=dict)  # that links copy on, by end
    due_ns: int | None = field(init=False, default=None)

    def listen(self, m: Listen, switches: OverlapSwitches) -> None:
        connector = self.registry.get(m.connector)
        try:
            receiver = connector.listen(m.link.replace(">", "-"), self._options(switches, m.generation, m.secret))
        except OSError as e:  # no descriptor to be had, say: it is tried again, and the stages here live
            raise WireError(f"cannot listen: {e}") from e
        end = self.ends.setdefault(m.link, LinkEnd(m.generation))
        end.receiver = receiver
        node = self.nodes[LINKS[m.link][1]]
        assert not isinstance(node, ThinkerNode)
        if connector.inline:
            end.incoming = InlineIn(receiver, m.link, self.ring)  # type: ignore[arg-type]
        else:
            keep = ThinkerRows.HOST if isinstance(node, TalkerNode) else CodecFrames.HOST
            uploader = HostToDevice(self.device, switches, keep, self._stream_for(f"{m.link} in", node, switches))
            incoming = Incoming(receiver, m.link, self.ring, uploader=uploader)
            incoming.start()
            end.incoming = incoming
        node.intake.link = end.incoming
        self.report(Listening(m.link, m.generation, msgspec.msgpack.encode(receiver.endpoint)), b"")

    def connect(self, m: Connect, switches: OverlapSwitches) -> None:
        connector = self.registry.get(m.connector)
        endpoint = _endpoint_of(m.endpoint)
        sender: Sender = connector.connect(endpoint, self._options(switches, m.generation, m.secret))
        end = self.ends.setdefault(m.link, LinkEnd(m.generation))
        end.sender = sender
        node = self.nodes[LINKS[m.link][0]]
        assert not isinstance(node, Code2WavNode)
        if connector.inline:
            end.outgoing = InlineOut(sender, m.link, self.ring)
        else:
            stream = self._stream_for(f"{m.link} out", node, switches)
            outgoing = Outgoing(sender, m.link, self.ring, stream=stream, async_d2h=switches.async_d2h)
            outgoing.start()
            end.outgoing = outgoing
        node.link.out = end.outgoing
        self.report(Linked(m.link, m.generation), b"")

    def _stream_for(self, end: str, node: Node, switches: OverlapSwitches) -> torch.cuda.Stream | None:
        """Where one end of a link copies. It stays the same when the link is laid anew: CUDA hands out 32 streams and
        then the same ones again, so that copies would sooner or later queue behind the thinker's steps."""
        if self.device.type != "cuda":
            return None
        if not switches.payload_stream:
            return node.stage.runner.stream if isinstance(node.stage, Stage) else node.stage.stream
        if end not in self.streams:
            self.streams[end] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self.streams[end]

    def _options(self, switches: OverlapSwitches, generation: int, secret: bytes) -> LinkOptions:
        return LinkOptions(
            slots=self.settings.link_slots,
            slot_bytes=self.settings.link_slot_bytes,
            generation=generation,
            zero_copy=switches.zero_copy_encode,
            secret=secret,
        )

    def unlink(self, name: str) -> None:
        end = self.ends.pop(name, None)
        if end is None:
            return
        sender, receiver = LINKS[name]
        if end.outgoing is not None:
            node = self.nodes[sender]
            assert not isinstance(node, Code2WavNode)
            node.link.out = None
            end.outgoing.close(drain=False)
        if end.incoming is not None:
            node = self.nodes[receiver]
            assert not isinstance(node, ThinkerNode)
            node.intake.link = None
            end.incoming.close()

    def close(self) -> None:
        for name in list(self.ends):
            self.unlink(name)

    def turn(self) -> bool:
        """A fault that names a request fails it, others end the link. A link that has ended is reported whatever its
        faults named: else the next request would wait on it for ever."""
        did = False
        for name, end in list(self.ends.items()):
            for link in (end.incoming, end.outgoing):
                if link is None:
                    continue
                for error in link.faults():
                    did = True
                    end.last = error
                    self._fault(name, end, error)
                if link.ended and not end.down:  # not among the faults: a courier tells them before it ends
                    did = end.down = True
                    self.report(LinkDown(name, end.generation, str(end.last or "it ended")), b"")
        return did

    def _fault(self, name: str, end: LinkEnd, error: StrettoError) -> None:
        request: RequestId | None = error.request if isinstance(error, OnLink) else None
        if request is not None:
            self.fail(request, name, error)
        else:
            self.report(LinkDown(name, end.generation, str(error)), b"")


def _endpoint_of(told: bytes) -> Endpoint:
    """What another host said of itself: nonsense there must not end this one."""
    try:
        return msgspec.msgpack.decode(told, type=Endpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise WireError(f"not an endpoint: {e}") from None
