"""One HTTP request and its answer, on bare ASGI. It reads the body within limits of size and rate,
writes the answer with a deadline for each part, and notices when the client leaves. The routes that
generate use one for each request, on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from stretto._validation import NOT_JSON, not_json, read_json, wrong_field
from stretto.config.server import ServerConfig
from stretto.errors import Gone, Invalid
from stretto.server.http.body import TURN_BYTES, Body
from stretto.server.http.trailers import EXTENSION
from stretto.server.loop_time import LoopTurns
from stretto.server.openai.error_body import Refused, describe, respond
from stretto.server.request_log import RequestLog

T = TypeVar("T")
Header = tuple[bytes, bytes]
SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or proxies collect the pieces
)
LINGER_SECONDS = 2.0  # for which a body that is too large is read and thrown away,
LINGER_FACTOR = 4  # and how many times the limit
# the rest of a body that nobody reads must not be taken for the next request
CLOSE = {"connection": "close"}


@dataclass(slots=True)
class Exchange:
    scope: Scope
    receive: Receive
    send: Send
    config: ServerConfig
    request_log: RequestLog
    started: bool = False
    events: bool = False  # the answer is a stream of events, which an error can be one of
    # several answers of one request write to its client: one message after the other
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    # ---- in

    async def read_body(self, body: Body, limit: int, turns: LoopTurns) -> None:
        """All of the request's body. Refuses while reading, not after: a header may lie about the
        length, and a client that sends a byte a second would hold what it has sent for as long as
        it likes. All large bodies take `turns`."""
        headers = Headers(scope=self.scope)
        stated = headers.get("content-length", "")
        if stated.isascii() and stated.isdigit() and int(stated) > limit:
            if "expect" not in headers and int(stated) <= LINGER_FACTOR * limit:
                await self._linger(0, limit)
            raise self._too_large(limit)
        start = asyncio.get_running_loop().time()
        rate = self.config.min_body_kb_s * 1024
        try:
            async with asyncio.timeout(self.config.body_timeout) as deadline:
                more = True
                unturned = 0  # bytes since the last turn
                while more:
                    # What has come may have taken this long at the lowest rate allowed, and a
                    # start-up time.
                    slowest = self.config.body_grace + body.size / rate if rate else float("inf")
                    deadline.reschedule(start + min(self.config.body_timeout, slowest))
                    part, more = await self._part()
                    if body.size + len(part) > limit:
                        await self._linger(body.size + len(part), limit)
                        raise self._too_large(limit)
                    body.add(part)
                    unturned += len(part)
                    if more and body.memfile is not None and unturned >= TURN_BYTES:
                        await turns.take()
                        unturned = 0
        except TimeoutError:
            raise Refused(
                408, "the request took too long to arrive", code="timeout", headers=CLOSE
            ) from None

    async def _part(self) -> tuple[bytes, bool]:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft("the client left while sending")
        return message.get("body", b""), message.get("more_body", False)

    async def _linger(self, size: int, limit: int) -> None:
        """Let a client that sends too much finish, up to a limit: most clients read no answer while
        they send."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                more = True
                while more and size <= LINGER_FACTOR * limit:
                    part, more = await self._part()
                    size += len(part)

    @staticmethod
    def _too_large(limit: int) -> Refused:
        message = f"the request is too large; at most {limit / (1 << 20):g} MiB are allowed"
        return Refused(413, message, code="request_too_large", headers=CLOSE)

    async def watch_client(self) -> None:
        """Raise `ClientLeft` when the client leaves. The body has been read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        raise ClientLeft("the client left")

    # ---- out

    async def start(
        self, status: int, headers: Iterable[Header], trailers: Iterable[bytes] = ()
    ) -> None:
        """`trailers`: names of the fields that `finish` will send, if the client can get them."""
        self.started = True
        announced = [(b"trailer", name) for name in trailers if self._takes_trailers]
        await self._put(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *announced],
                "trailers": bool(announced),
            }
        )

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": more})

    async def finish(self, data: bytes, trailers: Iterable[Header]) -> None:
        """The end of the body, and the fields behind it that `start` has announced."""
        await self.write(data, more=False)
        if self._takes_trailers:
            await self._put({"type": EXTENSION, "headers": list(trailers)})

    @property
    def _takes_trailers(self) -> bool:
        return EXTENSION in (self.scope.get("extensions") or {})

    async def event(self, value: msgspec.Struct) -> None:
        await self.write(b"data: " + _encode(value) + b"\n\n")

    async def start_events(self) -> None:
        self.events = True
        await self.start(200, SSE_HEADERS)

    async def reply(self, value: msgspec.Struct) -> None:
        """The whole answer, as JSON."""
        data = _encode(value)
        length = (b"content-length", str(len(data)).encode())
        await self.start(200, [(b"content-type", b"application/json"), length])
        await self.write(data, more=False)

    async def fail(self, error: Exception) -> None:
        """Tell the client, in whatever way is still open."""
        if not self.started:
            response = respond(error)
            self.started = True
            await response(self.scope, self.receive, self.send)
        elif self.events:
            _, body = describe(error)
            await self.write(b"data: " + _encode(body) + b"\n\n", more=False)
        else:
            # Sound has been sent: only a broken connection says that it is not all of it.
            describe(error)
            raise CutConnection("the answer was cut short") from error

    async def _put(self, message: Message) -> None:
        try:
            async with self._sending, asyncio.timeout(self.config.send_timeout):
                await self.send(message)
        except TimeoutError:
            raise ClientLeft("the client took no data for too long") from None


class ClientLeft(Gone):
    """The client is no longer there, or takes nothing."""


class CutConnection(Exception):
    """Makes the web server cut the connection."""


_encode = msgspec.json.Encoder().encode


SMALL = 4 << 10
raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode(
    data: bytes, decoder: msgspec.json.Decoder[T], longest: Mapping[str, int] | None = None
) -> T:
    """Decode a request from JSON; what is wrong is an `Invalid` that names the field. `longest`:
    how many bytes a field may have at most, checked before anything of it is decoded.

    Of a field that is there many times only the last one is decoded: a number such as 1e-320 takes
    7 us, and 64 KiB hold thousands of them."""
    try:
        if len(data) > SMALL:
            fields = read_json(data, raw_fields.decode)
            check_sizes(fields, longest or {})
            data = _encode(fields)
        return read_json(data, decoder.decode)
    except msgspec.ValidationError as e:
        raise wrong_field(e) from None
    except NOT_JSON as e:
        raise Invalid(not_json(e)) from None


def check_sizes(fields: Mapping[str, msgspec.Raw], longest: Mapping[str, int]) -> None:
    for name, most in longest.items():
        size = len(memoryview(fields[name])) if name in fields else 0
        if size > most:
            raise Invalid(f"{name} has {size:,} bytes, more than the {most:,} allowed", name)
