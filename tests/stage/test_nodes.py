"""A node's outlet: when a request rests, and when it may go on."""

import torch

from stretto.connector.contract import Chunk
from stretto.errors import Invalid, StrettoError
from stretto.models.speech.payloads import CodecFrames
from stretto.stage.links import Arrival, Inlet, Outlet
from stretto.types import Mark, RequestId, Span

ID = RequestId("r")


class Courier:
    """A courier that has room or not."""

    slot_bytes = 1 << 16
    room = False
    woken = 0

    def offer(self, chunk: Chunk) -> bool:
        return self.room

    def wake_when_sent(self) -> None:
        self.woken += 1

    def purge(self, request: RequestId) -> None:
        pass


def frame(n: int) -> CodecFrames:
    return CodecFrames(Span(n, n + 1), torch.zeros(1, 16, dtype=torch.int32))


def test_a_request_rests_for_its_listener_and_for_its_link_each_on_its_own() -> None:
    """Room in the link must not set a request going whose listener is slow, nor the other way round."""
    link, courier = Outlet("a>b", CodecFrames), Courier()
    link.away.attach(courier)  # type: ignore[arg-type]
    link.open(ID)
    assert not link.blocked(ID)
    assert not link.send(ID, frame(0))
    assert link.blocked(ID)
    link.throttle(ID, True)
    assert link.flush() == []
    assert courier.woken == 1
    courier.room = True
    assert link.flush() == [ID]
    assert link.blocked(ID), "its listener is slow still"
    link.throttle(ID, False)
    assert not link.blocked(ID)
    courier.room = False
    assert not link.send(ID, frame(1))
    link.throttle(ID, True)
    link.throttle(ID, False)
    assert link.blocked(ID), "the link is full still"


def test_nothing_is_remembered_of_a_request_that_is_over() -> None:
    link: Outlet[CodecFrames] = Outlet("a>b", CodecFrames)
    link.open(ID)
    link.throttle(ID, True)
    link.close(ID, purge=True)
    link.throttle(ID, True)  # was on its way
    assert not link.blocked(ID)
    assert not len(link)
    assert not link._slow


class Reader:
    """A node that notes what it is given, and may refuse it."""

    def __init__(self) -> None:
        self.inlet = Inlet("a>b", CodecFrames, self.read, self.fail)
        self.seen: list[tuple[RequestId, Arrival[CodecFrames]]] = []
        self.failed: list[StrettoError] = []
        self.refuses: StrettoError | None = None

    def read(self, id: RequestId, arrival: Arrival[CodecFrames]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.seen.append((id, arrival))

    def fail(self, id: RequestId, error: StrettoError) -> None:
        self.failed.append(error)


def test_within_a_host_the_payload_itself_is_handed_over() -> None:
    reader, outlet = Reader(), Outlet("a>b", CodecFrames)
    outlet.join(reader.inlet)
    outlet.open(ID)
    reader.inlet.open(ID)
    first = frame(0)
    assert outlet.send(ID, first)
    assert outlet.send(ID, None, Mark.REQUEST_END)
    assert [(id, a.payload, a.mark) for id, a in reader.seen] == [
        (ID, first, Mark.MORE), (ID, None, Mark.REQUEST_END)
    ]  # fmt: skip
    assert reader.seen[0][1].payload is first
    assert not len(outlet)
    assert not len(reader.inlet)


def test_within_a_host_an_error_fails_its_request_and_one_that_is_over_is_ignored() -> None:
    reader, outlet = Reader(), Outlet("a>b", CodecFrames)
    outlet.join(reader.inlet)
    outlet.open(ID)
    outlet.send(ID, frame(0))
    assert not reader.seen, "nobody waits for it there any more"
    reader.inlet.open(ID)
    reader.refuses = Invalid("no")
    outlet.send(ID, frame(1))
    assert reader.failed == [reader.refuses]
