"""A node's link: when a request rests, and when it may go on."""

import torch

from stretto.stage.links import Link
from stretto.stage.payload.schema import CodecFrames
from stretto.stage.request import Confirmed
from stretto.types import RequestId, Span

ID = RequestId("r")


class Way:
    """A link that has room or not."""

    room = False
    woken = 0

    def offer(self, parcel: object) -> bool:
        return self.room

    def wake_when_sent(self) -> None:
        self.woken += 1

    def purge(self, request: RequestId, epoch: int) -> None:
        pass


def frame(n: int) -> CodecFrames:
    return CodecFrames(Span(n, n + 1), torch.zeros(1, 16, dtype=torch.int32))


def test_a_request_rests_for_its_listener_and_for_its_link_each_on_its_own() -> None:
    """Room in the link must not set a request going whose listener is slow, nor the other way round."""
    link, way = Link(CodecFrames), Way()
    link.out = way  # type: ignore[assignment]
    link.open(ID)
    assert not link.blocked(ID)
    box = link.boxes[ID]
    box.add(frame(0))
    assert not link.send(ID, Confirmed(1))
    assert link.blocked(ID)
    link.throttle(ID, True)
    assert link.flush() == []
    assert way.woken == 1
    way.room = True
    assert link.flush() == [ID]
    assert link.blocked(ID), "its listener is slow still"
    link.throttle(ID, False)
    assert not link.blocked(ID)
    way.room = False
    box.add(frame(1))
    assert not link.send(ID, Confirmed(2))
    link.throttle(ID, True)
    link.throttle(ID, False)
    assert link.blocked(ID), "the link is full still"


def test_nothing_is_remembered_of_a_request_that_is_over() -> None:
    link: Link[CodecFrames] = Link(CodecFrames)
    link.open(ID)
    link.throttle(ID, True)
    link.close(ID, purge=True)
    link.throttle(ID, True)  # was on its way
    assert not link.blocked(ID)
    assert not link.boxes
    assert not link._slow
