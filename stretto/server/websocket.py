"""uvicorn's WebSocket protocol with two differences: a message of text comes as bytes, so that large ones are not
decoded on the event loop for nothing; and a connection that is closing and whose client takes nothing is cut, where
uvicorn would wait for ever. `run.py` gives it to uvicorn."""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

CUT_S = 5.0  # for a client to take the close frame and what lies before it


class Socket(WebSocketsSansIOProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cut: TimerHandle | None = None

    def send_receive_event_to_app(self) -> None:
        self.curr_msg_data_type = "bytes"
        super().send_receive_event_to_app()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self.cut = self.loop.call_later(CUT_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.cut is not None:
            self.cut.cancel()
        super().connection_lost(exc)
