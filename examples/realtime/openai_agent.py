"""An agent of the OpenAI Agents SDK on a running `stretto serve`: speak a recording, save the
answer.

    pip install openai-agents
    python examples/realtime/openai_agent.py question.wav answer.wav      # 24 kHz, mono, 16 bits

The agent has a function that the model may call."""

import argparse
import asyncio
import os
import wave

from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner

RATE, PIECE_S = 24_000, 0.04


@function_tool
def weather(city: str) -> str:
    """How the weather is in a city."""
    return f"It is sunny in {city}."


def read(path: str) -> bytes:
    with wave.open(path) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2), (
            "24 kHz, mono, 16 bits"
        )
        return file.readframes(file.getnframes())


async def main(question: str, answer: str, url: str, key: str) -> None:
    set_tracing_disabled(True)
    agent = RealtimeAgent(
        name="Helper", instructions="You are a friendly assistant. Be brief.", tools=[weather]
    )
    runner = RealtimeRunner(agent)
    session = await runner.run(model_config={"url": url, "api_key": key})
    sound = b""
    async with session:

        async def speak() -> None:
            data = read(question) + bytes(4 * RATE)  # two seconds of silence end the turn
            size = int(PIECE_S * RATE) * 2
            for i in range(0, len(data), size):
                await session.send_audio(data[i : i + size])
                await asyncio.sleep(PIECE_S)

        speaking = asyncio.create_task(speak())
        async for event in session:
            if event.type == "audio":
                sound += event.audio.data
            elif event.type == "tool_start":
                print(f"calls {event.tool.name}")
            elif event.type == "history_added":
                print("added:", event.item.type)
            elif event.type == "error":
                raise SystemExit(str(event.error))
            elif event.type == "audio_end":
                break
        await speaking
    with wave.open(answer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(sound)
    print(f"{len(sound) / 2 / RATE:.1f} s of answer")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question")
    parser.add_argument("answer")
    parser.add_argument("--url", default="ws://127.0.0.1:8000/v1/realtime")
    parser.add_argument("--key", default=os.environ.get("STRETTO_API_KEY", "none"))
    args = parser.parse_args()
    asyncio.run(main(args.question, args.answer, args.url, args.key))
