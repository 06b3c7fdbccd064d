"""Run by test_clients.py and by `python -m tests.slow clients` in an interpreter that has
LiveKit Agents: turns, a function, an interruption, memory."""

import asyncio
import sys
import wave
from typing import Any

from livekit import rtc
from livekit.agents import llm
from livekit.plugins.openai.realtime import RealtimeModel

RATE, PIECE = 24_000, 4800


@llm.function_tool
async def weather(city: str) -> str:
    """How the weather is in a city."""
    return f"It is sunny in {city}."


async def main(url: str, sound: bytes) -> None:
    model = RealtimeModel(base_url=url, api_key="none", model="default")
    session = model.session()
    answers: asyncio.Queue[llm.GenerationCreatedEvent] = asyncio.Queue()
    started: asyncio.Queue[Any] = asyncio.Queue()
    words: list[str] = []
    session.on("generation_created", answers.put_nowait)
    session.on("input_speech_started", started.put_nowait)
    session.on(
        "input_audio_transcription_completed",
        lambda e: words.append(e.transcript) if e.is_final else None,
    )
    errors: list[Any] = []
    session.on("error", errors.append)
    await session.update_instructions("Be brief.")
    await session.update_tools([weather])

    def say() -> None:
        for i in range(0, len(sound), PIECE):
            piece = sound[i : i + PIECE]
            session.push_audio(rtc.AudioFrame(piece, RATE, 1, len(piece) // 2))

    say()
    assert (await read_answer(await answers.get()))[0] > 20_000
    sys.stdout.write("ok: a spoken turn and its spoken answer\n")
    say()
    _, calls = await read_answer(await answers.get())
    assert [(c.name, c.arguments) for c in calls] == [("weather", '{"city": "Bonn"}')], calls
    memory = session.chat_ctx.copy()
    memory.items.append(
        llm.FunctionCallOutput(
            call_id=calls[0].call_id, name="weather", output="sunny", is_error=False
        )
    )
    await session.update_chat_ctx(memory)
    reply = session.generate_reply()  # is found again by its metadata
    assert (await read_answer(await reply))[0] > 20_000
    sys.stdout.write("ok: a spoken turn that calls a function\n")
    await answers.get()
    while not started.empty():
        started.get_nowait()
    say()
    generation = await answers.get()
    message = await anext(aiter(generation.message_stream))
    await anext(aiter(message.audio_stream))
    say()
    await started.get()
    session.interrupt()  # too late, as always: the server has done it
    session.truncate(message_id=message.message_id, modalities=["audio"], audio_end_ms=500)
    sys.stdout.write("ok: barge-in\n")
    assert (await read_answer(await answers.get()))[0] > 20_000
    roles = [i.role for i in session.chat_ctx.items if i.type == "message"]
    assert roles.count("user") == 4, roles
    while len(words) < 3:
        await asyncio.sleep(0.05)
    assert set(words) == {"what was said"}, words
    assert not [e for e in errors if not e.recoverable], errors
    await session.aclose()
    await model.aclose()
    sys.stdout.write("ok: a turn after it, with the conversation's memory\n")


async def read_answer(generation: llm.GenerationCreatedEvent) -> tuple[int, list[llm.FunctionCall]]:
    size, calls = 0, []
    async for message in generation.message_stream:
        async for frame in message.audio_stream:
            size += len(bytes(frame.data))
    async for call in generation.function_stream:
        calls.append(call)
    return size, calls


if __name__ == "__main__":
    with wave.open(sys.argv[2]) as file:
        spoken = file.readframes(file.getnframes())
    asyncio.run(main(sys.argv[1], spoken))
