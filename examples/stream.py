"""Text and speech as they are made, for two questions at once.

python examples/stream.py [CHECKPOINT]"""

import asyncio
import sys

from stretto import AsyncEngine, AudioChunk, Finished, StrettoError, TextDelta


async def listen(engine: AsyncEngine, question: str) -> None:
    async for event in engine.stream(question, max_text_tokens=40, max_frames=100):
        match event:
            case TextDelta(text=text):
                print(f"{question} text: {text!r}")
            case AudioChunk(start=start, samples=samples):
                print(
                    f"{question} sound: {len(samples)} samples from "
                    f"{start / engine.info.sample_rate:.2f} s on"
                )
            case Finished(usage=usage):
                print(f"{question} done: {usage.text_tokens} tokens, {usage.frames} frames")


async def main() -> None:
    async with AsyncEngine(*sys.argv[1:2]) as engine:
        await asyncio.gather(listen(engine, "Who are you?"), listen(engine, "What is a fugue?"))


try:
    asyncio.run(main())
except StrettoError as error:
    sys.exit(str(error))
