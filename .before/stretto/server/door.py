"""The first thing a request meets and the last: who may come in, ids, the log line, the numbers. An ASGI middleware.

Everything is checked before a byte of the body is read: the name the server was called by, the page that calls, the
key, the body's type. Only HTTP passes; a WebSocket is denied until there is a route that takes one."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.server.exchange import VISIT, Broken, Visit
from stretto.server.failures import Refused, respond
from stretto.server.origins import Callers, check_json, preflight_headers
from stretto.server.service import Service
from stretto.types import RequestId

log = logging.getLogger("stretto.access")

_FINE_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_QUIET = {"health", "live", "metrics", "page", "preflight"}  # asked every few seconds; worth a line only when debugging


class Door:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        self.callers = Callers.of(service.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        headers = Headers(scope=scope)
        ours = RequestId(f"req-{secrets.token_hex(12)}")
        theirs = headers.get("x-request-id", "")
        # A client's id is for its own logs: it may repeat, so nothing in here hangs on it.
        visit = Visit(ours, theirs if _FINE_ID.fullmatch(theirs) else str(ours), time.perf_counter())
        scope[VISIT] = visit
        added = [(b"x-request-id", visit.client_id.encode())]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            host = self.callers.check_host(headers)
            origin = headers.get("origin", "")
            added += self.callers.shares(origin, host, scope["scheme"])
            app = self._admit(scope, headers, origin, host)
            await app(scope, receive, send_with_id)
        except Refused as e:
            await respond(e)(scope, receive, send_with_id)
        except Broken:
            visit.ended = visit.ended or "broken"
            raise
        finally:
            self._record(scope, visit)

    def _admit(self, scope: Scope, headers: Headers, origin: str, host: str) -> ASGIApp:
        """What answers this request, if it may be answered."""
        visit: Visit = scope[VISIT]
        api = is_api(scope)
        preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        if origin and (api or preflight):
            self.callers.check_origin(origin, host, scope["scheme"])
        if preflight:
            visit.route = "preflight"
            return Response(status_code=200, headers=preflight_headers(headers))
        if api and scope["method"] != "OPTIONS":
            visit.owner = self.service.keys.owner(headers)
            if scope["method"] == "POST":
                check_json(headers)
        return self.app

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app's own start and end pass. A WebSocket gets an answer in HTTP, nothing else gets any."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # websocket.connect
            await respond(Refused(404, "there is no WebSocket here", code="not_found"))(scope, receive, send)
        else:
            raise ValueError(f"no requests of type {scope['type']!r} are taken")

    def _record(self, scope: Scope, visit: Visit) -> None:
        self.service.metrics.record(visit)
        level = logging.DEBUG if visit.route in _QUIET else logging.INFO
        if log.isEnabledFor(level):
            fields = facts(scope, visit)
            log.log(level, " ".join(f"{k}={v}" for k, v in fields.items()), extra={"fields": fields})


def is_api(scope: Scope) -> bool:
    """Only /v1 is guarded: probes, metrics and the page's files are open."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == "/v1" or path.startswith("/v1/")


def facts(scope: Scope, visit: Visit) -> dict[str, str | int | float]:
    """What a log line says about a request."""
    out: dict[str, str | int | float] = {"id": str(visit.request_id)}
    if visit.client_id != visit.request_id:
        out["client_id"] = visit.client_id
    out |= {"method": scope["method"], "path": _shown(scope["path"]), "status": visit.status}
    if visit.owner:
        out["key"] = visit.owner
    for name, seconds in (("first_text_ms", visit.first_text), ("first_audio_ms", visit.first_audio)):
        if seconds is not None:
            out[name] = round(1000 * seconds, 1)
    if visit.num_tokens:
        out["tokens"] = visit.num_tokens
    if visit.rtf is not None:
        out |= {"audio_s": round(visit.audio_seconds, 2), "rtf": round(visit.rtf, 3)}
    if visit.underrun:
        out["underrun_ms"] = round(1000 * visit.underrun, 1)
    if visit.ended:
        out["ended"] = visit.ended
    out["ms"] = round(1000 * visit.elapsed(), 1)
    return out


def _shown(path: str) -> str:
    """A path is a client's text: no line breaks, nothing endless."""
    return path[:200].encode("unicode_escape").decode()
