"""Run by test_clients.py and by `python -m tests.slow clients` in an interpreter that has
the Agents SDK: turns, a function, an interruption, memory."""

import asyncio
import sys
import wave

from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner, RealtimeSession

RATE, PIECE = 24_000, 1920
called: list[str] = []


@function_tool
def weather(city: str) -> str:
    """How the weather is in a city."""
    called.append(city)
    return f"It is sunny in {city}."


async def main(url: str, sound: bytes) -> None:
    set_tracing_disabled(True)
    runner = RealtimeRunner(RealtimeAgent(name="Helper", instructions="Be brief.", tools=[weather]))
    session = await runner.run(model_config={"url": url, "api_key": "none"})
    async with session:
        await say(session, sound)
        assert await ends(session) > 20_000
        sys.stdout.write("ok: a spoken turn and its spoken answer\n")
        await say(session, sound)
        assert await ends(session) > 20_000
        assert called == ["Bonn"], called
        sys.stdout.write("ok: a spoken turn that calls a function\n")
        await say(session, sound)
        await until(session, "audio")
        await say(session, sound)
        await until(session, "audio_interrupted")
        sys.stdout.write("ok: barge-in\n")
        while await ends(session) < 20_000:  # of the one that was stopped
            pass
        roles = [i.role for i in session._history if i.type == "message"]  # type: ignore[union-attr]
        assert roles.count("user") == 4, roles
    sys.stdout.write("ok: a turn after it, with the conversation's memory\n")


async def say(session: RealtimeSession, sound: bytes) -> None:
    for i in range(0, len(sound), PIECE):
        await session.send_audio(sound[i : i + PIECE])


async def ends(session: RealtimeSession) -> int:
    """Bytes of sound until an answer with sound is over."""
    size = 0
    async for event in session:
        assert event.type != "error", event
        if event.type == "audio":
            size += len(event.audio.data)
        elif event.type == "audio_end":
            return size
    raise AssertionError("the session ended")


async def until(session: RealtimeSession, kind: str) -> None:
    async for event in session:
        assert event.type != "error", event
        if event.type == kind:
            return


if __name__ == "__main__":
    with wave.open(sys.argv[2]) as file:
        spoken = file.readframes(file.getnframes())
    asyncio.run(main(sys.argv[1].replace("http", "ws") + "/realtime", spoken))
