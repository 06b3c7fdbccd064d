"""The attacks of `floods`, and the process that makes them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PART_BYTES = 256 << 10
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
Attack = Callable[["Enemy"], Awaitable[None]]


@dataclass(slots=True)
class Enemy:
    """One kind of attack: what it sends, and what it was answered."""

    port: int
    until: float  # by time.monotonic()
    bodies: dict[str, bytes]
    rounds: int = 0
    connections: int = 0
    bytes: int = 0  # that the server's side took, into its sockets at least
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def going(self) -> bool:
        return time.monotonic() < self.until

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        streams = await asyncio.open_connection("127.0.0.1", self.port)
        self.connections += 1
        return streams

    async def write(self, writer: asyncio.StreamWriter, *data: bytes) -> None:
        """Part by part, as fast as the server takes them, and count them. Nothing is copied on the
        way."""
        writer.transport.set_write_buffer_limits(0)
        for view in map(memoryview, data):
            for at in range(0, len(view), PART_BYTES):
                part = view[at : at + PART_BYTES]
                writer.write(part)
                await writer.drain()
                self.bytes += len(part)

    async def send(self, *data: bytes, leave_after: float | None = None) -> None:
        """Bare bytes on a connection of its own; what the server answers is counted."""
        try:
            async with asyncio.timeout(min(30.0, max(0.1, self.until - time.monotonic()) + 5.0)):
                reader, writer = await self.connect()
                try:
                    self.statuses[await self._answer(reader, writer, data, leave_after)] += 1
                finally:
                    writer.close()
        except (TimeoutError, OSError, IndexError) as e:
            self.statuses[type(e).__name__] += 1

    async def _answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        data: Sequence[bytes],
        leave_after: float | None,
    ) -> str:
        if leave_after is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(leave_after):
                    await self.write(writer, *data)
                    await asyncio.sleep(leave_after)
            return "left"
        with suppress(ConnectionError):
            await self.write(writer, *data)
        line = await reader.readline()
        return line.split(b" ")[1].decode() if line else "closed"

    async def post(self, name: str, leave_after: float | None = None) -> None:
        """A request with the body of this name."""
        body = self.bodies[name]
        await self.send(head(body), body, leave_after=leave_after)


def head(body: bytes) -> bytes:
    return f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode()


def ask(content: Any, **more: Any) -> bytes:
    return json.dumps(
        {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}
    ).encode()


def letters(count: int) -> str:
    return "".join(random.choices("etaoin shrdlu", k=count))


def described(size: int) -> bytes:
    tool = {
        "type": "function",
        "function": {"name": "f", "description": letters(size), "parameters": {}},
    }
    return ask("hi", tools=[tool])


async def nested(e: Enemy) -> None:
    """16 MiB of `[{}],`."""
    await e.post("nested")


async def nested_elsewhere(e: Enemy) -> None:
    """The same in a field that nobody reads."""
    await e.post("nested elsewhere")


async def tools(e: Enemy) -> None:
    """Descriptions of 1 and 8 MiB."""
    for name in ("tool of 1 MiB", "tool of 8 MiB"):
        await e.post(name)


def sound() -> bytes:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, np.zeros(15 << 20, np.int16), 16_000, format="WAV", subtype="PCM_16")
    data = base64.b64encode(out.getvalue()).decode()
    return ask([{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}])


async def upload(e: Enemy) -> None:
    """A valid sound of 40 MiB."""
    await e.post("sound")


async def text(e: Enemy) -> None:
    """900,000 characters."""
    await e.post("text")


def video() -> bytes:
    """30 kB that are 1,000 frames of 2048 x 2048."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width = stream.height = 2048
        stream.pix_fmt = "yuv420p"
        stream.gop_size = 1000
        frame = av.VideoFrame.from_ndarray(np.zeros((2048, 2048, 3), np.uint8), format="rgb24")
        for i in range(1000):
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    url = "data:video/mp4;base64," + base64.b64encode(out.getvalue()).decode()
    return ask([{"type": "video_url", "video_url": {"url": url}}])


def pictures(side: int, count: int) -> bytes:
    """White pixels, in a few kB each."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("L", (side, side), 255).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return ask([{"type": "image_url", "image_url": {"url": url}}] * count)


def frame(kind: int) -> bytes:
    """Of a WebSocket, with nothing in it."""
    return bytes([kind, 0x80]) + bytes(4)


BODIES: dict[str, Callable[[], bytes]] = {
    "nested": lambda: b'{"messages":[' + b"[{}]," * ((16 << 20) // 5) + b"0]}",
    "nested elsewhere": lambda: ask("hi")[:-1] + b',"metadata":[' + b"[{}]," * 100_000 + b"0]}",
    "tool of 1 MiB": lambda: described(1 << 20),
    "tool of 8 MiB": lambda: described(8 << 20),
    "text": lambda: ask(letters(900_000)),
    "sound": sound,
    "video": video,
    "pictures": lambda: pictures(7000, 4),  # as many pixels as are taken
    "a large picture": lambda: pictures(2700, 1),  # as large as the model takes
    "chunks": lambda: b"1\r\n \r\n" * 700_000,
    "fragments": lambda: frame(0x01) + frame(0x00) * 300_000,
    "pings": lambda: frame(0x89) * 300_000,
    "a MiB of headers": lambda: (b"X-A: " + b"a" * 8000 + b"\r\n") * 131,
}
"""Made once, before the listeners come: attackers stand for other machines, so that making them
must cost this one nothing while it is measured."""


async def videos(e: Enemy) -> None:
    await asyncio.gather(*(e.post("video") for _ in range(4)))


async def media(e: Enemy) -> None:
    await asyncio.gather(*(e.post("pictures") for _ in range(4)))


async def large_pictures(e: Enemy) -> None:
    """One that is answered, if they wait for it, and three that leave when it is on its way to the
    encoder."""
    large = "a large picture"
    await asyncio.gather(e.post(large), *(e.post(large, leave_after=3.0) for _ in range(3)))


async def leavers(e: Enemy) -> None:
    """Ten that send a video or pictures and leave."""
    bodies = ("video", "pictures")
    await asyncio.gather(*(e.post(bodies[i % 2], leave_after=0.3) for i in range(10)))


async def slow_bodies(e: Enemy) -> None:
    """64 that begin to send a body and then stop."""
    await asyncio.gather(
        *(e.send(f"{HEAD}Content-Length: 60000\r\n\r\n{{".encode()) for _ in range(64))
    )


async def pieces(e: Enemy) -> None:
    """Bodies in chunks of one byte, from four at once."""
    chunked = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
    await asyncio.gather(*(e.send(chunked, e.bodies["chunks"]) for _ in range(4)))


async def frames(e: Enemy) -> None:
    """Empty fragments of one message on a WebSocket, and pings, as fast as they are taken."""
    for flood in ("fragments", "pings"):
        with suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            async with asyncio.timeout(max(0.1, e.until - time.monotonic()) + 5.0):
                reader, writer = await e.connect()
                writer.write(HANDSHAKE)
                e.statuses[(await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()] += 1
                await e.write(writer, e.bodies[flood])
                writer.close()


async def headers(e: Enemy) -> None:
    """64 MiB of headers."""
    lines = e.bodies["a MiB of headers"]
    await e.send(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n", *[lines] * 64)


async def silent(e: Enemy) -> None:
    """300 connections that say nothing."""
    await asyncio.gather(*(e.send(b"", leave_after=2.0) for _ in range(300)))


async def strangers(e: Enemy) -> None:
    """What a page of another origin can send, bad hosts, and a handshake for a WebSocket."""
    hi = ask("hi")
    request = head(hi) + hi
    await e.send(request.replace(b"Host:", b"Origin: https://evil.example\r\nHost:"))
    await e.send(request.replace(b"application/json", b"text/plain"))
    await e.send(request.replace(b"Host: 127.0.0.1", b"Host: evil.example"))
    await e.send(HANDSHAKE)
    await e.send(os.urandom(4096))


ATTACKS: dict[str, Attack] = {
    f.__name__: f
    for f in (nested, nested_elsewhere, tools, upload, text, videos, media, large_pictures,
              leavers, slow_bodies, pieces, frames, headers, silent, strangers)
}  # fmt: skip


async def control(e: Enemy) -> None:
    """Load of the same kind that no server should mind: large answers are read from another
    process's socket."""
    data = os.urandom(1 << 20)
    for _ in range(20):
        base64.b64encode(data)
        await asyncio.sleep(0)
    await e.send(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")


async def attack(
    port: int, names: list[str], seconds: float, bodies: dict[str, bytes]
) -> dict[str, Any]:
    until, before = time.monotonic() + seconds, time.process_time()

    async def keep_on(name: str) -> Enemy:
        enemy = Enemy(port, until, bodies)
        while enemy.going:
            await (control if name == "control" else ATTACKS[name])(enemy)
            enemy.rounds += 1
            await asyncio.sleep(0.05)
        return enemy

    enemies = dict(zip(names, await asyncio.gather(*(keep_on(n) for n in names)), strict=True))
    return {
        "answers": dict(sum((e.statuses for e in enemies.values()), Counter())),
        "rounds": {name: e.rounds for name, e in enemies.items()},
        "connections": {name: e.connections for name, e in enemies.items()},
        "bytes": {name: e.bytes for name, e in enemies.items()},
        "cpu_s": time.process_time() - before,
    }


def step_back() -> None:
    """Of all processes, this one comes last: attackers stand for other machines. Linux shares cores
    out between sessions first, so that priorities count within one only: this one's session gets
    the least weight, too."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # no Linux, or one without autogroups
        Path("/proc/self/autogroup").write_text("19")
