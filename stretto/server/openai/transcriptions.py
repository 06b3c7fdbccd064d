"""POST /v1/audio/transcriptions and /v1/audio/translations: a sound file in, its words out, as they
are found.

The file is decoded by the prompt worker, which cuts it into windows at quiet places; the model
writes down one window after the other, so that a sound may be longer than its context. All else
runs on the event loop."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stretto._validation import wrong_field
from stretto.engine.events import Finished, TextDelta
from stretto.errors import Invalid
from stretto.family import Transcription
from stretto.params import Params
from stretto.preprocess.pool.jobs import Conversation
from stretto.preprocess.pool.memfile import MemFile
from stretto.server.http.body import Body
from stretto.server.http.exchange import Exchange
from stretto.server.http.forms import Form, Source, boundary, in_thread, parse_form, part_of
from stretto.server.openai.generating_route import closing, drop_none, finish_reason, note
from stretto.server.openai.schema import (
    Segment,
    Transcript,
    TranscriptDelta,
    TranscriptDone,
    TranscriptionRequest,
    VerboseTranscript,
)
from stretto.server.request_log import RequestLog
from stretto.server.service import Service
from stretto.types import RequestId

WINDOW_S = 30.0
"""Longest window: as much as recordings that models are taught with."""
RATE = 16_000
_CODE = re.compile(r"[a-z]{2,3}")


@dataclass(frozen=True, slots=True)
class Sound:
    """A request: its fields, and the file as it came."""

    request: TranscriptionRequest
    file: MemFile
    translate: bool


def reader(translate: bool) -> Callable[[Service, Body, RequestLog], Awaitable[Sound]]:
    async def read(service: Service, body: Body, request_log: RequestLog) -> Sound:
        mark = boundary(request_log.content_type)
        source = body.data if body.memfile is None else body.memfile
        async with service.thread_turns.turn(request_log.sender):
            return await in_thread(
                source,
                lambda s: _of_form(s, mark, translate),
                lambda sound: sound.file.close_in_thread(),
            )

    return read


def _of_form(source: Source, mark: bytes, translate: bool) -> Sound:
    """The caller closes the file."""
    form = parse_form(source, mark)
    start, stop = form.files.get("file", (0, 0))
    if start == stop:
        raise Invalid("file: there is none; send a sound as the form's field file", "file")
    return Sound(fields(form), part_of(source, (start, stop)), translate)


def fields(form: Form) -> TranscriptionRequest:
    """Text, as forms have it, in the types of the struct."""
    given: dict[str, Any] = {name.removesuffix("[]"): value for name, value in form.fields.items()}
    try:
        return msgspec.convert(given, TranscriptionRequest, strict=False)
    except msgspec.ValidationError as e:
        raise wrong_field(e) from None


async def answer_sound(service: Service, sound: Sound, exchange: Exchange) -> None:
    async with sound.file:
        engine, request_log, request = (
            service.engine(),
            exchange.request_log,
            sound.request,
        )  # which may be draining by now
        service.check_model(request.model, engine)
        if engine.info.transcription is None:
            raise Invalid("this model cannot transcribe speech", "model")
        words = instruction(engine.info.transcription, request, sound.translate)
        cut, file = await engine.cut(sound.file, WINDOW_S, request_log.sender)
    async with file:
        view = file.view()
        texts = Windows(service, exchange, words, request, [view[a:b] for a, b in cut.windows])
        await (stream_text if request.stream else whole_text)(texts)


def instruction(how: Transcription, request: TranscriptionRequest, translate: bool) -> str:
    language = request.language
    if language is not None and not _CODE.fullmatch(language):
        raise Invalid("language must be two or three small letters, such as en", "language")
    if language is not None and language not in how.languages:
        raise Invalid(f"language: the model hears {', '.join(how.languages)}", "language")
    return how.prompt(language, request.prompt, translate)


def most_tokens(seconds: float) -> int:
    """More than anybody says in that time: the limit stops a model that repeats itself for ever."""
    return 64 + int(16 * seconds)


@dataclass(slots=True)
class Windows:
    """The text of each window, one after the other."""

    service: Service
    exchange: Exchange
    words: str
    request: TranscriptionRequest
    sounds: list[memoryview]
    tokens: int = 0

    async def deltas(self) -> AsyncIterator[tuple[int, str]]:
        """Pieces of text with their window's number; a blank between two windows."""
        engine = self.service.engine()
        request_log = self.exchange.request_log
        given = {"temperature": self.request.temperature or 0.0, "seed": self.request.seed}
        params: Params = replace(engine.info.defaults, **drop_none(given))
        has_text = False
        for i, pcm in enumerate(self.sounds):
            params = replace(
                params, max_text_tokens=self.request.max_tokens or most_tokens(len(pcm) / 2 / RATE)
            )
            sound = {"data": base64.b64encode(pcm).decode(), "format": "pcm16", "sample_rate": RATE}
            content = [
                {"type": "input_audio", "input_audio": sound},
                {"type": "text", "text": self.words},
            ]
            talk = Conversation.of(
                json.dumps([{"role": "user", "content": content}]).encode(),
                sender=request_log.sender,
            )
            id = RequestId(f"{request_log.request_id}-{i}")
            events = engine.generate(
                talk, modalities=("text",), params=params, request_id=id, owner=request_log.owner
            )
            first = True
            async with closing(events):
                async for event in events:
                    note(event, request_log)
                    if isinstance(event, TextDelta) and event.text:
                        text = event.text.lstrip() if first else event.text
                        if text:
                            yield i, (" " if has_text and first else "") + text
                            has_text = True
                            first = False
                    elif isinstance(event, Finished):
                        finish_reason(event)
                        self.tokens += event.usage.text_tokens


async def whole_text(texts: Windows) -> None:
    parts = [""] * len(texts.sounds)
    async for i, text in texts.deltas():
        parts[i] += text
    whole = "".join(parts).strip()
    exchange = texts.exchange
    match texts.request.response_format:
        case "text":
            data = (whole + "\n").encode()
            length = (b"content-length", str(len(data)).encode())
            await exchange.start(200, [(b"content-type", b"text/plain; charset=utf-8"), length])
            await exchange.write(data, more=False)
        case "verbose_json":
            segments = []
            at = 0.0
            for i, (part, pcm) in enumerate(zip(parts, texts.sounds, strict=True)):
                stop = at + len(pcm) / 2 / RATE
                segments.append(Segment(i, round(at, 3), round(stop, 3), part.strip()))
                at = stop
            language = texts.request.language or ""
            await exchange.reply(VerboseTranscript(whole, language, round(at, 3), segments))
        case _:
            await exchange.reply(Transcript(whole))


async def stream_text(texts: Windows) -> None:
    whole = ""
    async for _, text in texts.deltas():
        if not texts.exchange.started:
            await texts.exchange.start_events()
        whole += text
        await texts.exchange.event(TranscriptDelta(text))
    if not texts.exchange.started:
        await texts.exchange.start_events()
    await texts.exchange.event(TranscriptDone(whole.strip()))
    await texts.exchange.write(b"", more=False)
