"""Connections without a socket: what a protocol writes, and what clients send."""

from __future__ import annotations

import asyncio
from typing import Any


class Wire(asyncio.Transport):
    """A socket whose client takes everything, unless it is `stuck`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.left, self.stuck, self.closing, self.lost = b"", 0, False, False, False
        self.paused = False
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.sent += bytes(data)
        self.left += len(data) if self.stuck else 0

    def get_write_buffer_size(self) -> int:
        return self.left

    def close(self) -> None:
        self.closing = True
        if not self.left:
            self.abort()

    def abort(self) -> None:
        self.closing = True
        if not self.lost:
            self.lost = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
