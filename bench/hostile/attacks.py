"""The attacks of `hostile`, and the process that makes them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

CHAT = "/v1/chat/completions"
Attack = Callable[["Enemy"], Awaitable[None]]


class Enemy:
    """One process of attackers: what it sends, and what it was answered."""

    def __init__(self, port: int, seconds: float, bodies: dict[str, bytes]) -> None:
        self.port, self.until, self.bodies = port, time.monotonic() + seconds, bodies
        self.statuses: Counter[str] = Counter()

    @property
    def going(self) -> bool:
        return time.monotonic() < self.until

    async def send(self, data: bytes, *, leave_after: float | None = None, pause: float = 0.0) -> None:
        """Bare bytes on a connection of its own; what the server answers is counted."""
        try:
            async with asyncio.timeout(min(30.0, max(0.1, self.until - time.monotonic()) + 5.0)):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(data)
                    if pause:
                        await asyncio.sleep(pause)
                    if leave_after is not None:
                        await asyncio.sleep(leave_after)
                        self.statuses["left"] += 1
                        return
                    with suppress(ConnectionError):
                        await writer.drain()
                    line = await reader.readline()
                    self.statuses[line.split(b" ")[1].decode() if line else "closed"] += 1
                finally:
                    writer.close()
        except (TimeoutError, OSError, IndexError) as e:
            self.statuses[type(e).__name__] += 1

    def post(self, body: bytes | str, extra: str = "") -> bytes:
        """A request with this body, or with the one of this name."""
        if isinstance(body, str):
            body = self.bodies[body]
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{extra}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def ask(content: Any, **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}).encode()


def letters(count: int) -> str:
    return "".join(random.choices("etaoin shrdlu", k=count))


def described(size: int) -> bytes:
    tool = {"type": "function", "function": {"name": "f", "description": letters(size), "parameters": {}}}
    return ask("hi", tools=[tool])


async def nested(e: Enemy) -> None:
    """16 MiB of `[{}],`."""
    await e.send(e.post("nested"))


async def nested_elsewhere(e: Enemy) -> None:
    """The same in a field that nobody reads."""
    await e.send(e.post(ask("hi")[:-1] + b',"metadata":[' + b"[{}]," * (100_000) + b"0]}"))


async def tools(e: Enemy) -> None:
    """Descriptions of 1 and 8 MiB."""
    for name in ("tool of 1 MiB", "tool of 8 MiB"):
        await e.send(e.post(name))


def sound() -> bytes:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, np.zeros(15 << 20, np.int16), 16_000, format="WAV", subtype="PCM_16")
    data = base64.b64encode(out.getvalue()).decode()
    return ask([{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}])


async def upload(e: Enemy) -> None:
    """A valid sound of 40 MiB."""
    await e.send(e.post("sound"))


async def text(e: Enemy) -> None:
    """900,000 characters."""
    await e.send(e.post("text"))


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


BODIES: dict[str, Callable[[], bytes]] = {
    "nested": lambda: b'{"messages":[' + b"[{}]," * ((16 << 20) // 5) + b"0]}",
    "tool of 1 MiB": lambda: described(1 << 20),
    "tool of 8 MiB": lambda: described(8 << 20),
    "text": lambda: ask(letters(900_000)),
    "sound": sound,
    "video": video,
    "pictures": lambda: pictures(7000, 4),  # as many pixels as are taken
    "a large picture": lambda: pictures(2700, 1),  # as large as the model takes
}
"""Made once, before the listeners come: attackers stand for other machines, so that making them must cost this one
nothing while it is measured."""


async def videos(e: Enemy) -> None:
    await asyncio.gather(*(e.send(e.post("video")) for _ in range(4)))


async def media(e: Enemy) -> None:
    await asyncio.gather(*(e.send(e.post("pictures")) for _ in range(4)))


async def large_pictures(e: Enemy) -> None:
    """One that is answered, if they wait for it, and three that leave when it is on its way to the encoder."""
    large = e.post("a large picture")
    await asyncio.gather(e.send(large), *(e.send(large, leave_after=3.0) for _ in range(3)))


async def leavers(e: Enemy) -> None:
    """Ten that send a video or pictures and leave."""
    bodies = ("video", "pictures")
    await asyncio.gather(*(e.send(e.post(bodies[i % 2]), leave_after=0.3) for i in range(10)))


async def slow_bodies(e: Enemy) -> None:
    """64 that begin to send a body and then stop."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    await asyncio.gather(*(e.send(f"{head}Content-Length: 60000\r\n\r\n{{".encode()) for _ in range(64)))


async def pieces(e: Enemy) -> None:
    """Bodies in chunks of one byte, from four at once."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    chunks = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\n \r\n" * 700_000
    await asyncio.gather(*(e.send(chunks) for _ in range(4)))


async def frames(e: Enemy) -> None:
    """Empty fragments of one message on a WebSocket, and pings, as fast as they are taken."""
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    hello = f"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\n{upgrade}{key}\r\n".encode()
    first, fragment, ping = (bytes([head, 0x80]) + bytes(4) for head in (0x01, 0x00, 0x89))
    for flood in (first + fragment * 300_000, ping * 300_000):
        with suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            async with asyncio.timeout(max(0.1, e.until - time.monotonic()) + 5.0):
                reader, writer = await asyncio.open_connection("127.0.0.1", e.port)
                writer.write(hello)
                e.statuses[(await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()] += 1
                writer.write(flood)
                await writer.drain()
                writer.close()


async def headers(e: Enemy) -> None:
    """64 MiB of headers."""
    line = b"X-A: " + b"a" * 8000 + b"\r\n"
    await e.send(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n" + line * ((64 << 20) // len(line)))


async def silent(e: Enemy) -> None:
    """300 connections that say nothing."""
    await asyncio.gather(*(e.send(b"", leave_after=2.0) for _ in range(300)))


async def strangers(e: Enemy) -> None:
    """What a page of another origin can send, bad hosts, and a handshake for a WebSocket."""
    await e.send(e.post(ask("hi"), "Origin: https://evil.example\r\n"))
    await e.send(e.post(ask("hi")).replace(b"application/json", b"text/plain"))
    await e.send(e.post(ask("hi")).replace(b"Host: 127.0.0.1", b"Host: evil.example"))
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    await e.send(f"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\n{upgrade}{key}\r\n".encode())
    await e.send(os.urandom(4096))


ATTACKS: dict[str, Attack] = {
    f.__name__: f
    for f in (nested, nested_elsewhere, tools, upload, text, videos, media, large_pictures,
              leavers, slow_bodies, pieces, frames, headers, silent, strangers)
}  # fmt: skip


async def control(e: Enemy) -> None:
    """Load of the same kind that no server should mind: large answers are read from another process's socket."""
    data = os.urandom(1 << 20)
    for _ in range(20):
        base64.b64encode(data)
        await asyncio.sleep(0)
    await e.send(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")


async def attack(port: int, names: list[str], seconds: float, folder: Path) -> dict[str, Any]:
    enemy = Enemy(port, seconds, {name: (folder / name).read_bytes() for name in BODIES})
    rounds: Counter[str] = Counter()

    async def keep_on(name: str) -> None:
        while enemy.going:
            await (control if name == "control" else ATTACKS[name])(enemy)
            rounds[name] += 1
            await asyncio.sleep(0.05)

    await asyncio.gather(*(keep_on(n) for n in names))
    return {"answers": dict(enemy.statuses), "rounds": dict(rounds)}
