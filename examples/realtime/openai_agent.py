"""An agent of the OpenAI Agents SDK on a running `stretto serve`: speak a recording, save the
answer.

    pip install openai-agents
    python examples/realtime/openai_agent.py question.wav answer.wav      # 24 kHz, mono, 16 bits

The agent has a function that the model may call."""

import asyncio
import os
import sys

from recording import PATIENCE_S, RATE, Arguments, read_arguments

try:
    from agents import function_tool, set_tracing_disabled
    from agents.realtime import RealtimeAgent, RealtimeRunner
    from websockets.exceptions import WebSocketException
except ImportError as error:
    sys.exit(f"{error}: pip install openai-agents")

PIECE_S = 0.04


@function_tool
def weather(city: str) -> str:
    """How the weather is in a city."""
    return f"It is sunny in {city}."


async def main(args: Arguments) -> None:
    set_tracing_disabled(True)
    loop = asyncio.get_running_loop()
    agent = RealtimeAgent(
        name="Helper", instructions="You are a friendly assistant. Be brief.", tools=[weather]
    )
    runner = RealtimeRunner(agent)
    session = await runner.run(model_config={"url": args.url, "api_key": args.key})
    sound = b""
    async with asyncio.timeout(PATIENCE_S) as limit, session:

        async def speak() -> None:
            data = args.data + bytes(4 * RATE)  # two seconds of silence end the turn
            size = int(PIECE_S * RATE) * 2
            for i in range(0, len(data), size):
                await session.send_audio(data[i : i + size])
                await asyncio.sleep(PIECE_S)

        limit.reschedule(loop.time() + args.seconds + PATIENCE_S)
        speaking = asyncio.create_task(speak())
        async for event in session:
            if event.type == "audio":
                limit.reschedule(max(limit.when() or 0.0, loop.time() + PATIENCE_S))
                sound += event.audio.data
            elif event.type == "tool_start":
                print(f"calls {event.tool.name}")
            elif event.type == "history_added":
                print("added:", event.item.type)
            elif event.type == "error":
                sys.exit(str(event.error))
            elif event.type == "audio_end":
                break
        await speaking
    args.write(sound)
    print(f"{len(sound) / 2 / RATE:.1f} s of answer")


if __name__ == "__main__":
    key = os.environ.get("STRETTO_API_KEY", "none")
    args = read_arguments(__doc__, "ws://127.0.0.1:8000/v1/realtime", key)
    try:
        asyncio.run(main(args))
    except TimeoutError:
        args.give_up()
    except (WebSocketException, OSError) as error:
        args.refuse(error)
