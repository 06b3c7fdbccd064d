"""OpenAI's own Python client, unchanged, in a conversation: by hand and by VAD, interrupted, with
functions and memory. With the scripted engine, and once with the real one and the tiny model."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from tests.server.conftest import Running
from tests.server.real_engine import Served
from tests.server.realtime.sounds import b64, pcm, silence, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import say

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'


@asynccontextmanager
async def connected(running: Running) -> AsyncIterator[AsyncRealtimeConnection]:
    client = AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none")
    async with client.realtime.connect(model="default") as connection:
        assert (await connection.recv()).type == "session.created"
        yield connection
    await client.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def until(connection: AsyncRealtimeConnection, kind: str) -> Any:
    while True:
        event = await connection.recv()
        assert event.type != "error", event
        if event.type == kind:
            return event


async def append(connection: AsyncRealtimeConnection, data: bytes) -> None:
    for i in range(0, len(data), 4800):
        await connection.input_audio_buffer.append(audio=b64(data[i : i + 4800]))


async def manual(connection: AsyncRealtimeConnection, **session: Any) -> None:
    audio: Any = {"input": {"turn_detection": None}}
    await connection.session.update(session={"type": "realtime", "audio": audio, **session})
    await until(connection, "session.updated")


async def read_answer(connection: AsyncRealtimeConnection) -> tuple[str, bytes, Any]:
    """An answer to its end: words, sound, and how it ended."""
    words, sound = "", b""
    async for event in connection:
        if event.type == "response.output_audio_transcript.delta":
            words += event.delta
        elif event.type == "response.output_audio.delta":
            sound += base64.b64decode(event.delta)
        elif event.type == "response.done":
            return words, sound, event.response
        assert event.type != "error", event
    raise AssertionError("the connection ended")


def test_voice_turns_with_memory(running: Running, engine: ScriptedEngine) -> None:
    async def talk() -> None:
        async with connected(running) as connection:
            await manual(connection)
            for turn in range(2):
                await append(connection, pcm(speech(0.5)))
                await connection.input_audio_buffer.commit()
                await connection.response.create()
                words, sound, response = await read_answer(connection)
                assert words == f"I know {1 + 2 * turn} messages so far."
                assert len(sound) == 48_000
                assert response.status == "completed"
                assert response.usage.output_tokens > 0

    run(talk())
    assert [t.split(":")[0] for t in engine.asks[1].texts] == ["user", "assistant", "user"]


def test_turns_by_vad_and_barge_in(running: Running, engine: ScriptedEngine) -> None:
    hold = asyncio.Event()

    async def gate(i: int) -> None:
        if i == 5:
            await hold.wait()

    async def talk() -> None:
        async with connected(running) as connection:
            engine.gate = gate
            await append(connection, pcm(silence(0.3), speech(0.6), silence(0.8)))
            item = (await until(connection, "response.output_item.added")).item
            await until(connection, "response.output_audio.delta")
            await append(connection, pcm(speech(0.5)))
            await until(connection, "input_audio_buffer.speech_started")
            await connection.conversation.item.truncate(
                item_id=item.id, content_index=0, audio_end_ms=20
            )
            done = await until(connection, "response.done")
            assert (done.response.status, done.response.status_details.reason) == (
                "cancelled",
                "turn_detected",
            )
            assert (await until(connection, "conversation.item.truncated")).audio_end_ms == 20
            engine.gate = None
            await append(connection, pcm(silence(0.8)))
            assert (await read_answer(connection))[2].status == "completed"

    run(talk())
    assert [t.split(":")[0] for t in engine.asks[-1].texts] == [
        "user",
        "user",
    ]  # too little was heard to be a word


def test_functions(running: Running, engine: ScriptedEngine) -> None:
    engine.script = lambda ask: (
        say(CALL, 0.5) if len(ask.messages) == 1 else say("It is sunny.", 0.5)
    )
    tool: Any = {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {}},
    }

    async def talk() -> None:
        async with connected(running) as connection:
            await manual(connection, tools=[tool], tool_choice="auto")
            part: Any = {"type": "input_text", "text": "How is the weather in Bonn?"}
            await connection.conversation.item.create(
                item={"type": "message", "role": "user", "content": [part]}
            )
            await connection.response.create()
            call = await until(connection, "response.function_call_arguments.done")
            assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bonn"})
            await until(connection, "response.done")
            await connection.conversation.item.create(
                item={
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": '{"sky": "clear"}',
                }
            )
            await connection.response.create()
            assert (await read_answer(connection))[0] == "It is sunny."

    run(talk())


# ---- the real engine


@pytest.fixture
def real(real_server: Running) -> Iterator[Served]:
    service = real_server.server.service
    config = service.config
    yield Served(real_server, service.engine())
    service.config = config


def test_with_the_real_engine(real: Served) -> None:
    """Voice turns by hand and by VAD with the real detector, a transcript, and an interruption, on
    the tiny model."""
    session: Any = {"seed": 5, "max_output_tokens": 12, "max_audio_frames": 12}

    async def talk() -> None:
        async with connected(real.running) as connection:
            await manual(connection, **session)
            await append(connection, pcm(speech(1.0)))
            await connection.input_audio_buffer.commit()
            await connection.response.create()
            _, sound, response = await read_answer(connection)
            assert response.status in ("completed", "incomplete")
            assert len(sound) > 0
            usage = response.usage
            assert usage.input_token_details.audio_tokens > 0
            assert usage.input_tokens > usage.input_token_details.audio_tokens
            vad: Any = {
                "input": {"turn_detection": {"type": "server_vad"}, "transcription": {"model": "x"}}
            }
            await connection.session.update(session={"type": "realtime", "audio": vad})
            await append(connection, pcm(silence(0.3), speech(1.0, seed=4), silence(0.8)))
            await until(connection, "input_audio_buffer.speech_stopped")
            _, _, second = await read_answer(connection)
            assert second.usage.input_tokens > usage.input_tokens  # it remembers
            completed = await until(
                connection, "conversation.item.input_audio_transcription.completed"
            )
            assert completed.usage.input_token_details.audio_tokens > 0
            long: Any = {"type": "realtime", "max_output_tokens": 1000, "max_audio_frames": 4000}
            await connection.session.update(session=long)
            await connection.response.create()
            await until(connection, "response.output_audio.delta")
            await connection.response.cancel()
            assert (await until(connection, "response.done")).response.status == "cancelled"

    run(talk())
    real.do(real.running.server.service.sessions.idle.wait())

    async def quiet() -> None:
        while real.engine.metrics()["stretto_engine_running"]:
            await asyncio.sleep(0.01)

    real.do(quiet())


def test_an_early_answer_is_the_same_on_the_real_engine(real: Served) -> None:
    """With and without answers that begin at a pause: the same words, the same samples (as 16-bit
    ones, to a step)."""
    turn = pcm(silence(0.3), speech(0.6), silence(0.35), speech(0.5, seed=2), silence(0.8))

    def ask(speculate: bool) -> tuple[str, bytes, bool]:
        result: list[Any] = []

        async def talk(running: Running) -> None:
            async with connected(running) as connection:
                session: Any = {
                    "type": "realtime",
                    "seed": 5,
                    "max_output_tokens": 8,
                    "max_audio_frames": 8,
                }
                await connection.session.update(session=session)
                await append(connection, turn)
                words, sound, response = await read_answer(connection)
                result.extend((words, sound, response.stretto["speculative"]))

        service = real.running.server.service
        service.config = replace(service.config, realtime_speculate=speculate)
        run(talk(real.running))
        return result[0], result[1], result[2]

    early, late = ask(True), ask(False)
    assert early[0] == late[0]
    a, b = (np.frombuffer(sound, "<i2").astype(int) for sound in (early[1], late[1]))
    assert len(a) == len(b)
    assert abs(a - b).max() <= 1
    assert (early[2], late[2]) == (True, False)


def test_a_transcription_session_on_the_real_engine(real: Served) -> None:
    async def talk() -> None:
        client = AsyncOpenAI(base_url=f"{real.running.url}/v1", api_key="none")
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
            audio_input: Any = {"transcription": {"model": "whisper-1", "language": "en"}}
            await connection.session.update(
                session={"type": "transcription", "audio": {"input": audio_input}}
            )
            assert (await until(connection, "session.updated")).session.type == "transcription"
            await append(connection, pcm(silence(0.3), speech(1.5), silence(0.8)))
            stopped = await until(connection, "input_audio_buffer.speech_stopped")
            completed = await until(
                connection, "conversation.item.input_audio_transcription.completed"
            )
            assert completed.item_id == stopped.item_id
            assert completed.transcript
            assert completed.usage.input_token_details.audio_tokens > 0
        await client.close()

    run(talk())


def test_a_function_is_called_where_that_is_required(real: Served) -> None:
    """The weights are random: only the grammar can make it call."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Rome"]}},
              "required": ["city"]}  # fmt: skip
    names = ("weather", "time")
    tools: Any = [{"type": "function", "name": name, "parameters": schema} for name in names]

    async def ask(connection: AsyncRealtimeConnection, **response: Any) -> Any:
        await connection.response.create(response=response)
        return (await until(connection, "response.done")).response

    async def talk() -> None:
        async with connected(real.running) as connection:
            await manual(connection, tools=tools, tool_choice="required", max_output_tokens=200)
            part: Any = {"type": "input_text", "text": "Hello"}
            await connection.conversation.item.create(
                item={"type": "message", "role": "user", "content": [part]}
            )
            calls = (await ask(connection)).output
            assert {c.type for c in calls} == {"function_call"}
            assert {c.name for c in calls} <= set(names)
            assert {json.loads(c.arguments)["city"] for c in calls} <= {"Bonn", "Rome"}
            named = {"type": "function", "name": "time"}
            (call,) = (await ask(connection, tool_choice=named)).output
            assert (call.name, call.status) == ("time", "completed")
            short = await ask(connection, tool_choice=named, max_output_tokens=12)
            assert (short.status, short.status_details.reason) == (
                "incomplete", "max_output_tokens",
            )  # fmt: skip
            assert "tool_call" not in str(short.output)
            await connection.response.create(response={"tool_choice": {**named, "name": "other"}})
            event = await connection.recv()
            assert (event.type, event.error.param) == ("error", "tool_choice")

    run(talk())
