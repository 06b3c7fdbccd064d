"""A conversation by voice: sound is given while it is spoken, and the answer begins when it ends.

python examples/session.py [CHECKPOINT]"""

import asyncio
import sys
import time

import numpy as np

from stretto import AsyncEngine, AudioChunk, Finished, Params, Session, StrettoError, TextDelta

PARAMS = Params(max_text_tokens=20, max_frames=25)


def spoken(seconds: float, pitch: float) -> np.ndarray:
    """In place of a microphone."""
    return (0.3 * np.sin(pitch * np.arange(int(16_000 * seconds)))).astype(np.float32)


async def say(session: Session, samples: np.ndarray) -> None:
    """As a microphone gives it: 100 ms at a time. Whole windows of 8 s are read while more is
    spoken."""
    for at in range(0, len(samples), 1600):
        await session.append(samples[at : at + 1600])
    await session.read()  # a speaker would have left the time for it
    await session.commit()


async def answer(session: Session) -> None:
    start, first = time.monotonic(), True
    async for event in session.respond(params=PARAMS):
        match event:
            case TextDelta(text=text):
                print(f"text: {text!r}")
            case AudioChunk() if first:
                first = False
                print(f"first sound after {1000 * (time.monotonic() - start):.0f} ms")
            case Finished(usage=usage):
                new = usage.prompt_tokens - usage.cached_tokens
                print(
                    f"{usage.prompt_tokens} tokens heard, {new} of them read after the turn was "
                    f"over"
                )


async def main() -> None:
    async with AsyncEngine(*sys.argv[1:2]) as engine, engine.session() as session:
        await say(session, spoken(20.0, 0.05))
        await answer(session)
        await say(session, spoken(3.0, 0.08))  # it remembers the first turn, and its own answer
        await answer(session)


try:
    asyncio.run(main())
except StrettoError as error:
    sys.exit(str(error))
