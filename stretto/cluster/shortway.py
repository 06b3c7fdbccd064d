"""A request's short way through a Serve replica: from its HTTP server to our application, with nothing between them
but Serve's own counting.

Serve's ordinary way reads the headers several times, makes two tasks and a queue for each request, so that it can
cancel an application that does not look whether its client is there, and sets a context for calls to other deployments.
Ours looks, and makes no such calls. All of that comes before the application is called, and takes longer than HAProxy.
So the replica's entry is replaced when the application starts (`app.py` does so), which is before the replica's server
does. The short way takes a slot, counts, logs and measures by Serve's own functions. What it has no answer for takes
the ordinary way: WebSockets, Serve's own paths, requests with a time limit, and those for which no slot is free, which
Serve lets wait or refuses.

Most names here are not API: they are checked once, and where one is missing or has another shape all requests take the
ordinary way. Runs on the replica's event loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.cluster.inside import own_replica

log = logging.getLogger(__name__)

ENTRY = "_direct_ingress_asgi"
SHAPES = MappingProxyType(
    {
        ENTRY: ("scope", "receive", "send"),
        "_start_request": ("request_metadata",),
        "_handle_errors_and_metrics": ("request_metadata",),
        "_parse_request_timeout": ("headers",),
        "_determine_http_route": ("scope",),
    }
)
"""Methods of a replica that are called, and their parameters."""
VALUES = ("_event_loop", "_route_prefix", "_semaphore")
OWN_PATHS = "/-/"  # Serve's: health and routes
REQUEST_ID = b"x-request-id"  # Serve's middleware has set it
ORDINARY = "requests take Serve's ordinary way, which makes first bytes some 0.2 ms later: %s"


class Unlike(Exception):
    """Why there is no short way here."""


@dataclass(slots=True)
class Call:
    """One request and its answer, looked at as they pass."""

    receive: Receive
    send: Send
    set_status: Callable[[str], None]
    whole: bool = False  # all of the answer is sent
    left: bool = False  # the client did not wait for that

    async def hear(self) -> Message:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            self.left = not self.whole
        return message

    async def tell(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.set_status(str(message["status"]))
        await self.send(message)
        if message["type"] == "http.response.body":
            self.whole = not message.get("more_body", False)


@dataclass(frozen=True, slots=True)
class ShortWay:
    replica: Any
    app: ASGIApp
    ordinary: ASGIApp
    metadata: Callable[[], Any]  # what Serve knows about a request, with nothing filled in
    client: Callable[[Any], str]  # an address as Serve writes it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._fits(scope):
            await self.ordinary(scope, receive, send)
            return
        asked, metadata = dict(scope), self.metadata()  # routing changes the scope
        with self.replica._handle_errors_and_metrics(metadata) as set_status:
            async with self.replica._start_request(metadata):
                call = Call(receive, send, set_status)
                try:
                    await self.app(scope, call.hear, call.tell)
                finally:
                    self._describe(metadata, asked)
                if call.left:  # told as by Serve's ordinary way
                    set_status("499")
                    raise asyncio.CancelledError

    def _fits(self, scope: Scope) -> bool:
        return (
            scope["type"] == "http"
            and self.replica._route_prefix == "/"
            and not scope.get("root_path")
            and not scope["path"].startswith(OWN_PATHS)
            and not self.replica._semaphore.locked()
            and self.replica._parse_request_timeout(dict(scope["headers"])) is None
        )

    def _describe(self, metadata: Any, asked: Scope) -> None:
        """For the log and the metrics, which come when all is sent: nobody waits for it."""
        metadata.request_id = dict(asked["headers"]).get(REQUEST_ID, b"").decode("latin-1")
        metadata.route = self.replica._determine_http_route(asked)
        metadata._http_method = asked["method"]
        metadata._client = self.client(asked.get("client"))


def shorten(app: ASGIApp) -> bool:
    """Let requests take the short way to `app`; False where there is none. Called on the loop that the application runs
    in, before the replica's server starts."""
    replica = own_replica()
    try:
        check(replica)
        way = short_way(replica, app)
    except (Unlike, ImportError, TypeError) as e:
        log.warning(ORDINARY, e)
        return False
    setattr(replica, ENTRY, way)
    return True


def check(replica: Any) -> None:
    """Raises when the replica is not as it is expected here."""
    if replica is None:
        raise Unlike("no replica was found")
    for name, expected in SHAPES.items():
        method = getattr(replica, name, None)
        if not callable(method) or tuple(inspect.signature(method).parameters) != expected:
            raise Unlike(f"the replica has no {name}({', '.join(expected)})")
    for name in VALUES:
        if not hasattr(replica, name):
            raise Unlike(f"the replica has no {name}")
    if replica._event_loop is not asyncio.get_running_loop():
        raise Unlike("the application does not run in the replica's own loop")


def short_way(replica: Any, app: ASGIApp) -> ShortWay:
    from ray.serve._private.common import RequestMetadata, RequestProtocol
    from ray.serve._private.logging_utils import format_client_address
    from ray.serve._private.tracing_utils import is_tracing_enabled

    if is_tracing_enabled():
        raise Unlike("Serve shall trace them")
    http = RequestProtocol.HTTP
    empty = partial(RequestMetadata, "", "", is_streaming=True, _request_protocol=http, is_direct_ingress=True)
    empty()  # a TypeError, if it has other fields
    return ShortWay(replica, app, getattr(replica, ENTRY), empty, format_client_address)
