"""`logprobs` and `top_logprobs`, as OpenAI's client asks for them."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from stretto.models.qwen3_omni.config import OmniConfig
from tests.server.conftest import Running

ASK = [{"role": "user", "content": "How are you?"}]


def create(real_server: Running, **more: Any) -> Any:
    given = {"model": "default", "messages": ASK, "seed": 3, "max_tokens": 12, **more}
    return real_server.client().chat.completions.create(**given)


def test_whole(real_server: Running) -> None:
    (choice,) = create(real_server, logprobs=True, top_logprobs=3, temperature=0).choices
    told = choice.logprobs.content
    assert b"".join(bytes(t.bytes) for t in told).decode(errors="replace") == choice.message.content
    assert choice.logprobs.refusal is None
    for t in told:
        assert -100 < t.logprob <= 0
        best = [b.logprob for b in t.top_logprobs]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
        assert sum(map(math.exp, best)) <= 1 + 1e-6
        assert t.logprob == pytest.approx(best[0], abs=1e-5), "greedy takes the likeliest"
    assert create(real_server, temperature=0).choices[0].logprobs is None
    assert create(real_server, temperature=0).choices[0].message.content == choice.message.content


def test_streamed(real_server: Running) -> None:
    """The same figures, each with the words that it is about or, if they were held back, after
    them."""
    whole = create(real_server, logprobs=True, top_logprobs=2).choices[0]
    told, text = [], ""
    for chunk in create(real_server, logprobs=True, top_logprobs=2, stream=True):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        told += choice.logprobs.content if choice.logprobs else []
        assert len(b"".join(bytes(t.bytes) for t in told)) >= len(
            text.encode().replace("�".encode(), b"")
        )
    assert text == whole.message.content
    assert [t.token for t in told] == [t.token for t in whole.logprobs.content]
    assert [t.logprob for t in told] == pytest.approx(
        [t.logprob for t in whole.logprobs.content], abs=1e-4
    )


def test_several_answers_spoken_ones_and_stops(real_server: Running) -> None:
    several = create(real_server, logprobs=True, n=2, max_tokens=5, temperature=1).choices
    assert all(c.logprobs.content and c.logprobs.content[0].top_logprobs == [] for c in several)
    spoken = create(
        real_server,
        logprobs=True,
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "wav"},
    )
    said = b"".join(bytes(t.bytes) for t in spoken.choices[0].logprobs.content)
    assert said.decode(errors="replace") == spoken.choices[0].message.audio.transcript
    text = create(real_server, temperature=0).choices[0].message.content
    stopped = create(real_server, temperature=0, logprobs=True, stop=text[3:5]).choices[0]
    told = b"".join(bytes(t.bytes) for t in stopped.logprobs.content).decode(errors="replace")
    assert told.startswith(stopped.message.content)
    assert text[3:5] in told


def test_the_end_token_is_not_told(real_server: Running, tiny_config: OmniConfig) -> None:
    """Though it is drawn, and counted."""
    ends = {"logit_bias": {str(tiny_config.tokens.im_end): 100}, "extra_body": {"min_tokens": 3}}
    answer = create(real_server, logprobs=True, **ends)
    assert answer.usage.completion_tokens == 4
    assert [t.bytes is not None for t in answer.choices[0].logprobs.content] == [True] * 3


def test_words_that_are_dropped_have_tokens_all_the_same(real_server: Running) -> None:
    """The token that completes a stop string adds nothing to the answer, and comes with its end."""
    tokens = [
        t.token
        for t in create(real_server, temperature=0, logprobs=True).choices[0].logprobs.content
    ]
    stop = next(t for i, t in enumerate(tokens) if i and t.strip() and t not in "".join(tokens[:i]))
    whole = create(real_server, temperature=0, logprobs=True, stop=stop).choices[0]
    told = []
    for chunk in create(real_server, temperature=0, logprobs=True, stop=stop, stream=True):
        told += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [t.token for t in told] == [t.token for t in whole.logprobs.content]
    assert told[-1].token == stop


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_what_cannot_be_asked(real_server: Running, given: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        create(real_server, **given)
    assert error.value.param == param
