"""The numbers of `usage`, over HTTP with the real engine: each is what it says, and they add up.

What a prompt should count is told by the prompt builder, what an answer should, by its own
tokens."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine.events import Usage
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.pieces import media_pieces
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from stretto.preprocess.prompt import Prompt
from stretto.preprocess.template import TextStream
from stretto.server.openai.chat import chat_usage
from stretto.server.openai.schema import CompletionDetails, PromptDetails
from tests.engine.common import collect, picture, say, sound
from tests.preprocess.samples import data_uri, video_file
from tests.server.real_engine import Served, served

BLOCK = 16
VIDEO = {"type": "video_url", "video_url": {"url": data_uri(video_file(8, 4), "video/mp4")}}
CHATS: dict[str, Any] = {
    "text": [
        {
            "role": "user",
            "content": "Hello, what is the weather like today, and will it be so tomorrow?",
        }
    ],
    "audio": [{"role": "user", "content": [sound(2.1), say("What was that, and who said it?")]}],
    "image": [
        {
            "role": "user",
            "content": [say("Look at this:"), picture(), say("and this:"), picture(seed=1)],
        }
    ],
    "video": [
        {
            "role": "user",
            "content": [say("What happens in here, from the beginning to the end?"), VIDEO],
        }
    ],
    "all": [
        {
            "role": "user",
            "content": [sound(1.0, 5), picture(seed=5), VIDEO, say("All of that at once!")],
        }
    ],
}
FATHER = [{"role": "user", "content": "Hello, what is the weather like in the city?"}]
"""The tiny model's answer to this is full of the word father."""


@dataclass(slots=True)
class Desk:
    """Asks, and knows what the numbers of the answer's prompt should be."""

    it: Served
    builder: PromptBuilder
    asked: list[tuple[list[Any], bool]] = field(
        default_factory=list
    )  # rows of earlier prompts; spoken

    def usage(self, messages: Any, text: int | None, frames: int, **body: Any) -> dict[str, Any]:
        """The answer's usage, after all has been checked that can be told from outside. `text`:
        None if unknown."""
        answer = self.it.chat(messages, **body)
        usage = answer["usage"]
        self.check_prompt(usage, self.builder.build(messages), spoken="modalities" in body)
        made = usage["completion_tokens_details"]
        assert made == {
            "text_tokens": made["text_tokens"],
            "audio_tokens": frames,
            "reasoning_tokens": 0,
        }
        assert text in (None, made["text_tokens"])
        assert usage["completion_tokens"] == made["text_tokens"] + made["audio_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return {
            **answer,
            "text": made["text_tokens"],
            "reason": answer["choices"][0]["finish_reason"],
        }

    def check_prompt(self, usage: dict[str, Any], prompt: Prompt, spoken: bool) -> None:
        tokens, count = self.builder.config.tokens, prompt.ids.count
        audio, seen = count(tokens.audio_pad), count(tokens.image_pad) + count(tokens.video_pad)
        assert usage["prompt_tokens"] == len(prompt.ids)
        assert usage["prompt_tokens_details"] == {
            "text_tokens": len(prompt.ids) - audio - seen,
            "audio_tokens": audio,
            "image_tokens": seen,
            "cached_tokens": self.found(prompt, spoken),
        }

    def found(self, prompt: Prompt, spoken: bool) -> int:
        """Rows in whole blocks that an earlier prompt began with too, never the last one. What the
        talker needs of media is kept only where an answer was spoken."""
        told = {
            p: piece.digest
            for piece in media_pieces(prompt, self.builder.config)
            for p in piece.places.tolist()
        }
        rows = [(i, told[p]) if p in told else i for p, i in enumerate(prompt.ids)]
        best = 0
        for earlier, was_spoken in self.asked:
            same = 0
            for a, b in zip(rows[:-1], earlier, strict=False):
                if a != b or (spoken and not was_spoken and isinstance(a, tuple)):
                    break
                same += 1
            best = max(best, same // BLOCK * BLOCK)
        self.asked.append((rows, spoken))
        return best


@pytest.fixture(scope="module")
def desk(tiny_dir: Path) -> Iterator[Desk]:
    with served(tiny_dir, EngineConfig()) as it:
        yield Desk(it, PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir)))


def spoken(frames: int) -> dict[str, Any]:
    return {"modalities": ["text", "audio"], "min_audio_frames": frames, "max_audio_frames": frames}


def test_each_number_goes_where_it_belongs() -> None:
    usage = chat_usage(
        [Usage(1000, 200, 30, 7, cached_tokens=16, audio_prompt_tokens=300, image_prompt_tokens=4)]
    )
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (1000, 230, 1230)
    assert usage.prompt_tokens_details == PromptDetails(696, 300, 4, 16)
    assert usage.completion_tokens_details == CompletionDetails(200, 30)


@pytest.mark.parametrize("kind", CHATS)
def test_prompts_of_all_kinds(desk: Desk, kind: str) -> None:
    """New, repeated, spoken, spoken again; and with another ending."""
    chat, fixed = CHATS[kind], {"max_tokens": 3, "ignore_eos": True}
    before = len(desk.asked)
    for again in range(2):
        got = desk.usage(chat, 3, 0, **fixed)
        cached = got["usage"]["prompt_tokens_details"]["cached_tokens"]
        whole = (got["usage"]["prompt_tokens"] - 1) // BLOCK * BLOCK
        assert cached == whole if again else cached < whole
        assert got["reason"] == "length"
    for frames in (2, 5):
        got = desk.usage(chat, 3, frames, **fixed, **spoken(frames))
        data = base64.b64decode(got["choices"][0]["message"]["audio"]["data"])
        assert len(data) == 44 + 2 * (1920 * frames - 555)
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == whole
    desk.usage(
        [*chat, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Well?"}],
        3,
        0,
        **fixed,
    )
    assert len(desk.asked) == before + 5


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_the_last_token_is_never_cached(desk: Desk, length: int) -> None:
    """Prompts that end before, with and after the end of a block."""
    end = len(desk.builder.build([{"role": "user", "content": " the" * 32}]).ids)
    words = " the" * (32 + (length - end) % BLOCK)
    chat = [{"role": "user", "content": words}]
    total = len(desk.builder.build(chat).ids)
    assert (total - length) % BLOCK == 0
    for _ in range(2):
        got = desk.usage(chat, 1, 0, max_tokens=1)
    assert (
        got["usage"]["prompt_tokens_details"]["cached_tokens"]
        == (total - 1) // BLOCK * BLOCK
        < total
    )


@pytest.mark.parametrize(
    ("least", "made", "reason"),
    [
        (None, 1, "stop"),
        (0, 1, "stop"),
        (1, 2, "stop"),
        (5, 6, "stop"),
        (7, 8, "stop"),
        (8, 8, "length"),
    ],
)
def test_min_tokens_come_before_the_end(
    desk: Desk, least: int | None, made: int, reason: str
) -> None:
    """With a bias that ends an answer as soon as it may end. As elsewhere, the end token counts as
    made, and not among those that must come before it."""
    end = str(desk.builder.config.tokens.im_end)
    body = {
        "max_tokens": 8,
        "logit_bias": {end: 100},
        **({} if least is None else {"min_tokens": least}),
    }
    assert desk.usage(FATHER, made, 0, **body)["reason"] == reason
    got = desk.usage(FATHER, made, 0 if made == 1 else 3, **body, **spoken(3))
    assert got["reason"] == ("length" if made > 1 else reason), (
        "what ends at once has nothing to say"
    )


def test_ignore_eos_makes_as_many_as_allowed(desk: Desk) -> None:
    end = str(desk.builder.config.tokens.im_end)
    for most in (1, 2, 9):
        assert desk.usage(FATHER, most, 0, max_tokens=most, ignore_eos=True)["reason"] == "length"
        body = {"max_completion_tokens": most, "logit_bias": {end: 100}, "ignore_eos": True}
        assert desk.usage(FATHER, most, 0, **body)["reason"] == "length"


@dataclass(frozen=True, slots=True)
class Said:
    """What the model says to `FATHER`, token by token."""

    ids: Sequence[int]
    upto: Sequence[str]  # the text of the first 0, 1, 2 ... tokens

    def stop(self, stops: Sequence[str], least: int) -> tuple[str, int, str]:
        """What is left of it, how many tokens were made, and why it ended."""
        safe = len(self.upto[least])
        for made in range(least + 1, len(self.upto)):
            text = self.upto[made]
            ends = [
                (at + len(s), at)
                for s in stops
                for at in range(len(text))
                if text.startswith(s, at)
            ]
            ends = [e for e in ends if e[0] > safe]
            if ends:
                return text[: min(ends)[1]], made, "stop"
        return self.upto[-1], len(self.ids), "length"


@pytest.fixture(scope="module")
def said(desk: Desk) -> Said:
    params = Params(max_text_tokens=40, ignore_eos=True)
    got = desk.it.do(
        collect(desk.it.engine.generate(FATHER, modalities=["text"], params=params, owner="apart"))
    )
    words, upto = TextStream(desk.builder.tokenizer), [""]
    for i in got.ids:
        upto.append(upto[-1] + words.push((i,)))
    assert got.text == upto[-1]
    assert upto[-1].count(" father") > 3
    return Said(got.ids, upto)


@pytest.mark.parametrize("least", [0, 5, 6, 7, 30])
@pytest.mark.parametrize(
    "stops", [[" father"], ["ather h", "spell look"], ["d g", "t b"], ["nowhere"]], ids=str
)
def test_stop_strings_and_min_tokens(desk: Desk, said: Said, stops: list[str], least: int) -> None:
    """The answer ends with the token that completes a string, the first such one after `min_tokens`
    others; what the thinker made beyond it is neither told nor counted."""
    want, made, reason = said.stop(stops, least)
    body = {"max_tokens": 40, "ignore_eos": True, "stop": stops, "min_tokens": least}
    got = desk.usage(FATHER, made, 0, **body)
    assert (got["choices"][0]["message"]["content"], got["reason"]) == (want, reason)
    reply = desk.it.post(
        "/v1/chat/completions",
        messages=FATHER,
        stream=True,
        stream_options={"include_usage": True},
        **body,
    )
    *chunks, last, done = reply.events
    assert done == "[DONE]"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == want
    usage = last["usage"]
    assert usage == {**got["usage"], "prompt_tokens_details": usage["prompt_tokens_details"]}
    desk.check_prompt(usage, desk.builder.build(FATHER), False)


def test_a_stop_string_in_a_spoken_answer(desk: Desk, said: Said) -> None:
    want, made, _ = said.stop([" father"], 0)
    body = {"max_tokens": 40, "ignore_eos": True, "stop": " father"}
    got = desk.usage(FATHER, made, 4, **body, **spoken(4))
    assert got["choices"][0]["message"]["audio"]["transcript"] == want


def test_speech(desk: Desk) -> None:
    text = "Good morning, everybody."
    body = {
        "stream_format": "sse",
        "response_format": "pcm",
        "min_audio_frames": 4,
        "max_audio_frames": 4,
    }
    reply = desk.it.post("/v1/audio/speech", input=text, **body)
    [usage] = [e["usage"] for e in reply.events if e["type"] == "speech.audio.done"]
    prompt = len(desk.builder.build([{"role": "user", "content": text}]).ids)
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (
        prompt,
        4,
        prompt + 4,
    )
