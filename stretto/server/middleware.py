"""The outermost ASGI middleware: who may call, request ids, the log line, metrics.

Everything is checked before a byte of the body is read: the name the server was called by, the page
that calls, the key, the body's type. HTTP passes, and so do WebSockets to routes that take them;
refusals come as HTTP, before the upgrade."""

from __future__ import annotations

import logging
import re
import secrets
import time
from urllib.parse import quote

from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.server.http.exchange import CutConnection
from stretto.server.http.websocket import INCOMING
from stretto.server.openai.error_body import Refused, respond
from stretto.server.openai.live_speech import PATH as LIVE_SPEECH
from stretto.server.origins import Callers, check_json, preflight_headers
from stretto.server.realtime.endpoint import PATHS as REALTIME
from stretto.server.request_log import REQUEST_LOG, RequestLog
from stretto.server.service import Service
from stretto.server.shares import sender_of_address
from stretto.types import RequestId

log = logging.getLogger("stretto.access")

QUEUED = b"x-queue-wait-ms"  # how long a request waited for its turn
_FINE_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
# how a page's WebSocket, which cannot set headers, brings its key
_KEY_PROTOCOL = "openai-insecure-api-key."
_QUIET = {
    "health",
    "live",
    "metrics",
    "page",
    "preflight",
}  # asked every few seconds; worth a line only when debugging


class AccessMiddleware:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service
        self.callers = Callers.of(service.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_log = _new_log(scope, headers)
        added = [(b"x-request-id", request_log.client_id.encode())]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_log.status = message["status"]
                queued = (
                    []
                    if request_log.queued is None
                    else [(QUEUED, f"{1000 * request_log.queued:.1f}".encode())]
                )
                message["headers"] = [*message.get("headers", ()), *added, *queued]
            await send(message)

        try:
            host = self.callers.check_host(headers)
            origin = headers.get("origin", "")
            added += self.callers.shares(origin, host, scope["scheme"])
            app = self._admit(scope, headers, origin, host)
            await app(scope, receive, send_with_id)
        except Refused as e:
            await respond(e)(scope, receive, send_with_id)
        except CutConnection:
            request_log.ended = request_log.ended or "broken"
            raise
        finally:
            self._record(scope, request_log)

    def _admit(self, scope: Scope, headers: Headers, origin: str, host: str) -> ASGIApp:
        """What answers this request, if it may be answered."""
        request_log: RequestLog = scope[REQUEST_LOG]
        api = is_api(scope)
        preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        if origin and (api or preflight):
            self.callers.check_origin(origin, host, scope["scheme"])
        if preflight:
            request_log.route = "preflight"
            return Response(status_code=200, headers=preflight_headers(headers))
        if api and scope["method"] != "OPTIONS":
            self._identify(request_log, scope, headers)
            session = headers.get("x-session-id", "")
            request_log.session = (
                f"{request_log.owner}/{session}" if _FINE_ID.fullmatch(session) else None
            )
            if scope["method"] == "POST":
                request_log.content_type = headers.get("content-type", "")
                check_json(headers, scope["path"].removeprefix(scope.get("root_path", "")))
        return self.app

    def _identify(
        self, request_log: RequestLog, scope: Scope, headers: Headers, other_key: str | None = None
    ) -> None:
        request_log.owner = self.service.keys.owner(headers, other_key)
        address = str((scope.get("client") or ("",))[0])
        request_log.sender = (
            request_log.owner if self.service.keys.needed else sender_of_address(address)
        )

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app's own start and end pass, and WebSockets where there is one. Nothing else gets an
        answer."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            raise ValueError(f"no requests of type {scope['type']!r} are taken")

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_log = _new_log(scope, headers)

        async def watched(message: Message) -> None:
            if message["type"] == "websocket.accept":
                request_log.status = 101
            elif message["type"] == "websocket.http.response.start":
                request_log.status = message["status"]
            await send(message)

        try:
            host = self.callers.check_host(headers)
            if _path(scope) not in (*REALTIME, LIVE_SPEECH):
                raise Refused(404, "there is no WebSocket here", code="not_found")
            if origin := headers.get("origin", ""):
                self.callers.check_origin(
                    origin, host, "https" if scope["scheme"] == "wss" else "http"
                )
            self._identify(request_log, scope, headers, _other_key(scope))
            if (
                incoming := scope.get(INCOMING)
            ) is not None:  # another server may hold the connection, as Ray's does
                incoming.belong_to(request_log.sender)
            await self.app(scope, receive, watched)
        except Refused as e:
            await receive()  # websocket.connect
            await respond(e)(scope, receive, watched)
        finally:
            self._record(scope, request_log)

    def _record(self, scope: Scope, request_log: RequestLog) -> None:
        self.service.metrics.record(request_log)
        level = logging.DEBUG if request_log.route in _QUIET else logging.INFO
        if log.isEnabledFor(level):
            fields = facts(scope, request_log)
            log.log(
                level, " ".join(f"{k}={v}" for k, v in fields.items()), extra={"fields": fields}
            )


def _new_log(scope: Scope, headers: Headers) -> RequestLog:
    ours = RequestId(f"req-{secrets.token_hex(12)}")
    theirs = headers.get("x-request-id", "")
    # A client's id is for its own logs: it may repeat, so nothing in here hangs on it.
    request_log = RequestLog(
        ours, theirs if _FINE_ID.fullmatch(theirs) else str(ours), time.perf_counter()
    )
    scope[REQUEST_LOG] = request_log
    return request_log


def _path(scope: Scope) -> str:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


def _other_key(scope: Scope) -> str | None:
    """A key that came among the subprotocols or in the query."""
    for name in scope.get("subprotocols", ()):
        if name.startswith(_KEY_PROTOCOL):
            return str(name.removeprefix(_KEY_PROTOCOL)) or None
    return QueryParams(scope.get("query_string", b"")).get("api-key")


def is_api(scope: Scope) -> bool:
    """Only /v1 is guarded: probes, metrics and the page's files are open."""
    path = _path(scope)
    return path == "/v1" or path.startswith("/v1/")


def facts(scope: Scope, request_log: RequestLog) -> dict[str, str | int | float]:
    """What a log line says about a request."""
    r = request_log
    fields: dict[str, str | int | float | None] = {
        "id": str(r.request_id),
        "client_id": None if r.client_id == r.request_id else r.client_id,
        "method": scope.get("method", "WEBSOCKET"),
        "path": _shown(scope["path"]),
        "status": r.status,
        "key": r.owner or None,
        "queued_ms": _milliseconds(r.queued),
        "first_text_ms": _milliseconds(r.first_text),
        "first_audio_ms": _milliseconds(r.first_audio),
        "tokens": r.num_tokens or None,
        "audio_s": None if r.rtf is None else round(r.audio_seconds, 2),
        "rtf": None if r.rtf is None else round(r.rtf, 3),
        "underrun_ms": _milliseconds(r.underrun or None),
        "ended": r.ended or None,
        "ms": _milliseconds(r.elapsed()),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def _shown(path: str) -> str:
    """A path is a client's text: as in a URL, so that no line break or space of it looks like ours;
    nothing endless."""
    return quote(path[:200], errors="replace")
