"""Limits fit the model, and no two requests share an id."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.engine.request_manager import clamp_params, mint_id
from stretto.errors import Bug, Invalid, TooLong
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.models.qwen3_omni.params import stage_params
from stretto.params import Params, RequestOptions
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
    options = RequestOptions("tts" if read else "speech", asked)
    if prompt >= LIMIT and not read:
        with pytest.raises(TooLong):
            clamp_params(options, prompt, LIMIT, VOCAB)
        return
    got = clamp_params(options, prompt, LIMIT, VOCAB)
    assert got.max_text_tokens == (tokens if read else min(tokens, LIMIT - prompt))
    assert got.min_text_tokens == min(asked.min_text_tokens, got.max_text_tokens)
    assert 1 <= got.max_frames <= max(1, LIMIT - prompt)
    assert got.max_frames <= frames


def test_biases_are_for_tokens_that_there_are() -> None:
    options = RequestOptions("text", Params(logit_bias={3: 1.0, VOCAB: 1.0}))
    with pytest.raises(Invalid, match="token 50"):
        clamp_params(options, 1, LIMIT, VOCAB)


def test_a_request_has_one_seed() -> None:
    """The caller's, or a fresh one; never none."""
    stated = clamp_params(RequestOptions("text", Params(seed=5)), 1, LIMIT, VOCAB)
    drawn = clamp_params(RequestOptions("text"), 1, LIMIT, VOCAB)
    assert stated.seed == RequestOptions("text", stated).seed == 5
    assert drawn.seed is not None
    with pytest.raises(Bug, match="no seed"):
        _ = RequestOptions("text").seed


def test_what_a_request_needs() -> None:
    params = Params(seed=7)
    for options, stages in (
        (RequestOptions("text", params), ("thinker",)),
        (RequestOptions("speech", params), ("thinker", "talker", "code2wav")),
        (RequestOptions("tts", params, tts_ids=(1,)), ("talker", "code2wav")),
    ):
        assert PIPELINE.paths[options.capability] == stages
        assert tuple(stage_params(options)) == stages


def test_no_id_comes_twice() -> None:
    a = RequestId("a")
    running: list[Any] = [
        SimpleNamespace(options=RequestOptions("text", request_id=RequestId("b")))
    ]
    ids = [mint_id(a, number, running) for number in range(3)]
    assert len(set(ids)) == 3
    assert all(id.startswith("a.") for id in ids), "its caller finds it in our logs"
    with pytest.raises(Invalid, match="running already"):
        mint_id(RequestId("b"), 3, running)
    assert len({mint_id(None, number, running) for number in range(9)}) == 9


@pytest.mark.parametrize("bad", ["", "a b", "ä", "x" * 49, "x\n"])
def test_an_id_that_no_link_would_carry_is_refused(bad: str) -> None:
    with pytest.raises(Invalid, match="request_id"):
        mint_id(RequestId(bad), 0, [])
