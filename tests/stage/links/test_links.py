"""The links of a host's stages: when a request rests and when it may go on, and what passes between
stages here."""

from collections.abc import Mapping
from typing import Any

import torch

from stretto.models.speech.payloads import CodecFrames
from stretto.stage.links.links import Links, Outlet
from stretto.stage.payload import Payload
from stretto.stage.stage import ToLink
from stretto.transport.contract import Chunk
from stretto.types import Mark, RequestId, Span

ID = RequestId("r")
LINK = "a>b"


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


class End:
    """A stage, as its links know it."""

    def __init__(
        self, receives: Mapping[str, type[Payload]], sends: Mapping[str, type[Payload]]
    ) -> None:
        self.receives, self.sends = receives, sends


def frame(n: int, mark: Mark = Mark.MORE) -> ToLink:
    return ToLink(
        LINK, ID, CodecFrames(Span(n, n + 1), torch.zeros(1, 16, dtype=torch.int32)), mark
    )


def links_of(*names: str) -> Links:
    stages: dict[str, Any] = {"a": End({}, {LINK: CodecFrames}), "b": End({LINK: CodecFrames}, {})}
    return Links({name: stages[name] for name in names})


def test_a_request_rests_for_its_listener_and_for_its_link_each_on_its_own() -> None:
    """Preemption in the link must not set a request going whose listener is slow, nor the other way
    round."""
    link, courier = Outlet(LINK, CodecFrames), Courier()
    link.remote.attach(courier)  # type: ignore[arg-type]
    link.open(ID)
    assert not link.blocked(ID)
    assert not link.send(frame(0))
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
    assert not link.send(frame(1))
    link.throttle(ID, True)
    link.throttle(ID, False)
    assert link.blocked(ID), "the link is full still"


def test_the_last_chunks_of_a_request_wait_for_room_though_its_stage_is_done_with_it() -> None:
    link, courier = Outlet(LINK, CodecFrames), Courier()
    link.remote.attach(courier)  # type: ignore[arg-type]
    link.open(ID)
    assert not link.send(frame(0, Mark.REQUEST_END))
    link.close(ID, purge=False)
    assert ID in link
    courier.room = True
    assert link.flush() == [ID]
    assert not len(link)


def test_nothing_is_remembered_of_a_request_that_is_over() -> None:
    link = Outlet(LINK, CodecFrames)
    link.open(ID)
    link.throttle(ID, True)
    link.close(ID, purge=True)
    link.throttle(ID, True)  # was on its way
    assert not link.blocked(ID)
    assert not len(link)


def test_within_a_host_the_payload_itself_is_handed_over() -> None:
    links = links_of("a", "b")
    outlet, inlet = links.outlets[LINK], links.inlets[LINK]
    for stage in "ab":
        links.open(ID, stage, {"a", "b"})
    first, end = frame(0), ToLink(LINK, ID, None, Mark.REQUEST_END)
    taken = []
    for sent in (first, end):
        outlet.hand(sent)
        taken.append(inlet.take(sent))
    assert [(t.payload, t.mark) for t in taken if t] == [
        (first.payload, Mark.MORE),
        (None, Mark.REQUEST_END),
    ]
    assert outlet.local_payloads == 2
    assert not len(outlet)
    assert not len(inlet)


def test_what_comes_for_a_request_that_is_not_here_is_dropped() -> None:
    links = links_of("a", "b")
    links.open(ID, "a", {"a", "b"})
    assert links.inlets[LINK].take(frame(0)) is None
    links.open(ID, "b", {"a", "b"})
    assert links.inlets[LINK].take(frame(1)) is not None
    links.close(ID, "b", purge=True)
    assert links.inlets[LINK].take(frame(2)) is None


def test_a_link_is_open_for_requests_that_have_both_of_its_stages_on_their_way() -> None:
    for way, uses in (({"a"}, 0), ({"a", "b"}, 1), ({"b"}, 0), ({"a", "c"}, 0)):
        links = links_of("a")
        links.open(ID, "a", way)
        assert len(links.outlets[LINK]) == uses
    away = links_of("b")  # its sender is in another host
    away.open(ID, "b", {"a", "b"})
    assert len(away.inlets[LINK]) == 1
