"""`/v1/realtime`: a WebSocket from its handshake to its close. An ASGI app behind the middleware,
which has checked key, host name and origin.

Refusals come before the upgrade, as HTTP. Then three tasks: one reads and handles events, one
writes, one watches the clock. The first that ends ends the session, with the reason in the close
frame."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from stretto.engine.protocol import EngineClient
from stretto.errors import Invalid, StrettoError
from stretto.server.loop_time import HEAVY
from stretto.server.openai.error_body import respond
from stretto.server.realtime import server_events as s
from stretto.server.realtime.client_events import LARGE, Event, EventError, decode
from stretto.server.realtime.client_secret_route import read_session
from stretto.server.realtime.client_secrets import CLIENT_SECRET, ClientSecret
from stretto.server.realtime.options import Kind
from stretto.server.realtime.realtime_session import RealtimeSession
from stretto.server.realtime.send_queue import SendQueue, SlowClient
from stretto.server.realtime.transcribe import check_transcribes
from stretto.server.request_log import REQUEST_LOG, RequestLog, server_fault
from stretto.server.service import Service
from stretto.server.shares import Holding

PATHS = ("/v1/realtime", "/realtime")
SUBPROTOCOL = "realtime"
TURN_S = 0.002  # how long one client's events may keep the event loop, and how many bytes of them
TURN_BYTES = 64 << 10
POLL_S = 1.0
CLOSE_TIMEOUT_S = 2.0  # for what is left to send, and for the close frame
GOING_AWAY, POLICY, INTERNAL, RESTART = 1001, 1008, 1011, 1012


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a session ends: for the metrics, and for the close frame."""

    reason: str
    code: int | None = None  # None: the client has left
    text: str = ""


LEFT = Ending("left")
EXPIRED = Ending("expired", GOING_AWAY, "the session has reached its longest duration")
IDLE = Ending("idle", POLICY, "nothing was sent for too long")
REVOKED = Ending("revoked", POLICY, "the API key of this session is no longer valid")
SLOW = Ending("slow", POLICY, "the client does not read what it is sent")
DRAINING = Ending("draining", RESTART, "the server is shutting down")
FAILED = Ending("failed", INTERNAL, "the server failed")


class Realtime:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        request_log: RequestLog = scope[REQUEST_LOG]
        request_log.route = "realtime"
        try:
            engine = self.service.engine()
            secret: ClientSecret | None = scope.get(CLIENT_SECRET)
            kind = _kind(scope, secret)
            model = self._model(engine, kind, _query(scope, "model"))
            if "text" not in engine.info.output_modalities:
                raise Invalid("this model reads texts aloud, and holds no conversations", "model")
            with self.service.sessions.slot(request_log.client):
                held = Holding(self.service.sessions.memory, request_log.client)
                send_queue = SendQueue(self.service.config.send_timeout, held)
                session = RealtimeSession(
                    self.service, engine, send_queue, request_log, model, kind
                )
                beta = (b"openai-beta", b"realtime=v1") in scope.get("headers", ())
                connection = RealtimeConnection(
                    self.service, session, send_queue, receive, send, request_log.owner, beta
                )
                try:
                    if secret is not None:
                        await session.begin_with(read_session(secret.session))
                    await connection.run(
                        SUBPROTOCOL if SUBPROTOCOL in scope.get("subprotocols", ()) else None
                    )
                finally:
                    await session.close()  # the client may have left before it was accepted
                    send_queue.close()
                request_log.ended = connection.ending.reason
                request_log.error = connection.error
        except StrettoError as e:
            request_log.fail(e)
            await respond(e)(scope, receive, send)

    def _model(self, engine: EngineClient, kind: Kind, name: str | None) -> str:
        """The name of the model for this session. Clients that want transcripts name a model of
        OpenAI's for them."""
        if kind == "transcription":
            check_transcribes(engine.info)
            return self.service.model_names(engine)[0]
        return self.service.check_model(name, engine)


@dataclass(slots=True)
class RealtimeConnection:
    service: Service
    session: RealtimeSession
    send_queue: SendQueue
    receive: Receive
    send: Send
    owner: str = ""
    beta: bool = False  # the client speaks the dialect of the beta
    ending: Ending = LEFT
    error: str = ""  # what failed in the server, as text
    last_received: float = field(default_factory=time.monotonic)

    async def run(self, subprotocol: str | None) -> None:
        metrics = self.service.metrics.realtime
        try:
            await self.send({"type": "websocket.accept", "subprotocol": subprotocol})
        except OSError:
            return
        metrics.sessions.inc()
        self.session.greet(self.beta)
        work = [asyncio.create_task(w) for w in (self._read(), self._write(), self.watch())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            self.ending = next(t.result() for t in work if t in done)
        except Exception as e:  # noqa: BLE001 - the connection's boundary
            respond(e)  # logs what is unexpected
            self.error = server_fault(e)
            self.ending = FAILED
        finally:
            try:
                await self._end(work)
            finally:
                metrics.sessions.dec()
                metrics.closed.labels(self.ending.reason).inc()

    async def _end(self, work: list[asyncio.Task[Ending]]) -> None:
        read, write, watch = work
        for task in (read, watch):
            task.cancel()
        await asyncio.wait((read, watch))
        await self.session.close()
        self.send_queue.finish()
        if self.ending.code is not None:
            await asyncio.wait([write], timeout=CLOSE_TIMEOUT_S)
        write.cancel()
        await asyncio.wait([write])
        if self.ending.code is not None:
            close = {
                "type": "websocket.close",
                "code": self.ending.code,
                "reason": self.ending.text,
            }
            with contextlib.suppress(TimeoutError, OSError, RuntimeError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.send(close)

    async def _write(self) -> Ending:
        async def send(data: bytes) -> None:
            try:
                await self.send({"type": "websocket.send", "text": data.decode()})
            except RuntimeError as e:  # of uvicorn: the connection is closing, or never opened
                raise ConnectionError("the client is leaving") from e

        try:
            await self.send_queue.run(send)
        except SlowClient:
            return SLOW
        except OSError:  # the client has gone
            return LEFT
        return self.ending

    async def _read(self) -> Ending:
        began = time.perf_counter()
        size = 0
        turns = self.service.turns
        while True:
            message = await self.receive()
            if message["type"] == "websocket.disconnect":
                return LEFT
            if not self.service.keys.still_valid(self.owner):
                return REVOKED
            self.last_received = time.monotonic()
            data = message.get("bytes")
            data = bytes(data) if data is not None else message["text"].encode()
            size += len(data)
            if size > TURN_BYTES or len(data) > HEAVY:
                await turns.take()
                began = time.perf_counter()
                size = len(data)
            event = await self._decode(data)
            if event is not None:
                await self.session.handle(event)
            del message, data, event  # they may be large, and the next may not come for long
            if time.perf_counter() - began > TURN_S:
                await turns.take()  # messages that came together are there without waiting
                began = time.perf_counter()
                size = 0

    async def _decode(self, data: bytes) -> Event | None:
        try:
            if len(data) <= LARGE:
                return decode(data)
            async with self.service.thread_turns.turn(self.session.client):
                return await asyncio.to_thread(decode, data)
        except EventError as e:
            self.session.error(e.code, str(e), e.param, e.event_id)
            return None

    async def watch(self) -> Ending:
        """Wait until the session has lasted too long, the client has sent nothing for too long, the
        API key is removed, or the server drains."""
        config = self.service.config
        draining = self.service.sessions.draining
        ends = time.monotonic() + config.realtime_minutes * 60
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(draining.wait(), POLL_S)
            if not self.service.keys.still_valid(self.owner):
                return REVOKED
            now = time.monotonic()
            if now >= ends:
                text = (
                    f"Your session hit the maximum duration of {config.realtime_minutes:g} minutes."
                )
                error = s.ErrorInfo("invalid_request_error", text, "session_expired")
                self.send_queue.put(s.Error(error=error))
                return EXPIRED
            if self.session.busy:
                self.last_received = now  # a client that listens need not send
                await asyncio.sleep(POLL_S / 10 if draining.is_set() else 0)
            elif draining.is_set():
                return DRAINING
            elif now - self.last_received > config.realtime_idle:
                return IDLE


def _kind(scope: Scope, secret: ClientSecret | None) -> Kind:
    intent = _query(scope, "intent")
    if intent not in (None, "conversation", "transcription"):
        raise Invalid("intent must be conversation or transcription", "intent")
    kind: Kind = "transcription" if intent == "transcription" else "realtime"
    if secret is None:
        return kind
    if intent is not None and kind != secret.kind:
        raise Invalid(f"this client secret is for a {secret.kind} session", "intent")
    return secret.kind


def _query(scope: Scope, name: str) -> str | None:
    values = parse_qs(scope.get("query_string", b"").decode("latin-1")).get(name)
    return values[0] if values else None
