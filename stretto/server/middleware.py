"""The outermost ASGI middleware. It decides who may call, gives each request an id and a
`RequestLog`, and writes the log line and the metrics when the request is over. `app.py` puts it
around the routes.

It checks the host name, the origin, the API key and the body's type before a byte of the body is
read. It lets WebSockets through to the routes that take them, and refuses others before the
upgrade, by HTTP."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.observe.trace_records import TraceContext
from stretto.server.access_log import facts, write_line
from stretto.server.http.websocket import INCOMING
from stretto.server.keys import key_in
from stretto.server.openai.error_body import Refused, respond
from stretto.server.openai.live_speech import PATH as LIVE_SPEECH
from stretto.server.origins import Callers, check_json, preflight_headers
from stretto.server.realtime.client_secrets import CLIENT_SECRET
from stretto.server.realtime.endpoint import PATHS as REALTIME
from stretto.server.request_log import REQUEST_LOG, RequestLog
from stretto.server.service import Service
from stretto.server.shares import client_of_address
from stretto.server.tracing import request_record
from stretto.types import RequestId

QUEUED = b"x-queue-wait-ms"  # how long a request waited for its turn
_FINE_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
# how a page's WebSocket, which cannot set headers, brings its key
_KEY_PROTOCOL = "openai-insecure-api-key."
# routes that are called every few seconds; their log lines are for debugging
_QUIET = {"health", "live", "metrics", "page", "preflight"}


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
        request_log = self._new_log(scope, headers)
        added = [(b"x-request-id", request_log.client_id.encode())]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                request_log.status = message["status"]
                if request_log.queued is not None:
                    added.append((QUEUED, f"{1000 * request_log.queued:.1f}".encode()))
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            host = self.callers.check_host(headers)
            origin = headers.get("origin", "")
            added += self.callers.cors_headers(origin, host, scope["scheme"])
            app = self._admit(scope, headers, origin, host)
            await app(scope, receive, send_with_id)
        except Refused as e:
            await respond(e)(scope, receive, send_with_id)
        except BaseException:
            request_log.ended = request_log.ended or "broken"
            raise
        finally:
            self._record(scope, request_log)

    def _admit(self, scope: Scope, headers: Headers, origin: str, host: str) -> ASGIApp:
        """What answers this request, if it may be answered."""
        request_log: RequestLog = scope[REQUEST_LOG]
        path = path_of(scope)
        # Probes, metrics and the page's files are open.
        api = path == "/v1" or path.startswith("/v1/")
        preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        if origin and (api or preflight):
            self.callers.check_origin(origin, host, scope["scheme"])
        if preflight:
            request_log.route = "preflight"
            return Response(status_code=200, headers=preflight_headers(headers))
        if api and scope["method"] != "OPTIONS":
            self._identify(request_log, scope, self.service.keys.owner(headers))
            session = headers.get("x-session-id", "")
            request_log.session = (
                f"{request_log.owner}/{session}" if _FINE_ID.fullmatch(session) else None
            )
            if scope["method"] == "POST":
                request_log.content_type = headers.get("content-type", "")
                check_json(headers, path)
        return self.app

    def _identify(self, request_log: RequestLog, scope: Scope, owner: str) -> None:
        """Record whose request it is, and with whom it shares limits."""
        request_log.owner = owner
        if self.service.keys.needed:
            request_log.client = owner
        else:
            address = str((scope.get("client") or ("",))[0])
            request_log.client = client_of_address(address)

    def _socket_owner(self, scope: Scope, headers: Headers) -> str:
        """The owner of the API key that a WebSocket brings, or of the client secret instead."""
        other_key = _other_key(scope)
        if path_of(scope) in REALTIME:
            secret = self.service.secrets.find(key_in(headers) or other_key or "")
            if secret is not None and self.service.keys.still_valid(secret.owner):
                scope[CLIENT_SECRET] = secret
                return secret.owner
        return self.service.keys.owner(headers, other_key)

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
        request_log = self._new_log(scope, headers)

        async def send_with_status(message: Message) -> None:
            if message["type"] == "websocket.accept":
                request_log.status = 101
            elif message["type"] == "websocket.http.response.start":
                request_log.status = message["status"]
            await send(message)

        try:
            host = self.callers.check_host(headers)
            if path_of(scope) not in (*REALTIME, LIVE_SPEECH):
                raise Refused(404, "there is no WebSocket here", code="not_found")
            if origin := headers.get("origin", ""):
                self.callers.check_origin(
                    origin, host, "https" if scope["scheme"] == "wss" else "http"
                )
            self._identify(request_log, scope, self._socket_owner(scope, headers))
            incoming = scope.get(INCOMING)
            if incoming is not None:  # absent where another web server, as Ray's, has the socket
                incoming.belong_to(request_log.client)
            await self.app(scope, receive, send_with_status)
        except Refused as e:
            await receive()  # websocket.connect
            await respond(e)(scope, receive, send_with_status)
        except BaseException:
            request_log.ended = request_log.ended or "broken"
            raise
        finally:
            self._record(scope, request_log)

    def _new_log(self, scope: Scope, headers: Headers) -> RequestLog:
        ours = RequestId(f"req-{secrets.token_hex(12)}")
        theirs = headers.get("x-request-id", "")
        # A client's id is for its own logs: it may repeat, so nothing here depends on it.
        request_log = RequestLog(
            ours, theirs if _FINE_ID.fullmatch(theirs) else str(ours), time.perf_counter()
        )
        if self.service.tracer is not None:
            request_log.trace = TraceContext.of(
                headers.get("traceparent", ""), headers.get("tracestate", "")
            )
        scope[REQUEST_LOG] = request_log
        return request_log

    def _record(self, scope: Scope, request_log: RequestLog) -> None:
        self.service.metrics.record(request_log)
        level = logging.DEBUG if request_log.route in _QUIET else logging.INFO
        write_line(level, lambda: facts(scope, request_log))
        tracer = self.service.tracer
        if tracer is not None and request_log.trace is not None and level == logging.INFO:
            tracer.put(request_record(scope, request_log, request_log.trace))


def path_of(scope: Scope) -> str:
    """The path of a request below the server's root path."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


def _other_key(scope: Scope) -> str | None:
    """A key that came among the subprotocols or in the query."""
    for name in scope.get("subprotocols", ()):
        if name.startswith(_KEY_PROTOCOL):
            return str(name.removeprefix(_KEY_PROTOCOL)) or None
    return QueryParams(scope.get("query_string", b"")).get("api-key")
