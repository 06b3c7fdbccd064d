"""A pipeline that cannot be is refused when its family is read, and one whose parts do not agree
when it is asked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.engine.request import RequestState
from stretto.engine.request_manager import announce
from stretto.errors import Bug
from stretto.family import LinkSpec, PipelineSpec, StageSpec
from stretto.params import Params, RequestOptions
from stretto.preprocess.packed_prompt import pack
from stretto.preprocess.prompt import Prompt
from stretto.types import RequestId

A, B = StageSpec("a", decides="text"), StageSpec("b", decides="audio")
LINK, PATHS = LinkSpec("a", "b"), {"text": ("a",), "speech": ("a", "b")}


def spec(**changes: Any) -> PipelineSpec:
    return PipelineSpec(
        **{"build": "m:f", "stages": (A, B), "links": (LINK,), "paths": PATHS, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"stages": (A, A)}, "names of their own"),
        ({"stages": (), "links": (), "paths": {}}, "names of their own"),
        ({"links": (LinkSpec("b", "a"),)}, "b>a does not go"),
        ({"links": (LinkSpec("a", "a"),)}, "a>a does not go"),
        ({"links": (LinkSpec("a", "c"),)}, "a>c does not go"),
        ({"links": (LinkSpec("c", "b"),)}, "c>b does not go"),
        ({"paths": {"text": ("c",)}}, "text needs stages"),
        ({"paths": {"text": ()}}, "text needs stages"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(Bug, match=what):
        spec(**changes)


def test_a_spec_answers_what_the_engine_asks() -> None:
    whole = spec()
    assert whole.names == ("a", "b")
    assert [link.name for link in whole.links_of(("a", "b"))] == ["a>b"]
    assert whole.links_of(("a",)) == []
    assert (whole.deciding("text"), whole.deciding("audio")) == ("a", "b")


@dataclass(eq=False)
class HostStub:
    sent: list[Any]

    def send(self, message: Any, blob: bytes = b"") -> None:
        self.sent.append(message)


def test_a_family_has_parameters_for_exactly_the_stages_on_the_way() -> None:
    sent: list[Any] = []
    host = HostStub(sent)
    pipeline: Any = SimpleNamespace(stages_by_host=lambda stages: {host: stages})
    for params in ({}, {"a": Params(), "b": Params()}):
        model: Any = SimpleNamespace(
            pipeline=spec(),
            stage_params=lambda options, params=params: params,
            info=SimpleNamespace(live_text=False),
        )
        decoder: Any = None
        options = RequestOptions("text")
        request = RequestState(
            RequestId("r"),
            pipeline,
            model,
            ("a",),
            pack(Prompt((1,))),
            options,
            decoder,
            0.0,
            1.0,
        )
        with pytest.raises(Bug, match="has parameters for stages"):
            asyncio.run(announce(request, False))
    assert not sent
