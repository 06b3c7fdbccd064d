"""Talk to a running `stretto serve` with OpenAI's own client: speak a recording, save the answer.

    stretto serve &
    python examples/realtime/openai_client.py question.wav answer.wav      # 24 kHz, mono, 16 bits

The server finds the end of the turn by itself; the recording is sent at the pace at which it was
spoken."""

import asyncio
import base64
import sys

from recording import PATIENCE_S, RATE, Arguments, read_arguments

try:
    from openai import AsyncOpenAI, OpenAIError
    from websockets.exceptions import WebSocketException
except ImportError as error:
    sys.exit(f"{error}: pip install 'openai[realtime]'")

PIECE_S = 0.04
SESSION = {
    "type": "realtime",
    "instructions": "You are a friendly assistant. Be brief.",
    "audio": {
        "input": {
            "transcription": {"model": "default"},
            "turn_detection": {"type": "server_vad"},
        }
    },
}


async def main(args: Arguments) -> None:
    loop = asyncio.get_running_loop()
    client = AsyncOpenAI(base_url=args.url, api_key=args.key)
    async with (
        asyncio.timeout(PATIENCE_S) as limit,
        client.realtime.connect(model="default") as connection,
    ):
        await connection.session.update(session=SESSION)

        async def speak() -> None:
            data = args.data + bytes(2 * RATE)  # a second of silence ends the turn
            size = int(PIECE_S * RATE) * 2
            for i in range(0, len(data), size):
                await connection.input_audio_buffer.append(
                    audio=base64.b64encode(data[i : i + size]).decode()
                )
                await asyncio.sleep(PIECE_S)

        limit.reschedule(loop.time() + args.seconds + PATIENCE_S)
        speaking = asyncio.create_task(speak())
        sound = b""
        async for event in connection:
            limit.reschedule(max(limit.when() or 0.0, loop.time() + PATIENCE_S))
            if event.type == "response.output_audio.delta":
                sound += base64.b64decode(event.delta)
            elif event.type == "response.output_audio_transcript.delta":
                print(event.delta, end="", flush=True)
            elif event.type == "response.done":
                print(f"\n({event.response.status}: {event.response.usage})")
                break
            elif event.type == "error":
                sys.exit(event.error.message)
        await speaking
    args.write(sound)


if __name__ == "__main__":
    args = read_arguments(__doc__, "http://127.0.0.1:8000/v1")
    try:
        asyncio.run(main(args))
    except TimeoutError:
        args.give_up()
    except (OpenAIError, WebSocketException, OSError) as error:
        args.refuse(error)
