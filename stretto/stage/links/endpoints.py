"""This host's ends of links to other hosts: made and removed by messages of the engine, checked for
faults in each round.

Couriers do the waiting. Links between stages of one host are none of these: the host hands their
payloads over. Called by the host; on the loop thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from stretto.config.engine import HostSettings
from stretto.errors import StrettoError, WireError
from stretto.messages.hosts import Connect, LinkDown, Linked, Listen, Listening, Unlink
from stretto.observe.recorder import Recorder
from stretto.stage.host.stats import record_link
from stretto.stage.links.copies import HostToDevice
from stretto.stage.links.links import Links
from stretto.stage.stage import Stage
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
    # and reported to the engine
    down: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RequestFault:
    """What went wrong on a link with one request."""

    request: RequestId
    link: str
    error: StrettoError


@dataclass(slots=True, eq=False)
class LinkEndpoints:
    """The host's ends of links to other hosts, by the link's name. The host polls it for faults,
    and reports what the methods return."""

    links: Links
    settings: HostSettings
    device: torch.device
    # wakes the loop
    wake: Callable[[], None]
    registry: Registry = connectors
    recorder: Recorder = field(default_factory=Recorder)
    ends: dict[str, LinkEndpoint] = field(init=False, default_factory=dict)
    # that links copy on, by end
    streams: dict[str, torch.cuda.Stream] = field(init=False, default_factory=dict)

    def handle(self, m: Listen | Connect | Unlink) -> Listening | Linked | None:
        """Make or remove an end. Returns the answer for the engine."""
        match m:
            case Unlink(link=name):
                self.unlink(name)
                return None
            case Listen(link=name, generation=g) if name in self.links.inlets and g >= 0:
                return self.listen(m)
            case Connect(link=name, generation=g) if name in self.links.outlets and g >= 0:
                return self.connect(m)
            case _:
                raise WireError(f"link {m.link!r}, generation {m.generation}, has no such end here")

    def listen(self, m: Listen) -> Listening:
        connector = self.registry.get(m.connector)
        try:
            receiver = connector.listen(m.link.replace(">", "-"), self._options(m))
        except OSError as e:
            # no descriptor to be had, say: it is tried again, and the stages here live
            raise WireError(f"cannot listen: {e}") from e
        end = self.ends.setdefault(m.link, LinkEndpoint(m.generation))
        end.receiver = receiver
        inlet = self.links.inlets[m.link]
        stream = self._stream_for(f"{m.link} in", inlet.receiver)
        uploader = HostToDevice(self.device, self.settings.switches, inlet.kind.HOST, stream)
        end.incoming = incoming = Incoming(
            receiver,
            m.link,
            self.wake,
            uploader=uploader,
            recorder=self.recorder,
            copy=uploader.took,
        )
        incoming.start()
        inlet.attach(incoming)
        record_link(self.recorder, m.link, "in", incoming, receiver)
        return Listening(m.link, m.generation, msgspec.msgpack.encode(receiver.endpoint))

    def connect(self, m: Connect) -> Linked:
        connector = self.registry.get(m.connector)
        endpoint = _decode_endpoint(m.endpoint)
        sender: Sender = connector.connect(endpoint, self._options(m))
        end = self.ends.setdefault(m.link, LinkEndpoint(m.generation))
        end.sender = sender
        outlet = self.links.outlets[m.link]
        stream = self._stream_for(f"{m.link} out", outlet.sender)
        end.outgoing = outgoing = Outgoing(
            sender,
            m.link,
            self.wake,
            stream=stream,
            async_d2h=self.settings.switches.async_d2h,
            recorder=self.recorder,
        )
        outgoing.start()
        outlet.attach(outgoing)
        record_link(self.recorder, m.link, "out", outgoing, sender)
        return Linked(m.link, m.generation)

    def _stream_for(self, end: str, stage: Stage) -> torch.cuda.Stream | None:
        """Where one end of a link copies. It stays the same when the link is laid anew: CUDA hands
        out 32 streams and then the same ones again, so that copies would sooner or later queue
        behind a stage's steps."""
        if self.device.type != "cuda":
            return None
        if not self.settings.switches.payload_stream:
            return stage.stream
        if end not in self.streams:
            self.streams[end] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self.streams[end]

    def _options(self, m: Listen | Connect) -> LinkOptions:
        return LinkOptions(
            slots=self.settings.link_slots,
            slot_bytes=self.settings.link_slot_bytes,
            generation=m.generation,
            zero_copy=self.settings.switches.zero_copy_encode,
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
            self.links.outlets[name].detach()
            end.outgoing.close(drain=False)
        if end.incoming is not None:
            self.links.inlets[name].detach()
            end.incoming.close()

    def close(self) -> None:
        for name in list(self.ends):
            self.unlink(name)

    def poll(self) -> list[RequestFault | LinkDown]:
        """What went wrong since the last call. A fault that names a request concerns it alone,
        others end the link. A link that has ended is reported whatever its faults named: else the
        next request would wait on it for ever."""
        found: list[RequestFault | LinkDown] = []
        for name, end in self.ends.items():
            for courier in (end.incoming, end.outgoing):
                if courier is not None:
                    self._check(name, end, courier, found)
        return found

    @staticmethod
    def _check(
        name: str,
        end: LinkEndpoint,
        courier: Incoming | Outgoing,
        found: list[RequestFault | LinkDown],
    ) -> None:
        # Read before the faults: a courier reports its last fault before it ends.
        ended = courier.ended
        for error in courier.faults():
            end.last_fault = error
            if isinstance(error, OnLink) and error.request is not None:
                found.append(RequestFault(error.request, name, error))
            else:
                found.append(LinkDown(name, end.generation, str(error)))
        if ended and not end.down:
            end.down = True
            found.append(LinkDown(name, end.generation, str(end.last_fault or "it ended")))


def _decode_endpoint(encoded: bytes) -> Endpoint:
    """Another host wrote it: an invalid one must not end this host."""
    try:
        return msgspec.msgpack.decode(encoded, type=Endpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise WireError(f"not an endpoint: {e}") from None
