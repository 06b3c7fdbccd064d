"""The real `openai` package against a running server that has the tiny model: what it gets is what
Solo says."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from stretto.engine.events import AudioChunk, Finished, TextDelta
from stretto.params import Params
from stretto.types import RequestId
from tests.server.conftest import Running, read_file, read_open
from tests.server.solo_engine import SoloEngine

TOKENS, FRAMES, SEED = 6, 4, 7
FIXED = {"max_audio_frames": FRAMES}
QUESTION = [{"role": "user", "content": "What is this?"}]


def tone(seconds: float = 0.4, rate: int = 16_000) -> str:
    """A short WAV file, in base64."""
    out = io.BytesIO()
    samples = 0.3 * np.sin(np.arange(int(seconds * rate)) * 0.11)
    soundfile.write(out, samples, rate, "PCM_16", format="WAV")
    return base64.b64encode(out.getvalue()).decode()


HEARD = [
    {
        "role": "user",
        "content": [
            {"type": "input_audio", "input_audio": {"data": tone(), "format": "wav"}},
            {"type": "text", "text": "What do you hear?"},
        ],
    }
]


def expected(
    running: Running, solo: SoloEngine, messages: Any, name: str, spoken: bool = True
) -> tuple[str, bytes, Finished]:
    """Text and 16-bit samples straight from the engine."""

    async def collect() -> tuple[str, bytes, Finished]:
        params = Params(seed=SEED, max_text_tokens=TOKENS, max_frames=FRAMES)
        modalities = ("text", "audio") if spoken else ("text",)
        events = solo.generate(
            messages, modalities=modalities, params=params, request_id=RequestId(name)
        )
        got = [e async for e in events]
        text = "".join(e.text for e in got if isinstance(e, TextDelta))
        pcm = b"".join(e.pcm16() for e in got if isinstance(e, AudioChunk))
        assert isinstance(got[-1], Finished)
        return text, pcm, got[-1]

    return running.do(collect())


def ask(running: Running, messages: Any = QUESTION, **options: Any) -> Any:
    options = {"model": "tiny", "max_tokens": TOKENS, "seed": SEED, "extra_body": FIXED, **options}
    return running.client().chat.completions.create(messages=messages, **options)


SPOKEN: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
}


def test_whole_text(solo_server: Running, solo: SoloEngine) -> None:
    text, _, end = expected(solo_server, solo, QUESTION, "whole-text", spoken=False)
    answer = ask(solo_server)
    assert text
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.audio is None
    assert answer.choices[0].finish_reason == end.text
    assert answer.usage.prompt_tokens == end.usage.prompt_tokens
    assert answer.usage.completion_tokens == end.usage.text_tokens
    assert answer.usage.total_tokens == end.usage.prompt_tokens + end.usage.text_tokens


@pytest.mark.parametrize("format", ["wav", "pcm16", "flac", "mp3", "opus"])
def test_whole_with_sound_in_and_out(format: str, solo_server: Running, solo: SoloEngine) -> None:
    text, pcm, end = expected(solo_server, solo, HEARD, f"whole-{format}")
    answer = ask(
        solo_server, HEARD, modalities=["text", "audio"], audio={"voice": "ethan", "format": format}
    )
    message = answer.choices[0].message
    assert message.content is None
    assert message.audio.transcript == text
    assert message.audio.expires_at > answer.created
    data = base64.b64decode(message.audio.data)
    check_sound(data, format, pcm)
    details = answer.usage.prompt_tokens_details
    assert details.audio_tokens == end.usage.audio_prompt_tokens > 0
    assert details.text_tokens + details.audio_tokens == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens_details.audio_tokens == end.usage.frames > 1


def check_sound(data: bytes, format: str, pcm: bytes, streamed: bool = False) -> None:
    if format in ("pcm", "pcm16"):
        assert data == pcm
        return
    decode = read_open if streamed and format == "flac" else read_file
    samples, rate = decode(data)
    assert rate == 24_000
    want = np.frombuffer(pcm, "<i2")
    if format in ("wav", "flac"):
        np.testing.assert_array_equal(samples, want)
    else:  # lossy: about as long (mp3 pads to its frames), and as loud
        assert len(want) <= len(samples) <= len(want) + 4 * 1152
        loud = np.sqrt(np.mean(samples.astype(float) ** 2) * len(samples))
        assert 0.5 < loud / np.sqrt(np.mean(want.astype(float) ** 2) * len(want)) < 1.5


def test_lengths_can_be_fixed(solo_server: Running) -> None:
    """For benchmarks, on any weights: text and speech exactly as long as asked for."""
    fixed = {"ignore_eos": True, "min_audio_frames": 5, "max_audio_frames": 5}
    answer = ask(solo_server, HEARD, extra_body=fixed, **SPOKEN)
    assert answer.usage.completion_tokens_details.text_tokens == TOKENS
    assert answer.usage.completion_tokens_details.audio_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def test_streamed_text(solo_server: Running, solo: SoloEngine) -> None:
    text, _, end = expected(solo_server, solo, QUESTION, "streamed-text", spoken=False)
    chunks = list(ask(solo_server, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        end.text
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == end.usage.prompt_tokens + end.usage.text_tokens
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_streamed_with_sound_in_and_out(solo_server: Running, solo: SoloEngine) -> None:
    text, pcm, end = expected(solo_server, solo, HEARD, "streamed-sound")
    chunks = list(
        ask(
            solo_server, HEARD, stream=True, modalities=["text", "audio"], audio={"voice": "ethan",
            "format": "pcm16"},
            extra_body={**FIXED, "timeline": True},
        )
    )  # fmt: skip
    deltas = [c.choices[0].delta for c in chunks]
    audio = [d.audio for d in deltas if d.audio is not None]
    assert deltas[0].role == "assistant"
    assert [bool(a.id) for a in audio] == [True] + [False] * (len(audio) - 1)
    assert [bool(a.expires_at) for a in audio] == [False] * (len(audio) - 1) + [True]
    assert "".join(a.transcript or "" for a in audio) == text
    pieces = [a.data for a in audio if a.data]
    assert len(pieces) == end.usage.frames > 1  # a packet is sent as it is made
    assert base64.b64decode("".join(pieces)) == pcm
    assert chunks[-1].choices[0].finish_reason == (
        "length" if "length" in (end.text, end.audio) else "stop"
    )
    report = chunks[-1].to_dict()["stretto"]
    assert report["seed"] == SEED
    assert {s["lane"] for s in report["timeline"]} == {s.lane for s in end.timeline}
    assert report["audio_s"] == pytest.approx(len(pcm) / 2 / 24_000, abs=1e-5)


def test_the_clients_own_stream_helper(solo_server: Running, solo: SoloEngine) -> None:
    """It joins strings and adds up numbers, so what is sent twice would come out wrong."""
    text, pcm, end = expected(solo_server, solo, HEARD, "helper")
    assert (end.text, end.audio) == ("stop", "stop")  # the helper takes anything else for a failure
    with solo_server.client().chat.completions.stream(
        model="tiny", messages=HEARD, max_tokens=TOKENS, seed=SEED, extra_body=FIXED,
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "pcm16"}, stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        stream.until_done()
        final = stream.get_final_completion()
    message = final.choices[0].message
    audio = message.to_dict()["audio"]
    assert audio["transcript"] == text
    assert base64.b64decode(audio["data"]) == pcm
    assert audio["id"].count("audio_") == 1
    assert final.created < audio["expires_at"] < final.created + 10_000


def test_earlier_audio_is_named_by_id(solo_server: Running, solo: SoloEngine) -> None:
    first = ask(solo_server, **SPOKEN).choices[0].message.audio
    follow = {"role": "user", "content": "And then?"}
    said = [*QUESTION, {"role": "assistant", "content": first.transcript}, follow]
    named = [*QUESTION, {"role": "assistant", "audio": {"id": first.id}}, follow]
    by_name, in_words = ask(solo_server, named), ask(solo_server, said)
    assert by_name.usage.prompt_tokens == in_words.usage.prompt_tokens
    assert by_name.choices[0].message.content == in_words.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="there is no answer"):
        ask(solo_server, [*QUESTION, {"role": "assistant", "audio": {"id": "audio_other"}}, follow])


def test_a_conversation_with_tools(solo_server: Running) -> None:
    """The client's own way round: the call it was given, and what came of it, go back into the
    prompt."""
    tool = {
        "type": "function",
        "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
    }
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    told = ask(solo_server, messages, tools=[tool])
    untold = ask(solo_server, messages, tools=[tool], tool_choice="none")
    assert told.choices[0].message.role == "assistant"
    assert (
        told.usage.prompt_tokens > untold.usage.prompt_tokens > ask(solo_server).usage.prompt_tokens
    )


@pytest.mark.parametrize("format", ["pcm", "wav", "flac", "mp3", "opus"])
def test_speech(format: str, solo_server: Running, solo: SoloEngine) -> None:
    async def collect() -> bytes:
        params = Params(seed=SEED, max_frames=FRAMES)
        events = solo.speak(
            "Read this.", voice="ethan", params=params, request_id=RequestId(f"speak-{format}")
        )
        return b"".join([e.pcm16() async for e in events if isinstance(e, AudioChunk)])

    pcm = solo_server.do(collect())
    answer = solo_server.client().audio.speech.create(
        model="tiny",
        input="Read this.",
        voice="ethan",
        response_format=format,
        extra_body={"seed": SEED, **FIXED},
    )
    assert pcm
    check_sound(answer.content, format, pcm, streamed=True)
    kinds = {
        "pcm": "audio/pcm",
        "wav": "audio/wav",
        "flac": "audio/flac",
        "mp3": "audio/mpeg",
        "opus": "audio/ogg",
    }
    assert answer.response.headers["content-type"] == kinds[format]


def test_speech_as_it_is_made(solo_server: Running) -> None:
    with solo_server.client().audio.speech.with_streaming_response.create(
        model="tiny",
        input="Read this.",
        voice="nova",
        response_format="pcm",
        extra_body={"seed": SEED, **FIXED},
    ) as answer:
        parts = list(answer.iter_bytes(512))
    assert sum(map(len, parts)) == 2 * (1365 + (FRAMES - 1) * 1920)


def test_models(solo_server: Running) -> None:
    [card] = solo_server.client().models.list().data
    assert card.id == "tiny"
    extra = card.to_dict()
    assert extra["sample_rate"] == 24_000
    assert "ethan" in extra["voices"]
    assert extra["output_modalities"] == ["text", "audio"]
    assert solo_server.client().models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"model": "gpt-nothing"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, openai.BadRequestError,
        "messages[0].role"),
        ({"temperature": 9.0}, openai.BadRequestError, "temperature"),
        ({"n": 9}, openai.BadRequestError, "n"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "messages"),
        ({"extra_body": {"tempratur": 1}}, openai.BadRequestError, "tempratur"),
        ({**SPOKEN, "audio": {"voice": "hal", "format": "wav"}}, openai.BadRequestError,
        "audio.voice"),
        ({**SPOKEN, "audio": {"voice": "ethan", "format": "amr"}}, openai.BadRequestError,
        "audio.format"),
        ({"stream": True, **SPOKEN}, openai.BadRequestError, "audio.format"),
    ],
)  # fmt: skip
def test_errors_become_the_clients_exceptions(
    options: dict[str, Any], error: type[openai.APIStatusError], param: str, solo_server: Running
) -> None:
    with pytest.raises(error) as caught:
        ask(solo_server, **options)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_32_parallel_streams_are_exact(solo_server: Running, solo: SoloEngine) -> None:
    """Eight questions, four times each, all at once: everyone gets the answer to theirs, to the
    last sample."""
    questions = [
        [{"role": "user", "content": f"Question {i}: {'why ' * (i % 5)}?"}] for i in range(8)
    ]
    options: Any = {
        "model": "tiny",
        "max_tokens": 3,
        "modalities": ["text", "audio"],
        "stream": True,
    }
    options |= {
        "audio": {"voice": "ethan", "format": "pcm16"},
        "extra_body": {"max_audio_frames": 2},
    }

    async def alone() -> list[tuple[str, bytes]]:
        out = []
        for i, q in enumerate(questions):
            params = Params(seed=i, max_text_tokens=3, max_frames=2)
            events = solo.generate(q, params=params, request_id=RequestId(f"alone-{i}"))
            got = [e async for e in events]
            text = "".join(e.text for e in got if isinstance(e, TextDelta))
            out.append((text, b"".join(e.pcm16() for e in got if isinstance(e, AudioChunk))))
        return out

    async def one(client: openai.AsyncOpenAI, i: int) -> tuple[str, bytes]:
        text, data = "", ""
        async for chunk in await client.chat.completions.create(
            messages=questions[i % 8], seed=i % 8, **options
        ):
            audio = chunk.choices[0].delta.audio
            if audio is not None:
                text += audio.transcript or ""
                data += audio.data or ""
        return text, base64.b64decode(data)

    async def together() -> list[tuple[str, bytes]]:
        async with openai.AsyncOpenAI(
            base_url=f"{solo_server.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(32)))

    want = solo_server.do(alone())
    assert len({pcm for _, pcm in want}) == 8  # different questions, different answers
    assert asyncio.run(together()) == want * 4
    solo_server.do(solo.ledger.idle.wait())
