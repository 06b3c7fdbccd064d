"""Texts that are read aloud: long ones in one piece, passage after passage, and those that are
still being written; and voices that are made of clips, to read them with. Asyncio, called by the
engine; imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, cast

from stretto.engine.events import AudioChunk, CodeFrames, Event, Finished, Product, Usage
from stretto.engine.request import RequestState
from stretto.engine.request_manager import seed_of
from stretto.errors import Busy, Invalid, StrettoError
from stretto.family import ModelInfo
from stretto.params import RequestOptions, SpeechStyle
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.preprocess.pool.jobs import Conversation
from stretto.preprocess.pool.threads import Prompts
from stretto.preprocess.text_chunks import Coming, Writing, passages

RETRY_S, TRIES = 0.1, 50
"""Between two passages a request has no place in the engine, and may have to wait for another."""

MAX_PASSAGE = 65536
"""Characters of a text that is being written, where the model's texts are not cut into shorter
passages."""

P = TypeVar("P")  # a passage
Speak = Callable[[P], AsyncIterator[Event]]


class Requests(Protocol):
    """What runs its requests: the engine's `RequestManager`, or one pipeline's in warm-up."""

    @property
    def info(self) -> ModelInfo: ...

    def run(
        self,
        build: Callable[[], Awaitable[PackedPrompt]],
        options: RequestOptions,
        write: Callable[[RequestState], Awaitable[None]] | None = None,
    ) -> AsyncIterator[Event]: ...


@dataclass(frozen=True, slots=True)
class TextToSpeech:
    """Makes requests of texts, by what the model can do."""

    requests: Requests
    prompts: Prompts
    encode: Callable[[str], list[int]]

    @property
    def info(self) -> ModelInfo:
        return self.requests.info

    def speak(
        self, text: str | AsyncIterator[str], options: RequestOptions, sender: str
    ) -> AsyncIterator[Event]:
        check_style(options.style, self.info)
        instructions = options.style.instructions
        if not isinstance(text, str):
            if not self.info.live_text:
                raise Invalid("this model reads whole texts alone", "input")
            return self._live(text, replace(options, tts_streaming=True), sender)
        if not text.strip():
            raise Invalid("there is nothing to say", "input")

        def speak(passage: str, options: RequestOptions = options) -> AsyncIterator[Event]:
            build = partial(self.prompts.read, passage, sender, instructions)
            return self.requests.run(build, options)

        found = passages(text, self.info.text_chunk) if self.info.text_chunk else [text]
        if len(found) == 1:
            return speak(found[0])
        one_voice = with_seed(options)
        return read_passages(in_turn(found), lambda passage: speak(passage, one_voice))

    def _live(
        self, text: AsyncIterator[str], options: RequestOptions, sender: str
    ) -> AsyncIterator[Event]:
        build = partial(self.prompts.read, "", sender, options.style.instructions)
        one_voice = with_seed(options)

        def speak(pieces: Callable[[], AsyncIterator[str]]) -> AsyncIterator[Event]:
            def add_text(request: RequestState) -> Awaitable[None]:
                return write(request, pieces(), Writing(self.encode))

            return self.requests.run(build, one_voice, add_text)

        return read_passages(Coming(text, self.info.text_chunk or MAX_PASSAGE).passages(), speak)

    async def enrol(self, clip: Conversation, owner: str) -> bytes:
        if not self.info.cloning:
            raise Invalid("this model has no voices but its own", "voice")

        async def build() -> PackedPrompt:
            try:
                return await self.prompts.build(clip)
            finally:
                clip.close()

        made = b""
        async for event in self.requests.run(build, RequestOptions("enrolment", owner=owner)):
            if isinstance(event, Product):
                made = event.data
        return made


def with_seed(options: RequestOptions) -> RequestOptions:
    """With a seed for all passages: one voice throughout."""
    return replace(options, params=replace(options.params, seed=seed_of(options.params)))


async def in_turn(passages: Sequence[P]) -> AsyncIterator[P]:
    for passage in passages:
        yield passage


async def read_passages(passages: AsyncIterator[P], speak: Speak[P]) -> AsyncIterator[Event]:
    """Each passage is begun when the one before has ended; sound, codes and counts go on from
    there."""
    samples = frames = 0
    ends: list[Finished] = []
    async with aclosing(cast(AsyncGenerator[P, None], passages)) as coming:
        async for passage in coming:
            begun = _begun(passage, speak, retry=bool(ends))
            async with aclosing(cast(AsyncGenerator[Event, None], begun)) as events:
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
    yield joined(ends) if len(ends) > 1 else ends[0]


async def _begun(passage: P, speak: Speak[P], retry: bool) -> AsyncIterator[Event]:
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
    return replace(
        last, audio=cut, usage=total, seed=ends[0].seed, prompt_ids=ends[0].prompt_ids, timeline=()
    )


def check_style(style: SpeechStyle, info: ModelInfo) -> None:
    if style.instructions and not info.instructions:
        raise Invalid("this model follows no instructions", "instructions")
    if style.language is not None and style.language.lower() not in info.languages:
        known = ", ".join(info.languages) or "none to choose from"
        raise Invalid(f"unknown language {style.language!r}; this model has {known}", "language")
    if style.voice and not info.cloning:
        raise Invalid("this model has no voices but its own", "voice")


async def write(request: RequestState, text: AsyncIterator[str], writing: Writing) -> None:
    """Send a request its text as it is written, until its end."""
    request.begin_writing()
    empty = True
    try:
        async for piece in text:
            empty = empty and not piece.strip()
            if tokens := writing.push(piece):
                request.add_tts_text(tokens)
        if empty:
            raise Invalid("there is nothing to say", "input")
        request.add_tts_text(writing.finish(), last=True)
    except StrettoError as e:
        request.fail(e)
    except Exception as e:  # noqa: BLE001  whatever the caller's iterator raises ends its request, and no other
        request.fail(Invalid(f"the text could not be read on: {e}", "input"))
    finally:
        request.end_writing()
