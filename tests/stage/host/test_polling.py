"""In which order a host polls its stages, whichever it has."""

from typing import Any

import msgspec
import pytest

from stretto.config.engine import HostSettings
from stretto.messages.hosts import Configure
from stretto.messages.requests import Admit, FromHost, Text
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.stage.host.host import Host
from stretto.stage.host.polling import Poll, poll_order
from stretto.types import RequestId
from tests.family.toys import ToyParams
from tests.pipeline import STAGES


class Named:
    def __init__(self, name: str) -> None:
        self.name = name
        self.cheap = name == "code2wav"
        self.receives = {} if name == "thinker" else {f">{name}": None}


@pytest.mark.parametrize(
    ("stages", "order"),
    [
        (STAGES, "LINKS code2wav PUSH NEW_PROMPTS talker code2wav PUSH thinker PUSH"),
        (("thinker",), "LINKS PUSH PUSH thinker PUSH"),
        (("talker", "code2wav"), "LINKS code2wav PUSH talker code2wav PUSH"),
        (("code2wav",), "LINKS PUSH code2wav PUSH"),
    ],
    ids=["all", "thinker", "talker and vocoder", "vocoder"],
)
def test_downstream_stages_are_polled_first(stages: tuple[str, ...], order: str) -> None:
    polled: list[Any] = poll_order([Named(name) for name in stages])  # type: ignore[misc]
    assert [p.name for p in polled] == order.split()


def test_links_are_checked_first_and_reports_are_pushed_last() -> None:
    polled = poll_order([Named("thinker"), Named("talker")])  # type: ignore[list-item]
    assert polled[0] is Poll.LINKS
    assert polled[-1] is Poll.PUSH


def test_a_new_prompt_goes_to_the_first_stage_once_more() -> None:
    """And in the next round it does not."""
    configure = Configure(
        "", "tests.family.toys:build_two", ("writer", "voice"), {}, (("writer", "voice"),)
    )
    reports: list[FromHost] = []
    host = Host(configure, HostSettings(), lambda message, blob: reports.append(message))
    host.load()
    told = msgspec.Raw(msgspec.msgpack.encode(ToyParams(9, False)))
    prompt = PackedPrompt.of_ids(tuple(range(9)))
    host.handle(Admit(RequestId("r"), prompt, {"writer": told}), b"")
    texts = []
    for _ in range(3):
        assert host.loop.round()
        texts.append(sum(isinstance(m, Text) for m in reports))
        reports.clear()
    assert texts == [2, 1, 1]
    host.close()
