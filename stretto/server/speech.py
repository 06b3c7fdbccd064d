"""POST /v1/audio/speech: a text is read aloud. The sound is sent as it is made, as bytes of a format or,
with stream_format "sse", as events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec

from stretto.control.request import Manner
from stretto.errors import Invalid
from stretto.orchestrator.api import AudioChunk, Event, Finished
from stretto.server import codecs
from stretto.server.answer import closing, drop_none, note, report, slices, unfinished
from stretto.server.body import Body
from stretto.server.chatparams import check_lengths, speech_fields
from stretto.server.exchange import Exchange, decode
from stretto.server.schema import SpeechDelta, SpeechDone, SpeechRequest, SpeechUsage
from stretto.server.service import Service
from stretto.server.visit import Visit
from stretto.server.voices import find_voice, voice_name

_decoder = msgspec.json.Decoder(SpeechRequest)


async def read_speech(service: Service, body: Body, visit: Visit) -> SpeechRequest:
    return decode(body.data, _decoder)


async def answer_speech(service: Service, request: SpeechRequest, exchange: Exchange) -> None:
    engine, visit = service.engine(), exchange.visit
    service.check_model(request.model, engine)
    format = request.response_format or "mp3"
    codecs.check(format, "response_format")
    if request.speed not in (None, 1.0):
        raise Invalid("speed: only 1 is supported", "speed")
    if not request.input.strip():
        raise Invalid("input has nothing to read", "input")
    defaults = engine.info.defaults
    check_lengths(request.min_audio_frames, request.max_audio_frames or defaults.max_frames, "min_audio_frames")
    given = {
        "seed": request.seed,
        **speech_fields(request),
        "max_frames": request.max_audio_frames,
        "min_frames": request.min_audio_frames,
    }
    visit.sample_rate = engine.info.sample_rate
    name, info = voice_name(request.voice), engine.info
    made = service.voices.find(visit.owner, name) if name is not None else None
    manner = Manner(
        instructions=(request.instructions or "").strip() if info.instructions else "",
        language=request.language,
        voice=made or b"",
    )
    voice = find_voice(request.voice, info, "voice", service.voices.names(visit.owner)) if made is None else None
    events = engine.speak(
        request.input,
        voice=voice,
        manner=manner,
        params=replace(defaults, **drop_none(given), packets=service.config.packets),
        request_id=visit.request_id,
        owner=visit.owner,
        sender=visit.sender,
    )
    encoder = codecs.streamed(format, engine.info.sample_rate)
    async with closing(events):
        if request.stream_format == "sse":
            await as_events(events, encoder, exchange, bool(request.timeline))
        else:
            await as_bytes(events, encoder, exchange, codecs.CONTENT_TYPES[format])


async def as_bytes(
    events: AsyncIterator[Event], encoder: codecs.Encoder, exchange: Exchange, content_type: str
) -> None:
    headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-cache")]
    end: Finished | None = None
    async for event in events:
        note(event, exchange.visit)
        if isinstance(event, AudioChunk):
            if not exchange.started:
                await exchange.start(200, headers)
            if data := await codecs.feed(encoder, event.pcm16()):
                await exchange.write(data)
        elif isinstance(event, Finished):
            end = event
    if end is None:
        raise unfinished()
    if not exchange.started:
        await exchange.start(200, headers)
    await exchange.write(await codecs.finish(encoder), more=False)


async def as_events(events: AsyncIterator[Event], encoder: codecs.Encoder, exchange: Exchange, timeline: bool) -> None:
    pieces = codecs.Pieces()
    end: Finished | None = None

    async def send(data: bytes) -> None:
        if not exchange.started:
            await exchange.start_events()
        for part in slices(data):
            await exchange.event(SpeechDelta(part))

    async for event in events:
        note(event, exchange.visit)
        if isinstance(event, AudioChunk):
            await send(pieces.feed(await codecs.feed(encoder, event.pcm16())))
        elif isinstance(event, Finished):
            end = event
    if end is None:
        raise unfinished()
    await send(pieces.feed(await codecs.finish(encoder)) + pieces.finish())
    made, usage = report(end, exchange.visit, timeline), end.usage
    total = usage.prompt_tokens + usage.frames
    await exchange.event(SpeechDone(SpeechUsage(usage.prompt_tokens, usage.frames, total, made)))
    await exchange.write(b"", more=False)
