"""LiveKit's realtime model on a running `stretto serve`: speak a recording, save the answer.

    pip install livekit-agents livekit-plugins-openai
    python examples/realtime/livekit_agent.py question.wav answer.wav      # 24 kHz, mono, 16 bits

This drives the model without a LiveKit server. In an agent, hand the same model to
`AgentSession(llm=model)`."""

import argparse
import asyncio
import wave

from livekit import rtc
from livekit.agents import llm
from livekit.plugins.openai.realtime import RealtimeModel

RATE, PIECE_S = 24_000, 0.1


def read(path: str) -> bytes:
    with wave.open(path) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2), (
            "24 kHz, mono, 16 bits"
        )
        return file.readframes(file.getnframes())


async def main(question: str, answer: str, url: str, key: str) -> None:
    model = RealtimeModel(base_url=url, api_key=key, model="default")
    session = model.session()
    answers: asyncio.Queue[llm.GenerationCreatedEvent] = asyncio.Queue()
    session.on("generation_created", answers.put_nowait)
    session.on("error", lambda error: print("error:", error))
    session.on("input_audio_transcription_completed", lambda e: print("you said:", e.transcript))
    await session.update_instructions("You are a friendly assistant. Be brief.")

    data = read(question) + bytes(4 * RATE)  # two seconds of silence end the turn
    size = int(PIECE_S * RATE) * 2
    for i in range(0, len(data), size):
        piece = data[i : i + size]
        session.push_audio(rtc.AudioFrame(piece, RATE, 1, len(piece) // 2))
        await asyncio.sleep(PIECE_S)

    sound = b""
    generation = await answers.get()
    async for message in generation.message_stream:

        async def show(words: llm.MessageGeneration = message) -> None:
            async for text in words.text_stream:
                print(text, end="", flush=True)

        showing = asyncio.create_task(show())
        async for frame in message.audio_stream:
            sound += bytes(frame.data)
        await showing
    print(f"\n{len(sound) / 2 / RATE:.1f} s of answer")
    await session.aclose()
    await model.aclose()
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
