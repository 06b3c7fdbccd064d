"""A server that exists in no socket: answers of the time that a test says."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from stretto.loadtest.sse import PCM_RATE, Piece, RequestFailed, Sound, StreamEnd, Used, Words
from tests.loadtest.clock import FakeClock

SECOND = Sound(base64.b64encode(bytes(2 * PCM_RATE)).decode())


@dataclass
class FakeServer:
    """Text after 0.1 s, a second of speech after 0.25 s and another after 1.5 s, done at 2 s."""

    clock: FakeClock
    running: int = 0
    most: int = 0
    sent: list[tuple[int, float]] = field(default_factory=list)
    broken: dict[int, RequestFailed] = field(default_factory=dict)
    silent: bool = False

    async def send(self, index: int) -> AsyncIterator[tuple[float, Piece]]:
        start = self.clock.now()
        self.sent.append((index, start))
        self.running += 1
        self.most = max(self.most, self.running)
        pieces: list[tuple[float, Piece]] = [
            (0.1, Words("a")),
            (0.25, SECOND),
            (1.5, SECOND),
            (2.0, StreamEnd("stop")),
        ]
        try:
            for after, piece in pieces:
                await self.clock.sleep_until(start + after)
                if index in self.broken and after > 0.2:
                    raise self.broken[index]
                if not (self.silent and isinstance(piece, Sound)):
                    yield self.clock.now(), piece
            yield (
                self.clock.now(),
                Used({"prompt_tokens": 9, "completion_tokens_details": {"text_tokens": 5}}),
            )
        finally:
            self.running -= 1
