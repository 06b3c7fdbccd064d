"""Limits fit the model, and no two requests share an id."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.engine.announce import Ask, Names, fitted
from stretto.errors import Invalid, TooLong
from stretto.family import Wanted
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.models.qwen3_omni.params import stage_params
from stretto.params import Params
from stretto.types import RequestId

LIMIT, VOCAB = 100, 50


@given(
    st.integers(1, 120),
    st.integers(1, 200),
    st.integers(0, 200),
    st.integers(1, 200),
    st.booleans(),
)
def test_limits_leave_room_for_the_prompt(
    prompt: int, tokens: int, least: int, frames: int, read: bool
) -> None:
    asked = Params(max_text_tokens=tokens, min_text_tokens=min(least, tokens), max_frames=frames)
    ask = Ask(True, None, asked, None, (1, 2) if read else None)
    if prompt >= LIMIT and not read:
        with pytest.raises(TooLong):
            fitted(ask, prompt, LIMIT, VOCAB)
        return
    got = fitted(ask, prompt, LIMIT, VOCAB)
    assert got.max_text_tokens == (tokens if read else min(tokens, LIMIT - prompt))
    assert got.min_text_tokens == min(asked.min_text_tokens, got.max_text_tokens)
    assert 1 <= got.max_frames <= max(1, LIMIT - prompt)
    assert got.max_frames <= frames


def test_biases_are_for_tokens_that_there_are() -> None:
    with pytest.raises(Invalid, match="token 50"):
        fitted(Ask(False, None, Params(logit_bias={3: 1.0, VOCAB: 1.0}), None), 1, LIMIT, VOCAB)


def test_what_a_request_needs() -> None:
    params = Params()
    for ask, stages in (
        (Ask(False, None, params, None), ("thinker",)),
        (Ask(True, None, params, None), ("thinker", "talker", "code2wav")),
        (Ask(True, None, params, None, spoken=(1,)), ("talker", "code2wav")),
    ):
        assert PIPELINE.paths[ask.capability] == stages
        assert tuple(stage_params(Wanted(ask.capability, params, 7, None, ask.spoken))) == stages


def test_an_id_is_never_given_twice() -> None:
    names, a = Names(), RequestId("a")
    running: list[Any] = [SimpleNamespace(given="b")]
    made = [names.new(a, running) for _ in range(3)]
    assert len(set(made)) == 3
    assert all(id.startswith("a.") for id in made), "its caller finds it in our logs"
    with pytest.raises(Invalid, match="running already"):
        names.new(RequestId("b"), running)
    assert len({names.new(None, running) for _ in range(9)}) == 9


@pytest.mark.parametrize("bad", ["", "a b", "ä", "x" * 49, "x\n"])
def test_an_id_that_no_link_would_carry_is_refused(bad: str) -> None:
    with pytest.raises(Invalid, match="request_id"):
        Names().new(RequestId(bad), [])
