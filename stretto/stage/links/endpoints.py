"""The ends of links that are in a host: made when the orchestrator says so, checked in each round,
removed again.

Couriers do the waiting. Links between stages of one host are none of these: the host hands their
payloads over. Called by the host; on the loop thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from stretto.config.engine import HostSettings, OverlapSwitches
from stretto.errors import StrettoError, WireError
from stretto.messages.hosts import Connect, LinkDown, Linked, Listen, Listening, Unlink
from stretto.observe.recorder import Recorder
from stretto.stage.host.stats import record_link
from stretto.stage.links.copies import HostToDevice
from stretto.stage.links.links import Inlet, Links, Outlet
from stretto.stage.stage import Stage
from stretto.stage.timings import Report
from stretto.transport.contract import Endpoint, LinkOptions, OnLink, Receiver, Sender
from stretto.transport.courier import Incoming, Outgoing
from stretto.transport.registry import Registry, connectors
from stretto.types import RequestId


@dataclass(slots=True, eq=False)
class LinkEndpoint:
    """One end of a link: its connector and its courier."""

    generation: int
    receiver: Receiver | None = None
    sender: Sender | None = None
    incoming: Incoming | None = None
    outgoing: Outgoing | None = None
    last_fault: StrettoError | None = None
    down: bool = False  # and reported to the engine


@dataclass(slots=True, eq=False)
class LinkEndpoints:
    """The host's ends of links to other hosts, by the link's name. The loop polls it for faults."""

    links: Links
    settings: HostSettings
    device: torch.device
    wake: Callable[[], None]  # wakes the loop
    report: Report
    fail: Callable[
        [RequestId, str, StrettoError], None
    ]  # ends a request in all stages here, and says why
    registry: Registry = connectors
    recorder: Recorder = field(default_factory=Recorder)
    ends: dict[str, LinkEndpoint] = field(init=False, default_factory=dict)
    streams: dict[str, torch.cuda.Stream] = field(
        init=False, default_factory=dict
    )  # that links copy on, by end
    due_ns: int | None = field(init=False, default=None)

    def handle(self, m: Listen | Connect | Unlink, switches: OverlapSwitches) -> None:
        match m:
            case Unlink(link=name):
                self.unlink(name)
            case Listen(link=name, generation=g) if (
                self._is_remote(self.links.inlets.get(name)) and g >= 0
            ):
                self.listen(m, switches)
            case Connect(link=name, generation=g) if (
                self._is_remote(self.links.outlets.get(name)) and g >= 0
            ):
                self.connect(m, switches)
            case _:
                raise WireError(f"link {m.link!r}, generation {m.generation}, has no such end here")

    def listen(self, m: Listen, switches: OverlapSwitches) -> None:
        connector = self.registry.get(m.connector)
        try:
            receiver = connector.listen(m.link.replace(">", "-"), self._options(switches, m))
        except (
            OSError
        ) as e:  # no descriptor to be had, say: it is tried again, and the stages here live
            raise WireError(f"cannot listen: {e}") from e
        end = self.ends.setdefault(m.link, LinkEndpoint(m.generation))
        end.receiver = receiver
        inlet = self.links.inlets[m.link]
        stream = self._stream_for(f"{m.link} in", self.links.receivers[m.link], switches)
        uploader = HostToDevice(self.device, switches, inlet.kind.HOST, stream)
        end.incoming = incoming = Incoming(
            receiver,
            m.link,
            self.wake,
            uploader=uploader,
            recorder=self.recorder,
            copy=uploader.took,
        )
        incoming.start()
        inlet.remote.attach(incoming)
        record_link(self.recorder, m.link, "in", incoming, receiver)
        self.report(Listening(m.link, m.generation, msgspec.msgpack.encode(receiver.endpoint)), b"")

    def connect(self, m: Connect, switches: OverlapSwitches) -> None:
        connector = self.registry.get(m.connector)
        endpoint = _decode_endpoint(m.endpoint)
        sender: Sender = connector.connect(endpoint, self._options(switches, m))
        end = self.ends.setdefault(m.link, LinkEndpoint(m.generation))
        end.sender = sender
        outlet = self.links.outlets[m.link]
        stream = self._stream_for(f"{m.link} out", self.links.senders[m.link], switches)
        end.outgoing = outgoing = Outgoing(
            sender,
            m.link,
            self.wake,
            stream=stream,
            async_d2h=switches.async_d2h,
            recorder=self.recorder,
        )
        outgoing.start()
        outlet.remote.attach(outgoing)
        record_link(self.recorder, m.link, "out", outgoing, sender)
        self.report(Linked(m.link, m.generation), b"")

    @staticmethod
    def _is_remote(end: Inlet | Outlet | None) -> bool:
        """Whether the link's other end is in another host."""
        match end:
            case Inlet(is_local=is_local):
                return not is_local
            case Outlet(inlet=inlet):
                return inlet is None
        return False

    def _stream_for(
        self, end: str, stage: Stage, switches: OverlapSwitches
    ) -> torch.cuda.Stream | None:
        """Where one end of a link copies. It stays the same when the link is laid anew: CUDA hands
        out 32 streams and then the same ones again, so that copies would sooner or later queue
        behind a stage's steps."""
        if self.device.type != "cuda":
            return None
        if not switches.payload_stream:
            return stage.stream
        if end not in self.streams:
            self.streams[end] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self.streams[end]

    def _options(self, switches: OverlapSwitches, m: Listen | Connect) -> LinkOptions:
        return LinkOptions(
            slots=self.settings.link_slots,
            slot_bytes=self.settings.link_slot_bytes,
            generation=m.generation,
            zero_copy=switches.zero_copy_encode,
            secret=m.secret,
            host=m.host,
            details=m.details,
        )

    def unlink(self, name: str) -> None:
        end = self.ends.pop(name, None)
        if end is None:
            return
        self.recorder.forget(link=name)
        if end.outgoing is not None:
            self.links.outlets[name].remote.detach()
            end.outgoing.close(drain=False)
        if end.incoming is not None:
            self.links.inlets[name].remote.detach()
            end.incoming.close()

    def close(self) -> None:
        for name in list(self.ends):
            self.unlink(name)

    def poll(self) -> bool:
        """A fault that names a request fails it, others end the link. A link that has ended is
        reported whatever its faults named: else the next request would wait on it for ever."""
        did = False
        for name, end in list(self.ends.items()):
            for link in (end.incoming, end.outgoing):
                if link is None:
                    continue
                # Read before the faults: a courier reports its last fault before it ends.
                ended = link.ended
                for error in link.faults():
                    did = True
                    end.last_fault = error
                    self._fault(name, end, error)
                if ended and not end.down:
                    did = end.down = True
                    self.report(
                        LinkDown(name, end.generation, str(end.last_fault or "it ended")), b""
                    )
        return did

    def _fault(self, name: str, end: LinkEndpoint, error: StrettoError) -> None:
        request: RequestId | None = error.request if isinstance(error, OnLink) else None
        if request is not None:
            self.fail(request, name, error)
        else:
            self.report(LinkDown(name, end.generation, str(error)), b"")


def _decode_endpoint(encoded: bytes) -> Endpoint:
    """Another host wrote it: an invalid one must not end this host."""
    try:
        return msgspec.msgpack.decode(encoded, type=Endpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise WireError(f"not an endpoint: {e}") from None
