"""Sampling parameters, `n` and `chat_template_kwargs` of chat requests, on the tiny model."""

from __future__ import annotations

from typing import Any

from stretto.preprocess.template import ChatTemplate
from stretto.stage.guide import PenaltyGuide
from tests.server.conftest import Running

ASK = [{"role": "user", "content": "How are you?"}]


def create_short(real_server: Running, **more: Any) -> str:
    body = {"messages": ASK, "max_tokens": 24, "seed": 3, **more}
    return str(
        real_server.ask("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    )


def test_min_p_of_one_is_greedy_and_of_zero_is_nothing(real_server: Running) -> None:
    greedy, free = (
        create_short(real_server, temperature=0),
        create_short(real_server, temperature=1.0),
    )
    assert create_short(real_server, temperature=1.0, min_p=1.0) == greedy
    assert create_short(real_server, temperature=1.0, min_p=0.0) == free != greedy


def test_penalties_make_an_answer_repeat_itself_less(real_server: Running) -> None:
    def repeats(**more: Any) -> int:
        reply = real_server.ask(
            "/v1/chat/completions", {"messages": ASK, "max_tokens": 64, "temperature": 0, **more}
        ).json
        words = reply["choices"][0]["message"]["content"].split()
        return len(words) - len(set(words))

    bias = {"logit_bias": {str(i): 20 for i in range(300, 306)}}  # few words, again and again
    assert repeats(**bias, frequency_penalty=2.0, presence_penalty=2.0) < repeats(**bias)
    guide = PenaltyGuide(0.5, 1.0, {7: 3.0, 9: 1.0}, 3)
    for token in (7, 7, 8, 5):
        guide.accept(token)
    assert dict(guide.bias()) == {
        7: 3.0 - 2 * 0.5 - 1.0,
        9: 1.0,
    }  # there is room for three, and two are stated
    assert guide.mask() is None


def test_a_seed_gives_the_same_answer_again(real_server: Running) -> None:
    first = create_short(real_server, temperature=1.0, seed=11)
    assert create_short(real_server, temperature=1.0, seed=11) == first
    assert create_short(real_server, temperature=1.0, seed=12) != first


def test_several_answers_to_one_question(real_server: Running) -> None:
    ask = {"messages": ASK, "max_tokens": 8, "temperature": 1.0, "seed": 40, "n": 3}
    reply = real_server.ask("/v1/chat/completions", ask).json
    texts = [c["message"]["content"] for c in reply["choices"]]
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    assert texts == [
        create_short(real_server, max_tokens=8, temperature=1.0, seed=40 + i) for i in range(3)
    ]
    assert reply["usage"]["completion_tokens"] > 8 >= reply["usage"]["completion_tokens"] / 3
    told = {0: "", 1: "", 2: ""}
    events = real_server.ask("/v1/chat/completions", {**ask, "stream": True}).events
    assert events.pop() == "[DONE]"
    for event in events:
        for choice in event["choices"]:
            told[choice["index"]] += choice["delta"].get("content", "")
    assert list(told.values()) == texts
    spoken = real_server.ask("/v1/chat/completions", {**ask, "modalities": ["text", "audio"]})
    assert (spoken.status, spoken.error["param"]) == (400, "n")


def test_switches_of_the_chat_template(real_server: Running) -> None:
    template = ChatTemplate("{{ messages[0].content }}{% if shout %}!{% endif %}", ["<|im_end|>"])
    assert template.render([{"role": "user", "content": "hi"}], None, {"shout": True}) == ["hi!"]
    assert create_short(
        real_server, chat_template_kwargs={"enable_thinking": False}
    ) == create_short(real_server)
    for bad in (
        {"messages": 1},
        {"x": "<|im_end|>"},
        {"x": [1]},
        [1],
        {str(i): 1 for i in range(17)},
    ):
        reply = real_server.ask(
            "/v1/chat/completions", {"messages": ASK, "chat_template_kwargs": bad}
        )
        assert reply.status == 400
        assert "chat_template_kwargs" in reply.error["message"]
