"""A server whose engine holds requests until a test lets them go on."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from tests.server.asks import CHAT, SOUND
from tests.server.conftest import HEAD, PATIENCE_S, read_until, serve
from tests.server.scripted_engine import ScriptedEngine


class HeldServer:
    """A server whose engine gives two events and then waits to be released."""

    def __init__(self, **settings: Any) -> None:
        self.open = asyncio.Event()
        self.engine = ScriptedEngine(packets=SOUND, gate=self.gate)
        self.running = serve(self.engine, **settings)

    async def gate(self, i: int) -> None:
        if i >= 2:
            await self.open.wait()

    def release(self) -> None:
        if self.running.thread.is_alive():
            self.running.loop.call_soon_threadsafe(self.open.set)

    def __enter__(self) -> HeldServer:
        self.running.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self.running.__exit__()

    def start(self, body: dict[str, Any], path: str = CHAT, key: str = "") -> socket.socket:
        """Sends a request and reads until sound has come."""
        data = json.dumps({**body, "stream": True} if path == CHAT else body).encode()
        s = socket.create_connection(("127.0.0.1", self.running.port), timeout=PATIENCE_S)
        auth = f"Authorization: Bearer {key}\r\n" if key else ""
        s.sendall(f"POST {path} {HEAD}{auth}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        read_until(s, b'"data"' if path == CHAT else b"\r\n\r\n")
        return s

    def rest(self, s: socket.socket) -> bytes:
        got = b""
        with s:
            while not got.endswith(b"0\r\n\r\n") and (part := s.recv(65536)):
                got += part
        return got
