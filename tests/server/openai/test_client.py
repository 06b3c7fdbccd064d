"""The real `openai` package against a server with the tiny model: what it gets is what the plain
driver says."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from stretto.engine.events import AudioChunk
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from tests.engine.common import Answer, expected
from tests.server.conftest import Running, read_file, read_open

TOKENS, FRAMES, SEED = 6, 4, 7
PARAMS = Params(seed=SEED, max_text_tokens=TOKENS, max_frames=FRAMES)
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


@pytest.fixture(scope="module")
def written(models: Models, builder: PromptBuilder) -> Answer:
    return expected(models, builder, QUESTION, PARAMS, speak=False)


@pytest.fixture(scope="module")
def spoken(models: Models, builder: PromptBuilder) -> Answer:
    return expected(models, builder, HEARD, PARAMS)


def num_prompt_tokens(builder: PromptBuilder, messages: Any) -> int:
    return len(builder.build(messages).ids)


def ask(running: Running, messages: Any = QUESTION, **options: Any) -> Any:
    options = {
        "model": "default",
        "max_tokens": TOKENS,
        "seed": SEED,
        "extra_body": FIXED,
        **options,
    }
    return running.client().chat.completions.create(messages=messages, **options)


SPOKEN: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
}


def test_whole_text(real_server: Running, written: Answer, builder: PromptBuilder) -> None:
    answer = ask(real_server)
    asked = num_prompt_tokens(builder, QUESTION)
    assert written.text
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == written.text
    assert answer.choices[0].message.audio is None
    assert written.finish is not None
    assert answer.choices[0].finish_reason == written.finish[0]
    assert answer.usage.prompt_tokens == asked
    assert answer.usage.completion_tokens == len(written.ids)
    assert answer.usage.total_tokens == asked + len(written.ids)


@pytest.mark.parametrize("format", ["wav", "pcm16", "flac", "mp3", "opus"])
def test_whole_with_sound_in_and_out(
    format: str, real_server: Running, spoken: Answer, builder: PromptBuilder
) -> None:
    answer = ask(
        real_server, HEARD, modalities=["text", "audio"], audio={"voice": "ethan", "format": format}
    )
    message = answer.choices[0].message
    assert message.content is None
    assert message.audio.transcript == spoken.text
    assert message.audio.expires_at > answer.created
    data = base64.b64decode(message.audio.data)
    check_sound(data, format, spoken.samples)
    details = answer.usage.prompt_tokens_details
    pads = builder.build(HEARD).ids.count(builder.config.tokens.audio_pad)
    assert details.audio_tokens == pads > 0
    assert details.text_tokens + details.audio_tokens == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens_details.audio_tokens == len(spoken.codes) > 1


def check_pcm(data: bytes, want: np.ndarray) -> None:
    """To the last sample, and within what 16 bits can tell."""
    samples = np.frombuffer(data, "<i2")
    assert len(samples) == len(want)
    np.testing.assert_allclose(samples, want * 32767, atol=1)


def check_sound(data: bytes, format: str, floats: np.ndarray, streamed: bool = False) -> None:
    if format in ("pcm", "pcm16"):
        check_pcm(data, floats)
        return
    decode = read_open if streamed and format == "flac" else read_file
    samples, rate = decode(data)
    assert rate == 24_000
    want = floats * 32767
    if format in ("wav", "flac"):
        check_pcm(samples.astype("<i2").tobytes(), floats)
    else:  # lossy: about as long (mp3 pads to its frames), and as loud
        assert len(want) <= len(samples) <= len(want) + 4 * 1152
        loud = np.sqrt(np.mean(samples.astype(float) ** 2) * len(samples))
        assert 0.5 < loud / np.sqrt(np.mean(want.astype(float) ** 2) * len(want)) < 1.5


def test_lengths_can_be_fixed(real_server: Running) -> None:
    """For benchmarks, on any weights: text and speech exactly as long as asked for."""
    fixed = {"ignore_eos": True, "min_audio_frames": 5, "max_audio_frames": 5}
    answer = ask(real_server, HEARD, extra_body=fixed, **SPOKEN)
    assert answer.usage.completion_tokens_details.text_tokens == TOKENS
    assert answer.usage.completion_tokens_details.audio_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def test_streamed_text(real_server: Running, written: Answer, builder: PromptBuilder) -> None:
    chunks = list(ask(real_server, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == written.text
    assert written.finish is not None
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        written.finish[0]
    ]
    assert chunks[-1].choices == []
    asked = num_prompt_tokens(builder, QUESTION)
    assert chunks[-1].usage.total_tokens == asked + len(written.ids)
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_streamed_with_sound_in_and_out(real_server: Running, spoken: Answer) -> None:
    chunks = list(
        ask(
            real_server, HEARD, stream=True, modalities=["text", "audio"], audio={"voice": "ethan",
            "format": "pcm16"},
            extra_body={**FIXED, "timeline": True},
        )
    )  # fmt: skip
    deltas = [c.choices[0].delta for c in chunks]
    audio = [d.audio for d in deltas if d.audio is not None]
    assert deltas[0].role == "assistant"
    assert [bool(a.id) for a in audio] == [True] + [False] * (len(audio) - 1)
    assert [bool(a.expires_at) for a in audio] == [False] * (len(audio) - 1) + [True]
    assert "".join(a.transcript or "" for a in audio) == spoken.text
    pcm = base64.b64decode("".join(a.data or "" for a in audio))
    check_pcm(pcm, spoken.samples)
    assert spoken.finish is not None
    assert chunks[-1].choices[0].finish_reason == (
        "length" if "length" in spoken.finish else "stop"
    )
    report = chunks[-1].to_dict()["stretto"]
    assert report["seed"] == SEED
    assert {"thinker", "talker", "code2wav"} <= {s["lane"] for s in report["timeline"]}
    assert report["audio_s"] == pytest.approx(len(pcm) / 2 / 24_000, abs=1e-5)


def test_the_clients_own_stream_helper(real_server: Running, spoken: Answer) -> None:
    """It joins strings and adds up numbers, so what is sent twice would come out wrong."""
    assert spoken.finish == ("stop", "stop")  # the helper takes anything else for a failure
    with real_server.client().chat.completions.stream(
        model="default", messages=HEARD, max_tokens=TOKENS, seed=SEED, extra_body=FIXED,
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "pcm16"}, stream_options={"include_usage": True},
    ) as stream:  # fmt: skip
        stream.until_done()
        final = stream.get_final_completion()
    message = final.choices[0].message
    audio = message.to_dict()["audio"]
    assert audio["transcript"] == spoken.text
    check_pcm(base64.b64decode(audio["data"]), spoken.samples)
    assert audio["id"].count("audio_") == 1
    assert final.created < audio["expires_at"] < final.created + 10_000


def test_earlier_audio_is_named_by_id(real_server: Running) -> None:
    first = ask(real_server, **SPOKEN).choices[0].message.audio
    follow = {"role": "user", "content": "And then?"}
    said = [*QUESTION, {"role": "assistant", "content": first.transcript}, follow]
    named = [*QUESTION, {"role": "assistant", "audio": {"id": first.id}}, follow]
    by_name, in_words = ask(real_server, named), ask(real_server, said)
    assert by_name.usage.prompt_tokens == in_words.usage.prompt_tokens
    assert by_name.choices[0].message.content == in_words.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="there is no answer"):
        ask(real_server, [*QUESTION, {"role": "assistant", "audio": {"id": "audio_other"}}, follow])


def test_a_conversation_with_tools(real_server: Running) -> None:
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
    told = ask(real_server, messages, tools=[tool])
    untold = ask(real_server, messages, tools=[tool], tool_choice="none")
    assert told.choices[0].message.role == "assistant"
    assert (
        told.usage.prompt_tokens > untold.usage.prompt_tokens > ask(real_server).usage.prompt_tokens
    )


@pytest.mark.parametrize("format", ["pcm", "wav", "flac", "mp3", "opus"])
def test_speech(format: str, real_server: Running) -> None:
    """In each format, what the engine gives a caller of its own."""

    async def collect() -> np.ndarray:
        engine = real_server.server.service.engine()
        events = engine.speak("Read this.", params=Params(seed=SEED, max_frames=FRAMES))
        return np.concatenate([e.samples async for e in events if isinstance(e, AudioChunk)])

    samples = real_server.do(collect())
    answer = real_server.client().audio.speech.create(
        model="default",
        input="Read this.",
        voice="ethan",
        response_format=format,
        extra_body={"seed": SEED, **FIXED},
    )
    assert len(samples)
    check_sound(answer.content, format, samples, streamed=True)
    kinds = {
        "pcm": "audio/pcm",
        "wav": "audio/wav",
        "flac": "audio/flac",
        "mp3": "audio/mpeg",
        "opus": "audio/ogg",
    }
    assert answer.response.headers["content-type"] == kinds[format]


def test_speech_as_it_is_made(real_server: Running) -> None:
    with real_server.client().audio.speech.with_streaming_response.create(
        model="default",
        input="Read this.",
        voice="nova",
        response_format="pcm",
        extra_body={"seed": SEED, **FIXED},
    ) as answer:
        parts = list(answer.iter_bytes(512))
    assert sum(map(len, parts)) == 2 * (1365 + (FRAMES - 1) * 1920)


def test_models(real_server: Running) -> None:
    [card] = real_server.client().models.list().data
    extra = card.to_dict()
    assert extra["sample_rate"] == 24_000
    assert "ethan" in extra["voices"]
    assert extra["output_modalities"] == ["text", "audio"]
    assert real_server.client().models.retrieve(card.id).id == card.id


@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"model": "gpt-nothing"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, openai.BadRequestError,
        "messages[0].role"),
        ({"temperature": 9.0}, openai.BadRequestError, "temperature"),
        ({"n": 9}, openai.BadRequestError, "n"),
        ({"messages": [{"role": "user", "content": "why " * 40_000}]}, openai.BadRequestError,
        "messages"),
        ({"extra_body": {"tempratur": 1}}, openai.BadRequestError, "tempratur"),
        ({**SPOKEN, "audio": {"voice": "hal", "format": "wav"}}, openai.BadRequestError,
        "audio.voice"),
        ({**SPOKEN, "audio": {"voice": "ethan", "format": "amr"}}, openai.BadRequestError,
        "audio.format"),
        ({"stream": True, **SPOKEN}, openai.BadRequestError, "audio.format"),
    ],
)  # fmt: skip
def test_errors_become_the_clients_exceptions(
    options: dict[str, Any], error: type[openai.APIStatusError], param: str, real_server: Running
) -> None:
    with pytest.raises(error) as caught:
        ask(real_server, **options)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


def test_32_parallel_streams_are_exact(
    real_server: Running, models: Models, builder: PromptBuilder
) -> None:
    """Eight questions, four times each, all at once: everyone gets the answer to theirs, to the
    last sample."""
    questions = [
        [{"role": "user", "content": f"Question {i}: {'why ' * (i % 5)}?"}] for i in range(8)
    ]
    options: Any = {
        "model": "default",
        "max_tokens": 3,
        "modalities": ["text", "audio"],
        "stream": True,
    }
    options |= {
        "audio": {"voice": "ethan", "format": "pcm16"},
        "extra_body": {"max_audio_frames": 2},
    }

    def alone(i: int) -> Answer:
        params = Params(seed=i, max_text_tokens=3, max_frames=2)
        return expected(models, builder, questions[i], params)

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
            base_url=f"{real_server.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(32)))

    want = [alone(i) for i in range(8)]
    assert len({a.samples.tobytes() for a in want}) == 8  # different questions, different answers
    for i, (text, pcm) in enumerate(asyncio.run(together())):
        assert text == want[i % 8].text
        check_pcm(pcm, want[i % 8].samples)
