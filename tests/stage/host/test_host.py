"""What a host does with the outputs of its stages: requests that are over leave nothing in its
links."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stretto.config.engine import HostSettings
from stretto.errors import Invalid
from stretto.messages.hosts import Configure
from stretto.messages.requests import Admit, Cancel, Ended, Failed, FromHost
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.stage.host.host import Host
from stretto.stage.request import Reason
from stretto.stage.stage import ToEngine, Transfer
from stretto.stage.timings import StageTimings, failed
from stretto.types import Mark, RequestId
from tests.family.toys import ToyParams

ID = RequestId("r")
LINK = "writer>voice"


class Alone:
    """A host of one stage of two; the other one is elsewhere."""

    def __init__(self, name: str, other: str) -> None:
        self.reports: list[FromHost] = []
        configure = Configure(
            "", "tests.family.toys:build_two", (name,), {}, (("writer", "voice"),)
        )
        self.host = Host(
            configure, HostSettings(), lambda message, blob: self.reports.append(message)
        )
        self.host.load()
        self.stage: Any = self.host.stages[name]
        params = msgspec.Raw(msgspec.msgpack.encode(ToyParams(3, True)))
        self.host.handle(
            Admit(ID, PackedPrompt.of_ids((1, 2, 3)), {name: params}, elsewhere=(other,)), b""
        )
        assert self.num_open() == 1
        self.reports.clear()

    def num_open(self) -> int:
        """Requests that the host's link still knows."""
        links = self.host.links
        return sum(link.num_sending for link in links.sent_by(self.stage)) + sum(
            link.num_receiving for link in links.received_by(self.stage)
        )


def test_what_a_cancelled_request_has_made_is_dropped() -> None:
    alone = Alone("writer", "voice")
    alone.stage.outputs.append(Transfer(LINK, ID, None, Mark.REQUEST_END))
    alone.host.handle(Cancel(ID), b"")
    alone.host.poll_stage(alone.stage)
    assert alone.num_open() == 0
    alone.host.close()


@pytest.mark.parametrize(("name", "other"), [("writer", "voice"), ("voice", "writer")])
def test_links_forget_a_request_that_fails_in_a_stage(name: str, other: str) -> None:
    alone = Alone(name, other)
    alone.stage.cancel(ID)
    alone.stage.outputs.append(ToEngine(failed(ID, name, Invalid("no"))))
    alone.host.poll_stage(alone.stage)
    assert [type(message) for message in alone.reports] == [Failed]
    assert alone.num_open() == 0
    alone.host.close()


def test_an_inlet_forgets_a_request_that_ends_before_its_sender_does() -> None:
    alone = Alone("voice", "writer")
    alone.stage.cancel(ID)
    alone.stage.outputs.append(ToEngine(StageTimings(0.0).ended(ID, "voice", Reason.LENGTH)))
    alone.host.poll_stage(alone.stage)
    assert [type(message) for message in alone.reports] == [Ended]
    assert alone.num_open() == 0
    alone.host.close()
