"""One HTTP connection from its first byte, with limits to what a client may hold.

uvicorn's HTTP protocol has no limits of its own. This one bounds the block of headers, the time
until it is there, the requests sent ahead of their answers, the pieces that a body is cut into, and
the number of connections: beyond that the one that has been idle longest is closed, so that silent
connections cannot keep others out. `run.py` makes one for each connection; they share
`ConnectionLimits`. Everything runs on the event loop. Limits of bodies are in `exchange.py`."""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from stretto.config.server import ServerConfig
from stretto.server.http.flow_throttle import REST_S, TurnQueue
from stretto.server.http.trailers import WithTrailers
from stretto.server.openai.error_body import Refused, respond

# Requests waiting for the answer before theirs, and bytes of body of each. Browsers and common
# clients send none ahead.
MAX_AHEAD, AHEAD_BYTES = 8, HIGH_WATER_LIMIT  # beyond this, uvicorn would stop reading
# Chunks of a body, and headers behind it, in one read (of at most 256 KiB). Each is a call from the
# parser: chunks of a byte would be 40,000 calls, for which no other client is served. So after so
# many (a millisecond) others come first.
MAX_PIECES, TURN_PIECES = 4096, 1024
SLICE_BYTES = 8 << 10  # parsed at once of what may hold many pieces


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a connection is ended: the reason for the metrics, and the answer for the client."""

    reason: str
    answer: bytes = b""

    @classmethod
    def of(cls, reason: str, error: Refused) -> Refusal:
        response = respond(error)
        head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
        body = bytes(response.body)
        return cls(
            reason, STATUS_LINE[response.status_code] + head + b"connection: close\r\n\r\n" + body
        )


EVICTED, AHEAD, SILENT = Refusal("evicted"), Refusal("ahead"), Refusal("header_timeout")
SLOW = Refusal.of(
    "header_timeout", Refused(408, "the request's headers took too long to arrive", code="timeout")
)
LARGE = Refusal.of(
    "header_size", Refused(431, "the request's headers are too large", code="headers_too_large")
)
PIECES = Refusal.of(
    "pieces", Refused(400, "the request's body comes in too many pieces", code="malformed")
)
GARBAGE = Refusal.of("malformed", Refused(400, "this is not an HTTP request", code="malformed"))
FULL = Refusal.of(
    "full",
    Refused(
        503, "the server has too many connections", kind="server_error", code="too_many_connections"
    ),
)


@dataclass(slots=True)
class ConnectionLimits:
    """What the connections of a server share: limits, and who waits for a turn."""

    max_connections: int
    header_bytes: int
    header_timeout: float
    send_timeout: float
    count: Callable[[str], None]  # called with a refusal's reason
    # those that have no request to answer; longest idle first
    idle: dict[Connection, None] = field(default_factory=dict)
    floods: TurnQueue = field(default_factory=lambda: TurnQueue(REST_S))
    large_reads: TurnQueue = field(default_factory=TurnQueue)  # of WebSockets

    @classmethod
    def of(cls, config: ServerConfig, count: Callable[[str], None]) -> ConnectionLimits:
        return cls(
            config.max_connections,
            config.max_header_kb << 10,
            config.header_timeout,
            config.send_timeout,
            count,
        )

    def make_room(self, connections: set[Any]) -> bool:
        """Close a connection that nobody needs: the longest idle, or one that is closing and cannot
        get there."""
        victim = next(iter(self.idle), None) or next(
            (c for c in connections if c.transport.is_closing()), None
        )
        if victim is None:
            return False
        self.count(EVICTED.reason)
        self.idle.pop(victim, None)
        # Its connection_lost comes later, and others may be accepted before.
        connections.discard(victim)
        victim.transport.abort()
        return True


class Flow(FlowControl):
    """Nothing is read, either, while what was read waits for its turn to be parsed."""

    parse_pending = False

    def wait(self) -> None:
        self.parse_pending = True
        self._transport.pause_reading()

    def resume_parsing(self) -> None:
        if not self.read_paused:
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        super().resume_reading()
        if self.parse_pending:
            self._transport.pause_reading()


class Connection(HttpToolsProtocol):
    flow: Flow

    def __init__(
        self,
        limits: ConnectionLimits,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.limits = limits
        # the last one begun; `cycle` is the last one received
        self.answering: RequestResponseCycle | None = None
        # of what must come while nothing is being answered
        self.deadline: TimerHandle | None = None
        self.heads = 0  # blocks of headers that have come
        self.head_bytes = 0  # of the block that is coming, and of a header behind its body
        # what comes next is a block of headers, or more of it; else it is a body
        self.head_next = True
        self.head_begun = False
        self.pieces = 0  # of a body, in what was read at once
        self.chunked = False  # the body that comes
        self.unparsed = b""  # read and not parsed
        self.refusal = GARBAGE  # if the parser gives up

    @property
    def busy(self) -> bool:
        return self.answering is not None and not self.answering.response_complete

    # ---- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self.flow = Flow(self.transport)
        if len(self.connections) > self.limits.max_connections:
            self.connections.discard(self)
            if not self.limits.make_room(self.connections):
                self._refuse(FULL)
                return
            self.connections.add(self)
        self.limits.idle[self] = None
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        # uvicorn notifies only the last request received, which may still wait for its turn.
        if self.busy:
            assert self.answering is not None
            self.answering.disconnected = True
            self.answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.flow.parse_pending:  # a transport may have had more in its hands
            self.unparsed += data
        elif not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.pieces = 0
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """All of it, unless it comes in many pieces: then the rest has its turn later."""
        at = 0
        before = self.pieces
        view = memoryview(data)
        while at < len(data) and self.pieces - before < TURN_PIECES:
            if self.head_next:
                size = min(SLICE_BYTES, self.limits.header_bytes - self.head_bytes)
            elif self.chunked:
                size = SLICE_BYTES
            else:  # a body is one call of the parser
                size = len(data)
            if not size:
                self._refuse(LARGE)
                return
            if not self._take(view[at : at + size]):
                return
            at += size
        if self.pieces - before >= TURN_PIECES:
            self.unparsed = data[at:]
            self.flow.wait()
            self.limits.floods.wait(self.loop, self._parse_rest)
        if not self.busy:
            self._wait()

    def _parse_rest(self) -> None:
        rest = self.unparsed
        self.unparsed = b""
        self.flow.parse_pending = False
        if not self.transport.is_closing():
            self._parse(rest)
        if not self.flow.parse_pending:
            self.flow.resume_parsing()

    def _take(self, data: memoryview) -> bool:
        """Parse, within the limits of headers; whether this is still a connection for HTTP."""
        before = self.head_next, self.heads, self.pieces
        if not self._feed(data):
            return False
        if before == (self.head_next, self.heads, self.pieces):
            # It was a part of a header, before a body or behind it.
            self.head_bytes += len(data)
            if self.head_bytes > self.limits.header_bytes:
                self._refuse(LARGE)
                return False
        return True

    def _feed(self, data: memoryview) -> bool:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self._upgrade()
                return False
        except httptools.HttpParserError:
            self._refuse(self.refusal)
            return False
        return not self.transport.is_closing()

    def _upgrade(self) -> None:
        """Hand the connection to the WebSocket protocol, which calls the app and may answer in
        HTTP."""
        if self.busy:  # the answer that is being sent has this connection
            self._refuse(AHEAD)
            return
        self._forget()
        self.handle_websocket_upgrade()

    # ---- the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.head_begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_next:
            super().on_header(name, value)
        else:  # behind the body: nobody reads it
            self._count_piece()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_AHEAD:
            self._stop_parsing(AHEAD)
        self.heads += 1
        self.head_next = False
        self.head_begun = False
        self.chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self._unset_deadline()
        super().on_headers_complete()
        if self.busy:
            self.limits.idle.pop(self, None)
        if self.pipeline:  # uvicorn stops reading, and then nobody would see the client leave
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        if self.cycle is not self.answering and len(self.cycle.body) + len(body) > AHEAD_BYTES:
            self._stop_parsing(AHEAD)
        self.head_bytes = 0
        self._count_piece()
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.head_bytes = 0
        self.head_next = True
        if not self.busy:  # the rest of a body whose answer was given before
            self._unset_deadline()

    def _count_piece(self) -> None:
        self.pieces += 1
        if self.pieces > MAX_PIECES:
            self._stop_parsing(PIECES)

    def _stop_parsing(self, refusal: Refusal) -> NoReturn:
        self.refusal = refusal
        raise ValueError(refusal.reason)  # comes back from the parser as an HttpParserError

    # ---- the app's calls

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self.answering = cycle
        if cycle.scope["http_version"] == "1.1":
            app = cast(ASGI3Application, WithTrailers(cast(ASGIApp, app), cycle))
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins the next one, if one was sent ahead
        if self.busy:
            return
        if left := self.transport.get_write_buffer_size():
            self.loop.call_later(self.limits.send_timeout, self._check_taken, left)
        if not self.transport.is_closing():
            self.limits.idle[self] = None
            if self.head_begun or not self.head_next:
                self._wait()

    # ---- waiting

    def _wait(self) -> None:
        """Nothing is being answered: a request must come, soon if it or the rest of another's body
        has begun."""
        if self.head_begun or self.head_bytes or not self.head_next:
            self._unset_keepalive_if_required()
            self._set_deadline()
        elif self.deadline is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _set_deadline(self) -> None:
        if self.deadline is None:
            self.deadline = self.loop.call_later(self.limits.header_timeout, self._too_late)

    def _unset_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _too_late(self) -> None:
        self._refuse(SLOW if self.head_begun else SILENT)

    def _check_taken(self, left: int) -> None:
        """The end of an answer is buffered: does the client read it? During the answer, the
        exchange checks that."""
        now = 0 if self.busy else self.transport.get_write_buffer_size()
        if now >= left:
            self.transport.abort()
        elif now:
            self.loop.call_later(self.limits.send_timeout, self._check_taken, now)

    def _refuse(self, refusal: Refusal) -> None:
        """End the connection, with words where these would not land in the middle of an answer."""
        self.limits.count(refusal.reason)
        self._unset_deadline()
        if refusal.answer and (not self.busy or self._unanswered()):
            self.transport.write(refusal.answer)
        self.transport.close()

    def _unanswered(self) -> bool:
        """Whether the body that is coming is that of the request being answered, and no answer has
        begun."""
        cycle = self.cycle
        return cycle is self.answering and cycle.more_body and not cycle.response_started

    def _forget(self) -> None:
        self.limits.idle.pop(self, None)
        self._unset_deadline()
        self._unset_keepalive_if_required()
