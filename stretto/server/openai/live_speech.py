"""`/v1/audio/speech/stream`: a WebSocket that takes a text piece by piece while it is being
written, and sends its speech while it is made.

An ASGI app behind the middleware, which has checked key, host and origin; refusals come before the
upgrade, by HTTP. The messages are vLLM-Omni's: `session.config` first, then `input.text` and
`input.done`; `audio.start`, sound as binary messages (or base64 in events), `audio.done`,
`session.done`. A connection speaks one text. One task reads what the client sends, another speaks;
whichever ends first ends both.

A connection holds a place of the admission queue only while there is text to be spoken: a client
that writes slowly keeps nobody else from being answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.types import Receive, Scope, Send

from stretto.engine.events import AudioChunk, Finished
from stretto.errors import Gone, Invalid, StrettoError, TooLong
from stretto.server.admission import Place
from stretto.server.http.exchange import ClientLeft, decode
from stretto.server.openai import codecs
from stretto.server.openai.error_body import ErrorBody, Refused, describe, respond
from stretto.server.openai.generating_route import closing_events, slices, unfinished
from stretto.server.openai.schema import (
    MAX_INPUT,
    SpeechDelta,
    SpeechFields,
    SpeechFinishReason,
    SpeechFormat,
    SpeechUsage,
)
from stretto.server.openai.speech import speak, used
from stretto.server.request_log import REQUEST_LOG, RequestLog, finish_reason
from stretto.server.service import Service
from stretto.server.tasks import run_until_one_ends, shutting_down

PATH = "/v1/audio/speech/stream"
MAX_MESSAGE = 6 * MAX_INPUT + 1024
"""Bytes of one: a text of the greatest length fits, however it is escaped."""
INPUT_TIMEOUT_S = 30.0
"""From one piece of a text to the next, at most."""
KEEP_PLACE_S = 2.0
"""After the last piece of text and the last sound: then all of the text is spoken, and the place
goes back."""
POLL_S = 1.0
SUBPROTOCOL = "speech"  # for pages, which bring their key as another one
DONE, POLICY, INTERNAL, RESTART = 1000, 1008, 1011, 1012
_encode = msgspec.json.Encoder().encode


class SessionConfig(
    SpeechFields, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="session.config"
):
    """The first message: as a request of `/v1/audio/speech`, but without its text."""

    response_format: SpeechFormat | None = None  # None: pcm
    encoding: Literal["binary", "base64"] = "binary"  # of sound: messages of bytes, or events
    stream_audio: bool | None = None  # without effect: sound is sent as it is made


class InputText(Struct, frozen=True, forbid_unknown_fields=True, tag="input.text"):
    text: Annotated[str, Meta(max_length=MAX_INPUT)]


class InputDone(Struct, frozen=True, forbid_unknown_fields=True, tag="input.done"):
    pass


class AudioStart(Struct, frozen=True, tag="audio.start"):
    format: str
    sample_rate: int
    sentence_index: int = 0  # here, a text is one piece


class AudioDone(Struct, frozen=True, tag="audio.done"):
    total_bytes: int
    usage: SpeechUsage
    finish_reason: SpeechFinishReason
    sentence_index: int = 0


class SessionDone(Struct, frozen=True, tag="session.done"):
    total_sentences: int = 1


class ErrorEvent(Struct, frozen=True, tag="error"):
    message: str
    error: ErrorBody


Message = SessionConfig | InputText | InputDone
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class LiveSpeech:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        request_log: RequestLog = scope[REQUEST_LOG]
        request_log.route = "speech_stream"
        try:
            self.service.engine()
            self.service.admission.check(request_log.client)
            with self.service.sessions.slot(request_log.client):
                offered = SUBPROTOCOL in scope.get("subprotocols", ())
                await SpeechStream(self.service, request_log, receive, send).run(
                    SUBPROTOCOL if offered else None
                )
        except ClientLeft:
            request_log.ended = "left"
        except StrettoError as e:  # before the upgrade
            request_log.fail(e)
            await respond(e)(scope, receive, send)


@dataclass(slots=True)
class SpeechStream:
    service: Service
    request_log: RequestLog
    receive: Receive
    send: Send
    # no more than `MAX_INPUT` characters in all
    pieces: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    configured: asyncio.Future[SessionConfig] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    length: int = 0  # characters that came
    last_progress: float = 0.0  # when a piece was taken or sound came, on the event loop's clock
    input_ended: bool = False  # the text is complete

    async def run(self, subprotocol: str | None) -> None:
        """From the upgrade to the close frame."""
        await self._send({"type": "websocket.accept", "subprotocol": subprotocol})
        try:
            async with asyncio.timeout(self.service.config.realtime_minutes * 60):
                work = (self._speak(), self._read(), self._end_at_shutdown(), self._end_with_key())
                await run_until_one_ends(work, self.service.cut)
        except ClientLeft:
            raise
        except Exception as e:  # noqa: BLE001 - the connection's boundary
            await self._fail(_timed_out() if isinstance(e, TimeoutError) else e)
        else:
            await self._close(DONE, "")

    async def _end_at_shutdown(self) -> None:
        """When the server stops, connections without text are closed at once; running answers
        finish."""
        await self.service.sessions.draining.wait()
        if not self.length:
            raise shutting_down()
        await asyncio.Event().wait()

    async def _end_with_key(self) -> None:
        """When the API key that it was opened with is none any more."""
        while self.service.keys.still_valid(self.request_log.owner):
            await asyncio.sleep(POLL_S)
        raise Refused(
            401,
            "this API key is no longer valid",
            kind="authentication_error",
            code="invalid_api_key",
        )

    # ---- in

    async def _next(self) -> Message:
        """The next message. A client that has begun a text may not be silent for long: it holds a
        stream in the engine."""
        idle = self.service.config.realtime_idle
        patience = None if self.input_ended else min(INPUT_TIMEOUT_S, idle) if self.length else idle
        try:
            async with asyncio.timeout(patience):
                message = await self.receive()
        except TimeoutError:
            raise Refused(408, "nothing was sent for too long", code="timeout") from None
        if message["type"] == "websocket.disconnect":
            raise ClientLeft("the client left")
        data = message.get("bytes")
        data = bytes(data) if data is not None else message["text"].encode()
        if len(data) > MAX_MESSAGE:
            raise TooLong(f"a message has at most {MAX_MESSAGE:,} bytes", "text")
        return decode(data, _decoder)

    async def _read(self) -> None:
        """All that the client sends, until it leaves."""
        first = await self._next()
        if not isinstance(first, SessionConfig):
            raise Invalid("the first message must be session.config", "type")
        codecs.check(first.response_format or "pcm", "response_format")
        self.configured.set_result(first)
        while True:
            message = await self._next()
            if self.input_ended or isinstance(message, SessionConfig):
                raise Invalid(
                    "nothing can come behind input.done, and session.config comes once", "type"
                )
            if isinstance(message, InputDone):
                self.input_ended = True
                self.pieces.put_nowait(None)
            elif message.text:
                self.length += len(message.text)
                if self.length > MAX_INPUT:
                    raise TooLong(f"the text has over {MAX_INPUT:,} characters", "text")
                self.pieces.put_nowait(message.text)
            # Messages that came together need no waiting: others have their turn.
            await asyncio.sleep(0)

    async def read_text(self, first: str, place: Place) -> AsyncIterator[str]:
        piece: str | None = first
        while piece is not None:
            self.mark_progress()
            yield piece
            piece = await self._piece(place)

    def mark_progress(self) -> None:
        self.last_progress = asyncio.get_running_loop().time()

    async def _piece(self, place: Place) -> str | None:
        """The next piece. If none comes before all the others are spoken, the place goes back
        meanwhile."""
        coming = asyncio.ensure_future(self.pieces.get())
        loop = asyncio.get_running_loop()
        try:
            while not coming.done() and place.weight:
                await asyncio.wait(
                    [coming], timeout=max(0.0, self.last_progress + KEEP_PLACE_S - loop.time())
                )
                if not coming.done() and loop.time() >= self.last_progress + KEEP_PLACE_S:
                    place.give_back()
            piece = await coming
        finally:
            coming.cancel()
        if not place.weight:
            await place.take()
        return piece

    async def _whole(self, first: str) -> str:
        """All of the text."""
        parts: list[str] = []
        piece: str | None = first
        while piece is not None:
            parts.append(piece)
            piece = await self.pieces.get()
        return "".join(parts)

    # ---- out

    async def _speak(self) -> None:
        """The whole answer. A place among the requests is taken when something can be said."""
        config = await self.configured
        format = config.response_format or "pcm"
        live = self.service.engine().info.reads_while_written
        first = await self.pieces.get()
        if first is None:
            raise Invalid("there is nothing to say", "text")
        whole = None if live else await self._whole(first)
        async with self.service.admission.place(self.request_log.client, live=live) as place:
            self.request_log.queued = place.waited
            text = self.read_text(first, place) if whole is None else whole
            events = speak(self.service, config, self.request_log, text)
            async with closing_events(events):
                end = None
                size = 0
                encoder = codecs.streamed(format, self.request_log.sample_rate)
                async for event in events:
                    self.request_log.record(event)
                    self.mark_progress()
                    if isinstance(event, AudioChunk):
                        if not size:
                            await self._send_event(AudioStart(format, self.request_log.sample_rate))
                        size += await self._send_sound(
                            config, await codecs.feed(encoder, event.pcm16())
                        )
                    elif isinstance(event, Finished):
                        end = event
                if end is None:
                    raise unfinished()
                size += await self._send_sound(config, await codecs.finish(encoder))
                usage = used(end, self.request_log, bool(config.timeline))
                await self._send_event(AudioDone(size, usage, finish_reason(end)))
        await self._send_event(SessionDone())

    async def _send_sound(self, config: SessionConfig, data: bytes) -> int:
        for part in slices(data):
            if config.encoding == "base64":
                await self._send_event(SpeechDelta(part))
            else:
                await self._send({"type": "websocket.send", "bytes": part})
        return len(data)

    async def _send_event(self, event: Struct) -> None:
        await self._send({"type": "websocket.send", "text": _encode(event).decode()})

    async def _send(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self.service.config.send_timeout):
                await self.send(message)
        except TimeoutError:
            raise ClientLeft("the client took no data for too long") from None
        except OSError:  # the server's word for a client that has gone
            raise ClientLeft("the client left") from None

    async def _fail(self, error: Exception) -> None:
        """Say what was wrong, and close."""
        self.request_log.fail(error)
        status, body = describe(error)
        param = "input" if body.error.param == "text" else body.error.param
        error_body = ErrorBody(body.error.message, body.error.type, param, body.error.code)
        with contextlib.suppress(Gone):
            await self._send_event(ErrorEvent(error_body.message, error_body))
        fault = RESTART if error_body.code == "draining" else INTERNAL
        await self._close(POLICY if status < 500 else fault, error_body.message)

    async def _close(self, code: int, words: str) -> None:
        with contextlib.suppress(Gone, RuntimeError):
            await self._send(
                {
                    "type": "websocket.close",
                    "code": code,
                    "reason": words.encode()[:120].decode("utf-8", "ignore"),
                }
            )


def _timed_out() -> Refused:
    return Refused(408, "the connection has reached its longest duration", code="session_expired")
