"""In which order a host polls its stages, and what it does with their outputs: requests that are
over leave nothing in its links."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stretto.config.engine import HostSettings
from stretto.errors import Invalid
from stretto.messages.hosts import Configure
from stretto.messages.requests import Admit, Cancel, Ended, Failed, Text
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.stage.host.host import Host, poll_groups
from stretto.stage.request import Reason
from stretto.stage.stage import ToEngine, Transfer
from stretto.stage.timings import StageTimings, failed
from stretto.types import Mark, RequestId
from tests.family.toys import ToyParams
from tests.pipeline import STAGES
from tests.stage.reports import Reports

ID = RequestId("r")
LINK = "writer>voice"


class Alone:
    """A host of one stage of two; the other one is elsewhere."""

    def __init__(self, name: str, other: str) -> None:
        self.reports = Reports()
        configure = Configure(
            "", "tests.family.toys:build_two", (name,), {}, (("writer", "voice"),)
        )
        self.host = Host(configure, HostSettings(), self.reports)
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
    assert [type(message) for message in alone.reports.messages] == [Failed]
    assert alone.num_open() == 0
    alone.host.close()


def test_an_inlet_forgets_a_request_that_ends_before_its_sender_does() -> None:
    alone = Alone("voice", "writer")
    alone.stage.cancel(ID)
    alone.stage.outputs.append(ToEngine(StageTimings(0.0).ended(ID, "voice", Reason.LENGTH)))
    alone.host.poll_stage(alone.stage)
    assert [type(message) for message in alone.reports.messages] == [Ended]
    assert alone.num_open() == 0
    alone.host.close()


class Named:
    def __init__(self, name: str) -> None:
        self.name = name
        self.cheap = name == "code2wav"
        self.receives = {} if name == "thinker" else {f">{name}": None}


@pytest.mark.parametrize(
    ("stages", "groups"),
    [
        (STAGES, ["code2wav", "talker code2wav", "thinker"]),
        (("thinker",), ["", "", "thinker"]),
        (("talker", "code2wav"), ["code2wav", "talker code2wav", ""]),
        (("code2wav",), ["", "code2wav", ""]),
    ],
    ids=["all", "thinker", "talker and vocoder", "vocoder"],
)
def test_downstream_stages_are_polled_first(stages: tuple[str, ...], groups: list[str]) -> None:
    found = poll_groups([Named(name) for name in stages])  # type: ignore[misc]
    assert [" ".join(stage.name for stage in group) for group in found] == groups


def writer_and_voice(channel: Any) -> Host:
    configure = Configure(
        "", "tests.family.toys:build_two", ("writer", "voice"), {}, (("writer", "voice"),)
    )
    host = Host(configure, HostSettings(), channel)
    host.load()
    return host


def question() -> Admit:
    params = msgspec.Raw(msgspec.msgpack.encode(ToyParams(9, False)))
    return Admit(ID, PackedPrompt.of_ids(tuple(range(9))), {"writer": params})


def test_a_new_prompt_goes_to_the_first_stage_once_more() -> None:
    """And in the next round it does not."""
    reports = Reports()
    host = writer_and_voice(reports)
    host.handle(question(), b"")
    texts = []
    for _ in range(3):
        assert host.loop.round()
        texts.append(sum(isinstance(m, Text) for m in reports.messages))
        reports.clear()
    assert texts == [2, 1, 1]
    host.close()


def test_reports_leave_behind_each_group_of_stages() -> None:
    class Log(Reports):
        def push(self) -> None:
            log.append([type(message).__name__ for message in self.messages])
            self.clear()

    log: list[list[str]] = []
    host = writer_and_voice(Log())
    log.clear()
    host.handle(question(), b"")
    host.poll()
    assert log == [[], ["Text"], ["Text"]]
    host.close()
