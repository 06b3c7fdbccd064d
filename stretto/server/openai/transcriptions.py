"""POST /v1/audio/transcriptions and /v1/audio/translations: a sound file in, its text out, streamed
or whole.

The prompt worker decodes the file and cuts it into windows; the model transcribes one window after
the other, so that a sound may be longer than its context. Formats with times get shorter windows,
which end where speech pauses. Each of these is a segment: its times are where its speech begins and
ends in the sound, and not what the model says. All else runs on the event loop."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import msgspec

from stretto._validation import wrong_field
from stretto.engine.events import Finished, TextDelta
from stretto.errors import Invalid
from stretto.family import Transcription
from stretto.params import Params
from stretto.preprocess.pool.jobs import Conversation, Windows
from stretto.preprocess.pool.memfile import MemFile
from stretto.server.http.body import Body
from stretto.server.http.exchange import Exchange
from stretto.server.http.forms import Form, Source, boundary, in_thread, parse_form, part_of
from stretto.server.openai.generating_route import closing_events, drop_none
from stretto.server.openai.schema import (
    Segment,
    Transcript,
    TranscriptDelta,
    TranscriptDone,
    TranscriptionRequest,
    TranscriptSegment,
    VerboseTranscript,
)
from stretto.server.request_log import RequestLog, finish_reason
from stretto.server.service import Service
from stretto.types import RequestId

WINDOW_S = 30.0
"""Longest window: as much as recordings that models are taught with."""
RATE = 16_000
GRANULARITIES = "timestamp_granularities"
WITH_TIMES = ("verbose_json", "srt", "vtt")
_CODE = re.compile(r"[a-z]{2,3}")


@dataclass(frozen=True, slots=True)
class TranscriptionInput:
    """A request: its fields, and the file as it came."""

    request: TranscriptionRequest
    file: MemFile
    translate: bool


def reader(translate: bool) -> Callable[[Service, Body, RequestLog], Awaitable[TranscriptionInput]]:
    async def read(service: Service, body: Body, request_log: RequestLog) -> TranscriptionInput:
        mark = boundary(request_log.content_type)
        source = body.data if body.memfile is None else body.memfile
        async with service.thread_turns.turn(request_log.client):
            return await in_thread(
                source,
                lambda s: _of_form(s, mark, translate),
                lambda sound: sound.file.close_in_thread(),
            )

    return read


def _of_form(source: Source, mark: bytes, translate: bool) -> TranscriptionInput:
    """The caller closes the file."""
    form = parse_form(source, mark)
    start, stop = form.files.get("file", (0, 0))
    if start == stop:
        raise Invalid("file: there is none; send a sound as the form's field file", "file")
    return TranscriptionInput(fields(form), part_of(source, (start, stop)), translate)


def fields(form: Form) -> TranscriptionRequest:
    """Text, as forms have it, in the types of the struct."""
    values: dict[str, Any] = {name.removesuffix("[]"): value for name, value in form.fields.items()}
    if GRANULARITIES in values:
        values[GRANULARITIES] = values[GRANULARITIES].split(",")
    try:
        return msgspec.convert(values, TranscriptionRequest, strict=False)
    except msgspec.ValidationError as e:
        raise wrong_field(e) from None


async def answer_sound(service: Service, sound: TranscriptionInput, exchange: Exchange) -> None:
    async with sound.file:
        engine = service.engine()  # it may be draining by now
        request_log = exchange.request_log
        request = sound.request
        service.check_model(request.model, engine)
        check_times(request)
        if engine.info.transcription is None:
            raise Invalid("this model cannot transcribe speech", "model")
        words = instruction(engine.info.transcription, request, sound.translate)
        longest = None if request.response_format in WITH_TIMES else WINDOW_S
        cut, file = await engine.cut(sound.file, longest, request_log.client)
    async with file:
        view = file.view()
        windows = [view[a:b] for a, b in cut.windows]
        texts = WindowTexts(
            service, exchange, words, request, windows, times(cut), file.size / 2 / RATE
        )
        await (stream_text if request.stream else whole_text)(texts)


def check_times(request: TranscriptionRequest) -> None:
    if "word" in (request.timestamp_granularities or ()):
        raise Invalid(
            "timestamp_granularities: the model gives no times of words; segments have times",
            GRANULARITIES,
        )
    if request.stream and request.response_format in ("srt", "vtt"):
        raise Invalid(
            f"response_format: {request.response_format} is not streamed; verbose_json is, with "
            f"an event for each segment",
            "response_format",
        )


def times(cut: Windows) -> list[tuple[float, float]]:
    """When the speech of each segment begins and ends, in seconds."""
    return [
        (round((a // 2 + before) / RATE, 3), round((b // 2 - after) / RATE, 3))
        for (a, b), (before, after) in zip(cut.windows, cut.quiet)
    ]


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
class WindowTexts:
    """The text of each window, one after the other."""

    service: Service
    exchange: Exchange
    words: str
    request: TranscriptionRequest
    sounds: list[memoryview]
    times: list[tuple[float, float]]  # of each, if these are asked for
    seconds: float  # of the whole sound
    tokens: int = 0

    def segments(self, parts: list[str]) -> list[Segment]:
        """Those in which something is said."""
        spoken = [(s, p.strip()) for s, p in zip(self.times, parts, strict=True) if p.strip()]
        return [Segment(i, *span, text) for i, (span, text) in enumerate(spoken)]

    async def deltas(self) -> AsyncIterator[tuple[int, str]]:
        """Pieces of text with their window's number; a blank between two windows."""
        engine = self.service.engine()
        request_log = self.exchange.request_log
        overrides = {"temperature": self.request.temperature or 0.0, "seed": self.request.seed}
        params: Params = replace(engine.info.defaults, **drop_none(overrides))
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
                client=request_log.client,
            )
            id = RequestId(f"{request_log.request_id}-{i}")
            events = engine.generate(
                talk, modalities=("text",), params=params, request_id=id, owner=request_log.owner
            )
            first = True
            async with closing_events(events):
                async for event in events:
                    request_log.record(event)
                    if isinstance(event, TextDelta) and event.text:
                        text = event.text.lstrip() if first else event.text
                        if text:
                            yield i, (" " if has_text and first else "") + text
                            has_text = True
                            first = False
                    elif isinstance(event, Finished):
                        finish_reason(event)
                        self.tokens += event.usage.text_tokens


async def whole_text(texts: WindowTexts) -> None:
    parts = [""] * len(texts.sounds)
    async for i, text in texts.deltas():
        parts[i] += text
    whole = "".join(parts).strip()
    exchange = texts.exchange
    match texts.request.response_format:
        case "text":
            await reply_text(exchange, whole + "\n", "text/plain")
        case "srt":
            await reply_text(exchange, srt(texts.segments(parts)), "text/plain")
        case "vtt":
            await reply_text(exchange, vtt(texts.segments(parts)), "text/vtt")
        case "verbose_json":
            language = texts.request.language or ""
            found = texts.segments(parts)
            await exchange.reply(VerboseTranscript(whole, language, round(texts.seconds, 3), found))
        case _:
            await exchange.reply(Transcript(whole))


async def reply_text(exchange: Exchange, text: str, kind: str) -> None:
    data = text.encode()
    length = (b"content-length", str(len(data)).encode())
    content = (b"content-type", f"{kind}; charset=utf-8".encode())
    await exchange.start(200, [content, length])
    await exchange.write(data, more=False)


def srt(segments: Sequence[Segment]) -> str:
    return "".join(
        f"{s.id + 1}\n{clock(s.start, ',')} --> {clock(s.end, ',')}\n{one_line(s.text)}\n\n"
        for s in segments
    )


def vtt(segments: Sequence[Segment]) -> str:
    """The signs that mean something in WebVTT are escaped."""
    cues = [
        f"{clock(s.start, '.')} --> {clock(s.end, '.')}\n{escape(one_line(s.text), quote=False)}\n"
        for s in segments
    ]
    return "\n".join(["WEBVTT\n", *cues])


def one_line(text: str) -> str:
    """An empty line would end a subtitle, and an arrow be taken for times."""
    return " ".join(text.replace("-->", "→").split())


def clock(seconds: float, point: str) -> str:
    minutes, ms = divmod(round(1000 * seconds), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{ms // 1000:02}{point}{ms % 1000:03}"


async def stream_text(texts: WindowTexts) -> None:
    exchange = texts.exchange
    parts = [""] * len(texts.sounds)
    done = 0  # windows whose text is complete
    async for i, text in texts.deltas():
        if not exchange.started:
            await exchange.start_events()
        await send_segments(texts, parts, done, i)
        done = i
        parts[i] += text
        await exchange.event(TranscriptDelta(text))
    if not exchange.started:
        await exchange.start_events()
    await send_segments(texts, parts, done, len(parts))
    await exchange.event(TranscriptDone("".join(parts).strip()))
    await exchange.write(b"", more=False)


async def send_segments(texts: WindowTexts, parts: list[str], start: int, stop: int) -> None:
    """Of windows that are complete, where times are asked for."""
    for i in range(start, min(stop, len(texts.times))):
        if text := parts[i].strip():
            await texts.exchange.event(TranscriptSegment(f"seg_{i}", *texts.times[i], text))
