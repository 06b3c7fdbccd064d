"""POST /v1/audio/speech: the talker reads a text aloud. The sound is sent as it is made, as bytes of a format or,
with stream_format "sse", as events."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from stretto.errors import Invalid
from stretto.orchestrator.api import AudioChunk, Event, Finished, Params
from stretto.server import codecs
from stretto.server.answer import closing, drop_none, note, report, slices, unfinished
from stretto.server.body import Body
from stretto.server.chat import check_lengths
from stretto.server.exchange import Exchange, Visit, decode
from stretto.server.schema import SpeechDelta, SpeechDone, SpeechRequest, SpeechUsage
from stretto.server.service import Service
from stretto.server.voices import find_voice

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
    check_lengths(request.min_audio_frames, request.max_audio_frames or Params().max_frames, "min_audio_frames")
    given = {
        "seed": request.seed,
        "greedy_speech": request.greedy_speech,
        "max_frames": request.max_audio_frames,
        "min_frames": request.min_audio_frames,
    }
    visit.sample_rate = engine.info.sample_rate
    events = engine.speak(
        request.input,
        voice=find_voice(request.voice, engine.info, "voice"),
        params=Params(**drop_none(given)),
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
