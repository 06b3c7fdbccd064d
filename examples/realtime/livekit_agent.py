"""LiveKit's realtime model on a running `stretto serve`: speak a recording, save the answer.

    pip install livekit-agents livekit-plugins-openai
    python examples/realtime/livekit_agent.py question.wav answer.wav      # 24 kHz, mono, 16 bits

This drives the model without a LiveKit server. In an agent, hand the same model to
`AgentSession(llm=model)`."""

import asyncio
import sys

from recording import PATIENCE_S, RATE, Arguments, read_arguments

try:
    from livekit import rtc
    from livekit.agents import llm
    from livekit.plugins.openai.realtime import RealtimeModel
except ImportError as error:
    sys.exit(f"{error}: pip install livekit-agents livekit-plugins-openai")

PIECE_S = 0.1


async def main(args: Arguments) -> None:
    model = RealtimeModel(base_url=args.url, api_key=args.key, model="default")
    session = model.session()
    answers: asyncio.Queue[llm.GenerationCreatedEvent | Exception] = asyncio.Queue()
    session.on("generation_created", answers.put_nowait)
    session.on("error", lambda event: answers.put_nowait(event.error))
    session.on("input_audio_transcription_completed", lambda e: print("you said:", e.transcript))
    await session.update_instructions("You are a friendly assistant. Be brief.")

    data = args.data + bytes(4 * RATE)  # two seconds of silence end the turn
    size = int(PIECE_S * RATE) * 2
    for i in range(0, len(data), size):
        if not answers.empty():
            break  # it answers before the silence has ended, or it failed
        piece = data[i : i + size]
        session.push_audio(rtc.AudioFrame(piece, RATE, 1, len(piece) // 2))
        await asyncio.sleep(PIECE_S)

    sound = b""
    async with asyncio.timeout(PATIENCE_S):
        generation = await answers.get()
    if isinstance(generation, Exception):
        args.refuse(generation)
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
    args.write(sound)


if __name__ == "__main__":
    args = read_arguments(__doc__, "http://127.0.0.1:8000/v1")
    try:
        asyncio.run(main(args))
    except TimeoutError:
        args.give_up()
