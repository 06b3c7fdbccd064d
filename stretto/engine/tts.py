"""Texts that are read aloud: long ones in one piece, passage after passage, and those that are
still being written; and voices that are made of clips, to read them with. Asyncio, called by the
engine; imports no torch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

from stretto.engine.events import Event, Product
from stretto.engine.passages import FrameLimits, PassageReader, Speak, one_ahead, with_lead
from stretto.engine.request import RequestState
from stretto.engine.request_manager import RequestManager, seed_of
from stretto.errors import Invalid, StrettoError
from stretto.family import ModelInfo
from stretto.params import Params, RequestOptions, SpeechStyle
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.preprocess.pool.jobs import Conversation
from stretto.preprocess.pool.threads import Prompts
from stretto.preprocess.text_chunks import (
    IncrementalEncoder,
    Passages,
    UnfinishedText,
    passage_end,
    passages,
)

UNCUT = Passages(1 << 16, 1 << 16)
"""The rules for a text that is being written, if the model sets none."""

P = TypeVar("P")  # a passage


@dataclass(frozen=True, slots=True)
class TextToSpeech:
    """Makes requests of texts, by what the model can do."""

    requests: RequestManager
    prompts: Prompts
    encode: Callable[[str], list[int]]

    @property
    def info(self) -> ModelInfo:
        return self.requests.info

    def speak(
        self, text: str | AsyncIterator[str], options: RequestOptions
    ) -> AsyncIterator[Event]:
        check_style(options.style, self.info)
        rules = self.info.passages
        if not isinstance(text, str):
            if self.info.live_text:
                return self._live(text, replace(options, tts_streaming=True))
            if rules is None:
                raise Invalid("this model reads whole texts alone", "input")
            return self._whole(UnfinishedText(text, rules).whole_passages(), options)
        if not text.strip():
            raise Invalid("there is nothing to say", "input")
        text = text if rules is None else text.strip()
        if rules is None or not (rules.sentence or passage_end(text, rules)):
            build = partial(self.prompts.read, text, options.client, options.style.instructions)
            return self.requests.run(build, options)
        return self._whole(iterate(passages(text, rules)), options)

    def _whole(self, texts: AsyncIterator[str], options: RequestOptions) -> AsyncIterator[Event]:
        """Read passages, each when all of it is there."""
        one_voice = with_seed(options)

        def speak(prompt: PackedPrompt, params: Params) -> AsyncIterator[Event]:
            async def build() -> PackedPrompt:
                return prompt

            return self.requests.run(build, replace(one_voice, params=params), placed=True)

        prompts = self._prompts(texts, options)
        return self._read(one_ahead(prompts), one_voice, speak)

    async def _prompts(
        self, texts: AsyncIterator[str], options: RequestOptions
    ) -> AsyncIterator[PackedPrompt]:
        rules = self.info.passages
        async with aclosing(cast(AsyncGenerator[str, None], texts)) as unread:
            async for passage in unread:
                parts = [passage]
                if rules is not None and rules.sentence:
                    parts = await self.prompts.divide(passage, rules, options.client)
                for part in parts:
                    yield await self.prompts.read(part, options.client, options.style.instructions)

    def _live(self, text: AsyncIterator[str], options: RequestOptions) -> AsyncIterator[Event]:
        """Read passages, each while it is being written."""
        build = partial(self.prompts.read, "", options.client, options.style.instructions)
        one_voice = with_seed(options)

        def speak(pieces: Callable[[], AsyncIterator[str]], params: Params) -> AsyncIterator[Event]:
            def add_text(request: RequestState) -> Awaitable[None]:
                return write(request, pieces(), IncrementalEncoder(self.encode))

            own_limits = replace(one_voice, params=params)
            return self.requests.run(build, own_limits, add_text, placed=True)

        unfinished = UnfinishedText(text, self.info.passages or UNCUT)
        return self._read(unfinished.passages(), one_voice, speak)

    async def _read(
        self, passages: AsyncIterator[P], options: RequestOptions, speak: Speak[P]
    ) -> AsyncIterator[Event]:
        """Read passages one after another, with one place among the engine's requests for all."""
        params = options.params
        limits = FrameLimits(
            params, for_whole_text=params.max_frames != self.info.defaults.max_frames
        )
        reader = PassageReader(speak, limits, self.info.sample_rate)
        with self.requests.place():
            events = with_lead(reader.read(passages), self.info.sample_rate)
            async with aclosing(cast(AsyncGenerator[Event, None], events)) as leading:
                async for event in leading:
                    yield event

    async def enrol(self, clip: Conversation, options: RequestOptions) -> bytes:
        if not self.info.cloning:
            raise Invalid("this model has no voices but its own", "voice")

        async def build() -> PackedPrompt:
            with closing(clip):
                return await self.prompts.build(clip)

        voice = b""
        async for event in self.requests.run(build, options):
            if isinstance(event, Product):
                voice = event.data
        return voice


def with_seed(options: RequestOptions) -> RequestOptions:
    """The same options with a seed: all passages are read in one voice."""
    return replace(options, params=replace(options.params, seed=seed_of(options.params)))


async def iterate(passages: Iterable[P]) -> AsyncIterator[P]:
    for passage in passages:
        yield passage


def check_style(style: SpeechStyle, info: ModelInfo) -> None:
    if style.instructions and not info.instructions:
        raise Invalid("this model follows no instructions", "instructions")
    if style.language is not None and style.language.lower() not in info.languages:
        known = ", ".join(info.languages) or "none to choose from"
        raise Invalid(f"unknown language {style.language!r}; this model has {known}", "language")
    if style.voice and not info.cloning:
        raise Invalid("this model has no voices but its own", "voice")


async def write(
    request: RequestState, text: AsyncIterator[str], encoder: IncrementalEncoder
) -> None:
    """Send a request its text as it is written, until its end."""
    request.begin_writing()
    empty = True
    try:
        async for piece in text:
            empty = empty and not piece.strip()
            if tokens := encoder.push(piece):
                request.add_tts_text(tokens)
        if empty:
            raise Invalid("there is nothing to say", "input")
        request.add_tts_text(encoder.finish(), last=True)
    except StrettoError as e:
        request.fail(e)
    except Exception as e:  # noqa: BLE001  whatever the caller's iterator raises ends its request, and no other
        request.fail(Invalid(f"the text could not be read on: {e}", "input"))
    finally:
        request.end_writing()
