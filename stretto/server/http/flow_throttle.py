"""Turns of the event loop for data that takes long to parse: large reads of a WebSocket
(`websocket.py`), and data in many tiny pieces, which a client may send on purpose: chunks of a body
(`connection.py`) or frames of a WebSocket. Each piece is a call from the parser, so that a read
full of them takes a hundred times as long as any other."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable

# between two turns of about a millisecond: floods have a twentieth of the event loop's time
REST_S = 0.02


class TurnQueue:
    """Connections of a server that wait for a turn: one has a turn, then nobody for `rest_s`
    seconds (0: until the next pass of the event loop), however many they are. On the event loop."""

    def __init__(self, rest_s: float = 0.0) -> None:
        self.rest_s = rest_s
        self.waiting: deque[Callable[[], None]] = deque()

    def wait(self, loop: AbstractEventLoop, turn: Callable[[], None]) -> None:
        self.waiting.append(turn)
        if len(self.waiting) == 1:
            loop.call_later(self.rest_s, self._next, loop)

    def _next(self, loop: AbstractEventLoop) -> None:
        turn = self.waiting.popleft()
        if self.waiting:
            loop.call_later(self.rest_s, self._next, loop)
        turn()  # which may put it at the end of the line
