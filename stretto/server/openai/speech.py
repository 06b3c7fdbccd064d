"""POST /v1/audio/speech: text to speech. The sound is sent as it is made, as bytes of an audio
format or, with stream_format "sse", as events. `speak` asks the engine; `live_speech.py` calls it
too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec

from stretto.engine.events import AudioChunk, Event, Finished
from stretto.errors import Invalid
from stretto.params import SpeechStyle
from stretto.server.http.body import Body
from stretto.server.http.exchange import Exchange, decode
from stretto.server.openai import codecs
from stretto.server.openai.chat_params import check_lengths, speech_fields
from stretto.server.openai.generating_route import (
    closing_events,
    drop_none,
    report,
    slices,
    unfinished,
)
from stretto.server.openai.schema import (
    SpeechDelta,
    SpeechDone,
    SpeechFields,
    SpeechRequest,
    SpeechUsage,
)
from stretto.server.openai.voices import find_voice, voice_name
from stretto.server.request_log import RequestLog, finish_reason
from stretto.server.service import Service

FINISH_REASON = b"x-finish-reason"
"""Behind the sound: "length" if the speech was cut at a limit, else "stop"."""

_decoder = msgspec.json.Decoder(SpeechRequest)


async def read_speech(service: Service, body: Body, request_log: RequestLog) -> SpeechRequest:
    return decode(body.data, _decoder)


async def answer_speech(service: Service, request: SpeechRequest, exchange: Exchange) -> None:
    format = request.response_format or "mp3"
    codecs.check(format, "response_format")
    if not request.input.strip():
        raise Invalid("input has nothing to read", "input")
    events = speak(service, request, exchange.request_log, request.input)
    encoder = codecs.streamed(format, exchange.request_log.sample_rate)
    async with closing_events(events):
        if request.stream_format == "sse":
            await as_events(events, encoder, exchange, bool(request.timeline))
        else:
            await as_bytes(events, encoder, exchange, codecs.CONTENT_TYPES[format])


def speak(
    service: Service, request: SpeechFields, request_log: RequestLog, text: str | AsyncIterator[str]
) -> AsyncIterator[Event]:
    """Let the engine read a text aloud, which is complete or still comes. Raises what is wrong with
    the request."""
    engine = service.engine()
    info = engine.info
    defaults = engine.info.defaults
    service.check_model(request.model, engine)
    check_lengths(
        request.min_audio_frames,
        request.max_audio_frames or defaults.max_frames,
        "min_audio_frames",
    )
    overrides = {
        "seed": request.seed,
        **speech_fields(request),
        "max_frames": request.max_audio_frames,
        "min_frames": request.min_audio_frames,
        "speed": request.speed,
    }
    request_log.sample_rate = info.sample_rate
    voice, stored_voice = choose_voice(service, request, request_log.owner)
    style = SpeechStyle(
        instructions=(request.instructions or "").strip() if info.instructions else "",
        language=request.language,
        voice=stored_voice,
    )
    return engine.speak(
        text,
        voice=voice,
        style=style,
        params=replace(defaults, **drop_none(overrides), packets=service.config.packets),
        request_id=request_log.request_id,
        owner=request_log.owner,
        client=request_log.client,
    )


def choose_voice(service: Service, request: SpeechFields, owner: str) -> tuple[str | None, bytes]:
    """The name of the model's voice (None: its default one), or the data of a voice that the owner
    has stored."""
    name = voice_name(request.voice)
    stored = service.voices.find(owner, name) if name is not None else None
    if stored is not None:
        return None, stored
    info = service.engine().info
    return find_voice(request.voice, info, "voice", service.voices.names(owner)), b""


async def as_bytes(
    events: AsyncIterator[Event], encoder: codecs.Encoder, exchange: Exchange, content_type: str
) -> None:
    headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-cache")]
    end: Finished | None = None
    async for event in events:
        exchange.request_log.record(event)
        if isinstance(event, AudioChunk):
            if not exchange.started:
                await exchange.start(200, headers, [FINISH_REASON])
            if data := await codecs.feed(encoder, event.pcm16()):
                await exchange.write(data)
        elif isinstance(event, Finished):
            end = event
    if end is None:
        raise unfinished()
    if not exchange.started:
        await exchange.start(200, headers, [FINISH_REASON])
    reason = (FINISH_REASON, finish_reason(end).encode())
    await exchange.finish(await codecs.finish(encoder), [reason])


async def as_events(
    events: AsyncIterator[Event], encoder: codecs.Encoder, exchange: Exchange, timeline: bool
) -> None:
    pieces = codecs.Pieces()
    end: Finished | None = None

    async def send(data: bytes) -> None:
        if not exchange.started:
            await exchange.start_events()
        for part in slices(data):
            await exchange.event(SpeechDelta(part))

    async for event in events:
        exchange.request_log.record(event)
        if isinstance(event, AudioChunk):
            await send(pieces.feed(await codecs.feed(encoder, event.pcm16())))
        elif isinstance(event, Finished):
            end = event
    if end is None:
        raise unfinished()
    await send(pieces.feed(await codecs.finish(encoder)) + pieces.finish())
    await exchange.event(SpeechDone(used(end, exchange.request_log, timeline), finish_reason(end)))
    await exchange.write(b"", more=False)


def used(end: Finished, request_log: RequestLog, timeline: bool) -> SpeechUsage:
    timings = report(end, request_log, timeline)
    usage = end.usage
    return SpeechUsage(
        usage.prompt_tokens, usage.frames, usage.prompt_tokens + usage.frames, timings
    )
