"""Trailers: header fields behind the body of an answer, for what is only known when all of a
streamed answer was sent. uvicorn has not got the ASGI extension `http.response.trailers`;
`connection.py` wraps the app in `WithTrailers` for each request of HTTP/1.1, on the event loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "http.response.trailers"


@dataclass(slots=True, eq=False)
class WithTrailers:
    """An app that may send trailers: the answer to one request."""

    app: ASGIApp
    cycle: RequestResponseCycle
    announced: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {EXTENSION: {}}
        await self.app(scope, receive, partial(self._pass_on, send))

    async def _pass_on(self, send: Send, message: Message) -> None:
        if message["type"] == EXTENSION:
            await self._send_trailers(message, send)
        elif message["type"] == "http.response.start":
            self.announced = message.get("trailers", False)
            await send(message)
        elif self.announced and not message.get("more_body", False):
            await send({**message, "more_body": True})  # the trailers end it
        else:
            await send(message)

    async def _send_trailers(self, message: Message, send: Send) -> None:
        """The last chunk is written here: the cycle would close it without any fields."""
        fields = b"".join(name + b": " + value + b"\r\n" for name, value in message["headers"])
        end = b"0\r\n" + fields + b"\r\n"
        self.cycle.chunked_encoding = False
        self.cycle.expected_content_length = len(end)
        await send({"type": "http.response.body", "body": end})
