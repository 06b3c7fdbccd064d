"""The links of a host's stages: when a request rests and when it may go on, and what passes between
stages here."""

from collections.abc import Mapping
from typing import Any

import torch

from stretto.models.speech.payloads import CodecFrames
from stretto.stage.links.links import Links
from stretto.stage.links.outbox import Outlet
from stretto.stage.payload import Payload
from stretto.stage.stage import Transfer
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


def frame(n: int, mark: Mark = Mark.MORE) -> Transfer:
    return Transfer(
        LINK, ID, CodecFrames(Span(n, n + 1), torch.zeros(1, 16, dtype=torch.int32)), mark
    )


def links_of(*names: str) -> tuple[Links, dict[str, Any]]:
    """The links of these stages, and the stages."""
    ends: dict[str, Any] = {"a": End({}, {LINK: CodecFrames}), "b": End({LINK: CodecFrames}, {})}
    stages = {name: ends[name] for name in names}
    return Links(stages), stages


def test_a_request_is_blocked_by_its_listener_or_its_link() -> None:
    """Preemption in the link must not set a request going whose listener is slow, nor the other way
    round."""
    link, courier = Outlet(LINK, End({}, {})), Courier()  # type: ignore[arg-type]
    link.attach(courier)  # type: ignore[arg-type]
    link.start_sending(ID)
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


def test_the_last_chunks_of_an_ended_request_wait_for_room() -> None:
    link, courier = Outlet(LINK, End({}, {})), Courier()  # type: ignore[arg-type]
    link.attach(courier)  # type: ignore[arg-type]
    link.start_sending(ID)
    assert not link.send(frame(0, Mark.REQUEST_END))
    link.stop_sending(ID, purge=False)
    assert link.num_sending == 1
    courier.room = True
    assert link.flush() == [ID]
    assert not link.num_sending


def test_nothing_is_remembered_of_a_request_that_is_over() -> None:
    link = Outlet(LINK, End({}, {}))  # type: ignore[arg-type]
    link.start_sending(ID)
    link.throttle(ID, True)
    link.stop_sending(ID, purge=True)
    link.throttle(ID, True)  # was on its way
    assert not link.blocked(ID)
    assert not link.num_sending


def test_within_a_host_the_payload_itself_is_handed_over() -> None:
    links, stages = links_of("a", "b")
    link = links.local[LINK]
    for stage in stages.values():
        links.open(ID, stage, {"a", "b"})
    assert (link.num_sending, link.num_receiving) == (1, 1)
    assert link.hand_over(frame(0))
    assert link.hand_over(Transfer(LINK, ID, None, Mark.REQUEST_END))
    assert link.num_payloads == 2
    assert (link.num_sending, link.num_receiving) == (0, 0)
    assert not link.hand_over(frame(1)), "the request is over"


def test_what_comes_for_a_request_that_is_not_here_is_dropped() -> None:
    links, stages = links_of("a", "b")
    link = links.local[LINK]
    links.open(ID, stages["a"], {"a", "b"})
    assert not link.hand_over(frame(0))
    links.open(ID, stages["b"], {"a", "b"})
    assert link.hand_over(frame(1))
    links.close(ID, stages["b"], purge=True)
    assert not link.hand_over(frame(2))
    links.close(ID, stages["a"], purge=True)
    assert not link.hand_over(frame(3))


def test_a_request_with_a_slow_listener_rests_within_a_host_too() -> None:
    links, stages = links_of("a", "b")
    link = links.local[LINK]
    link.throttle(ID, True)
    assert not link.blocked(ID), "it is not here"
    links.open(ID, stages["a"], {"a", "b"})
    link.throttle(ID, True)
    assert link.blocked(ID)
    link.throttle(ID, False)
    assert not link.blocked(ID)
    link.throttle(ID, True)
    links.close(ID, stages["a"], purge=False)
    assert not link.blocked(ID)


def test_a_link_is_open_for_requests_that_pass_both_of_its_stages() -> None:
    for way, uses in (({"a"}, 0), ({"a", "b"}, 1), ({"b"}, 0), ({"a", "c"}, 0)):
        links, stages = links_of("a")
        links.open(ID, stages["a"], way)
        assert links.outlets[LINK].num_sending == uses
    away, stages = links_of("b")  # its sender is in another host
    away.open(ID, stages["b"], {"a", "b"})
    assert away.inlets[LINK].num_receiving == 1
