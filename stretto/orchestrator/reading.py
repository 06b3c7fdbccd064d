"""Texts that are read aloud: long ones in one piece, passage after passage, and those that are still being written.
Asyncio, called by the engine; imports no torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from stretto.control.messages import Say
from stretto.control.request import Manner
from stretto.errors import Busy, Invalid, StrettoError, TooLong
from stretto.family import ModelInfo
from stretto.orchestrator.api import AudioChunk, CodeFrames, Event, Finished, Usage
from stretto.orchestrator.ticket import Ticket
from stretto.prompt.passages import Writing

RETRY_S, TRIES = 0.1, 50
"""Between two passages a request has no place in the engine, and may have to wait for another."""

MAX_HELD, MAX_PIECE = 4096, 65536
"""Characters of a word, and of a piece, of a text that is being written."""

Speak = Callable[[str], AsyncIterator[Event]]


async def read_passages(passages: Sequence[str], speak: Speak) -> AsyncIterator[Event]:
    """Each passage is begun when the one before has ended; sound, codes and counts go on from there."""
    samples = frames = 0
    ends: list[Finished] = []
    for i, passage in enumerate(passages):
        async with aclosing(cast(AsyncGenerator[Event, None], _begun(passage, speak, retry=i > 0))) as events:
            async for event in events:
                if isinstance(event, AudioChunk):
                    yield AudioChunk(samples + event.start, event.samples)
                elif isinstance(event, CodeFrames):
                    yield CodeFrames(frames + event.start, event.codes)
                elif isinstance(event, Finished):
                    ends.append(event)
                else:
                    yield event
        samples, frames = samples + ends[-1].usage.samples, frames + ends[-1].usage.frames
    yield joined(ends)


async def _begun(passage: str, speak: Speak, retry: bool) -> AsyncIterator[Event]:
    for tries in range(TRIES):
        try:
            events = cast(AsyncGenerator[Event, None], speak(passage))
            async with aclosing(events):
                async for event in events:
                    yield event
            return
        except Busy:
            if not retry or tries + 1 == TRIES:
                raise
            await asyncio.sleep(RETRY_S)


def joined(ends: Sequence[Finished]) -> Finished:
    last = ends[-1]
    used = [e.usage for e in ends]
    total = Usage(
        prompt_tokens=sum(u.prompt_tokens for u in used),
        text_tokens=sum(u.text_tokens for u in used),
        frames=sum(u.frames for u in used),
        samples=sum(u.samples for u in used),
        cached_tokens=sum(u.cached_tokens for u in used),
    )
    cut = "length" if any(e.audio == "length" for e in ends) else last.audio
    return replace(last, audio=cut, usage=total, seed=ends[0].seed, prompt_ids=ends[0].prompt_ids, timeline=())


def check_manner(manner: Manner, info: ModelInfo) -> None:
    if manner.instructions and not info.instructions:
        raise Invalid("this model follows no instructions", "instructions")
    if manner.language is not None and manner.language.lower() not in info.languages:
        known = ", ".join(info.languages) or "none to choose from"
        raise Invalid(f"unknown language {manner.language!r}; this model has {known}", "language")
    if manner.voice and not info.cloning:
        raise Invalid("this model has no voices but its own", "voice")


async def write(t: Ticket, text: AsyncIterator[str], writing: Writing) -> None:
    """Tell a request its text as it is written, until its end."""
    stage = t.model.pipeline.deciding("audio")
    assert stage is not None
    t.written, said = True, False
    try:
        async for piece in text:
            said = said or bool(piece.strip())
            if len(piece) > MAX_PIECE:
                raise TooLong(f"a piece of the text has over {MAX_PIECE:,} characters", "input")
            tokens = writing.push(piece)
            if writing.held > MAX_HELD:
                raise TooLong(f"the text has a word of over {MAX_HELD:,} characters", "input")
            if tokens:
                t.pipeline.send((stage,), Say(t.id, stage, tuple(tokens)))
        if not said:
            raise Invalid("there is nothing to say", "input")
        t.progressed = time.monotonic()
        t.pipeline.send((stage,), Say(t.id, stage, tuple(writing.finish()), True))
    except StrettoError as e:
        t.fail(e)
    except Exception as e:  # noqa: BLE001  whatever the caller's iterator raises ends its request, and no other
        t.fail(Invalid(f"the text could not be read on: {e}", "input"))
    finally:
        t.written = False
