"""The scripted server's `/v1/realtime`: what a test says is what the page is sent.

A test holds a conversation by `send` and `wait_for`, refuses connections, and breaks them off. With
`turn` set, the first sound that the page sends is answered by those events at once."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

Json = dict[str, Any]


@dataclass
class FakeRealtime:
    turn: list[Json] | None = None  # the answer to the first sound
    refuse: bool = False  # the handshake
    opened: int = 0  # connections so far
    refused: int = 0
    received: list[Json] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    _socket: WebSocket | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    # --- the server's side

    async def serve(self, socket: WebSocket) -> None:
        self._loop = asyncio.get_running_loop()
        if self.refuse:
            await socket.close()  # before it was accepted: 403
            with self.changed:
                self.refused += 1
                self.changed.notify_all()
            return
        await socket.accept("realtime")
        with self.changed:
            self.opened += 1
            self._socket = socket
            self.changed.notify_all()
        heard = False
        try:
            async for message in socket.iter_json():
                with self.changed:
                    self.received.append(message)
                    self.changed.notify_all()
                if message["type"] == "input_audio_buffer.append" and self.turn and not heard:
                    heard = True
                    for event in self.turn:
                        await socket.send_json(event)
        except (WebSocketDisconnect, RuntimeError):
            pass  # the test has closed it
        finally:
            with self.changed:
                if self._socket is socket:
                    self._socket = None
                self.changed.notify_all()

    # --- the test's side

    def _do(self, work: Any) -> None:
        assert self._loop is not None, "nobody has connected yet"
        asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def _wait(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 120)

    def wait_for(self, type: str, count: int = 1) -> Json:
        """The event of this type that the page sent as the `count`-th."""

        def found() -> list[Json]:
            return [m for m in self.received if m["type"] == type]

        self._wait(lambda: len(found()) >= count)
        return found()[count - 1]

    def wait_until_open(self, count: int = 1) -> None:
        self._wait(lambda: self.opened >= count and self._socket is not None)

    def wait_until_refused(self, count: int) -> None:
        self._wait(lambda: self.refused >= count)

    def wait_until_closed(self) -> None:
        self._wait(lambda: self._socket is None)

    def send(self, *events: Json) -> None:
        async def send() -> None:
            assert self._socket is not None
            for event in events:
                await self._socket.send_json(event)

        self._do(send())

    def close(self, code: int, reason: str = "") -> None:
        assert self._socket is not None
        self._do(self._socket.close(code, reason))


def started(item: str = "q") -> Json:
    return {"type": "input_audio_buffer.speech_started", "item_id": item}


def stopped(item: str = "q", pause: float | None = 0.5) -> Json:
    told = {} if pause is None else {"vad_wait_s": pause}
    return {"type": "input_audio_buffer.speech_stopped", "item_id": item, **told}


def words(text: str, item: str = "q") -> Json:
    kind = "conversation.item.input_audio_transcription.completed"
    return {"type": kind, "item_id": item, "transcript": text}


def answer(text: str, response: str = "r") -> list[Json]:
    """The beginning of an answer, before its sound."""
    item = {"id": f"a-{response}", "type": "message"}
    return [
        {"type": "response.created", "response": {"id": response}},
        {"type": "response.output_item.added", "response_id": response, "item": item},
        {
            "type": "response.output_audio_transcript.delta",
            "response_id": response,
            "delta": text,
        },
    ]


def sound(base64: str, response: str = "r") -> Json:
    return {"type": "response.output_audio.delta", "response_id": response, "delta": base64}


def done(response: str = "r", status: str = "completed", **timings: Any) -> Json:
    told = {"id": response, "status": status, "stretto": timings}
    return {"type": "response.done", "response": told}
