"""HTTP and WebSockets on bare sockets: a client library costs more than what is measured, and
refuses to do what an attacker does. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

PART_BYTES = 256 << 10
FAILURES = (
    OSError,
    EOFError,
    ValueError,
    IndexError,
)  # of a connection that ended, or said something else


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Http:
    """A connection. One request at a time; it stays open between them."""

    port: int
    key: str = ""
    limit: int = 1 << 20
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port, limit=self.limit)
        return self._streams

    def head(self, method: str, path: str, size: int, content_type: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}"]
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        lines += (
            [f"Content-Type: {content_type}", f"Content-Length: {size}"] if method != "GET" else []
        )
        return "\r\n".join([*lines, "\r\n"]).encode()

    async def send(
        self,
        method: str,
        path: str,
        parts: Sequence[bytes],
        content_type: str,
        stated: int | None = None,
    ) -> None:
        """The request; `stated` is the length that its header gives, if that is not its own."""
        _, writer = await self.open()
        size = sum(map(len, parts)) if stated is None else stated
        writer.write(self.head(method, path, size, content_type))
        for part in parts:
            await write(writer, part)
        await writer.drain()

    async def begin(self) -> Answer:
        """The status and the headers of the answer."""
        reader, _ = await self.open()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        return Answer(int(lines[0].split(" ")[1]), headers)

    async def pieces(self, answer: Answer) -> AsyncIterator[bytes]:
        """The answer's body as it comes."""
        reader, _ = await self.open()
        if "content-length" in answer.headers:
            yield await reader.readexactly(int(answer.headers["content-length"]))
        elif answer.headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                yield (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            yield await reader.read()
            self.close()
        if answer.headers.get("connection") == "close":
            self.close()

    async def request(
        self, method: str, path: str, *parts: bytes, content_type: str = "application/json"
    ) -> Answer:
        await self.send(method, path, parts, content_type)
        answer = await self.begin()
        answer.body = b"".join([piece async for piece in self.pieces(answer)])
        return answer

    async def post(self, path: str, body: Any) -> Answer:
        return await self.request(
            "POST", path, body if isinstance(body, bytes) else json.dumps(body).encode()
        )

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def __aenter__(self) -> Http:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


async def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Part by part, as fast as the other side takes them; nothing is copied on the way."""
    writer.transport.set_write_buffer_limits(0)
    view = memoryview(data)
    for at in range(0, len(view), PART_BYTES):
        writer.write(view[at : at + PART_BYTES])
        await writer.drain()


# ---- WebSockets


TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
FIN, MASKED = 0x80, 0x80


class Refused(Exception):
    """The handshake was answered with a status other than 101."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status} {body[:300].decode(errors='replace')}")
        self.status = status


class Failed(ValueError):
    """The server said that something was wrong: its code, or its words."""

    def __init__(self, event: dict[str, Any]) -> None:
        error = event.get("error") or {}
        super().__init__(f"error {error.get('code') or error.get('message') or event}"[:300])


class Closed(EOFError):
    """The other side closed the WebSocket."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"{code} {words}")
        self.code = code


def frame(kind: int, size: int, *, last: bool = True) -> bytes:
    """The head of a frame of a client. Its mask is zeros, so the bytes that follow are sent as they
    are."""
    first = kind | (FIN if last else 0)
    if size < 126:
        return bytes([first, MASKED | size]) + bytes(4)
    if size < 1 << 16:
        return struct.pack(">BBH", first, MASKED | 126, size) + bytes(4)
    return struct.pack(">BBQ", first, MASKED | 127, size) + bytes(4)


@dataclass(slots=True)
class Socket:
    """A WebSocket after its handshake."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: int = 0  # bytes
    kinds: dict[str, int] = field(default_factory=dict)  # of events, by type

    async def send(self, event: Any) -> None:
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        self.writer.write(frame(TEXT, len(data)))
        await write(self.writer, data)

    async def receive(self) -> bytes | dict[str, Any]:
        """The next message: bytes, or an event. Raises `Closed` at the end."""
        parts, kind = b"", 0
        while True:
            first, size = await self.reader.readexactly(2)
            if size >= 126:
                size = int.from_bytes(await self.reader.readexactly(2 if size == 126 else 8))
            data = await self.reader.readexactly(size)
            self.received += size
            match first & 15:
                case 8:
                    raise Closed(int.from_bytes(data[:2]), data[2:].decode(errors="replace"))
                case 9:
                    self.writer.write(frame(PONG, len(data)) + data)
                    continue
                case 10:
                    continue
            kind, parts = kind or first & 15, parts + data
            if first & FIN:
                break
        if kind == BINARY:
            return parts
        event: dict[str, Any] = json.loads(parts)
        self.kinds[event.get("type", "")] = self.kinds.get(event.get("type", ""), 0) + 1
        return event

    async def until(self, *kinds: str) -> dict[str, Any]:
        """The next event of one of these kinds; others before it are dropped. An error is `Failed`
        unless it is one of them."""
        while True:
            event = await self.receive()
            if isinstance(event, dict) and event.get("type") in kinds:
                return event
            if isinstance(event, dict) and event.get("type") == "error":
                raise Failed(event)

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def websocket(
    port: int, path: str, key: str = "", limit: int = 1 << 21
) -> AsyncIterator[Socket]:
    socket = await connect(port, path, key, limit)
    try:
        yield socket
    finally:
        socket.close()


async def connect(port: int, path: str, key: str = "", limit: int = 1 << 21) -> Socket:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Connection: Upgrade",
        "Upgrade: websocket",
    ]
    lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    lines += [f"Authorization: Bearer {key}"] if key else []
    writer.write("\r\n".join([*lines, "\r\n"]).encode())
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ")[1])
        if status != 101:
            raise Refused(status, await reader.read(2000))
    except BaseException:
        writer.close()
        raise
    return Socket(reader, writer)
