"""Talk to a running `stretto serve` with OpenAI's own client: speak a recording, save the answer.

    stretto serve path/to/checkpoint &
    python examples/realtime/openai_client.py question.wav answer.wav      # 24 kHz, mono, 16 bits

The server finds the end of the turn by itself; the recording is sent at the pace at which it was
spoken."""

import argparse
import asyncio
import base64
import wave

from openai import AsyncOpenAI

RATE, PIECE_S = 24_000, 0.04


def read(path: str) -> bytes:
    with wave.open(path) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2), (
            "24 kHz, mono, 16 bits"
        )
        return file.readframes(file.getnframes())


async def main(question: str, answer: str, url: str, key: str) -> None:
    client = AsyncOpenAI(base_url=url, api_key=key)
    async with client.realtime.connect(model="default") as connection:
        await connection.session.update(
            session={
                "type": "realtime",
                "instructions": "You are a friendly assistant. Be brief.",
                "audio": {
                    "input": {
                        "transcription": {"model": "default"},
                        "turn_detection": {"type": "server_vad"},
                    }
                },
            }
        )

        async def speak() -> None:
            data = read(question) + bytes(2 * RATE)  # a second of silence ends the turn
            size = int(PIECE_S * RATE) * 2
            for i in range(0, len(data), size):
                await connection.input_audio_buffer.append(
                    audio=base64.b64encode(data[i : i + size]).decode()
                )
                await asyncio.sleep(PIECE_S)

        speaking = asyncio.create_task(speak())
        sound = b""
        async for event in connection:
            if event.type == "response.output_audio.delta":
                sound += base64.b64decode(event.delta)
            elif event.type == "response.output_audio_transcript.delta":
                print(event.delta, end="", flush=True)
            elif event.type == "response.done":
                print(f"\n({event.response.status}: {event.response.usage})")
                break
            elif event.type == "error":
                raise SystemExit(event.error.message)
        await speaking
    with wave.open(answer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(sound)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question")
    parser.add_argument("answer")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none")
    args = parser.parse_args()
    asyncio.run(main(args.question, args.answer, args.url, args.key))
