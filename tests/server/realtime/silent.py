"""A realtime session without a connection, for tests that look at what it sends and counts."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from stretto.config.server import ServerConfig
from stretto.server.realtime.client_events import decode
from stretto.server.realtime.realtime_session import RealtimeSession
from stretto.server.realtime.send_queue import SendQueue
from stretto.server.realtime.server_events import ServerEvent
from stretto.server.request_log import RequestLog
from stretto.server.service import Service
from stretto.server.shares import Holding, Shares
from stretto.types import RequestId
from tests.server.realtime.sounds import b64, pcm, speech
from tests.server.scripted_engine import ScriptedEngine

Json = dict[str, Any]


class EventList(SendQueue):
    """A send queue that also lists its events, decoded, for tests."""

    def __init__(self) -> None:
        super().__init__(5.0, Holding(Shares(1 << 24), "me"))
        self.events: list[Json] = []

    def put(self, event: ServerEvent) -> None:
        super().put(event)
        self.events.append(json.loads(msgspec.json.encode(event)))


class SilentSession:
    """A session without a connection: what it sends is in `queue.events`."""

    def __init__(self, **settings: Any) -> None:
        async def no_engine() -> Any:
            raise AssertionError

        self.engine = ScriptedEngine()
        self.service = Service.of(ServerConfig(**settings), no_engine)
        self.queue = EventList()
        connection = RequestLog(RequestId("req-1"), "req-1", time.perf_counter(), owner="key1")
        self.session = RealtimeSession(self.service, self.engine, self.queue, connection, "model")

    async def send(self, type: str, **fields: Any) -> None:
        await self.session.handle(decode(json.dumps({"type": type, **fields}).encode()))

    async def ask(self, **response: Any) -> None:
        content = [{"type": "input_text", "text": "Hello"}]
        item = {"type": "message", "role": "user", "content": content}
        await self.send("conversation.item.create", item=item)
        await self.send("response.create", response=response)

    async def speak(self) -> None:
        audio = {"input": {"transcription": {"model": "any"}, "turn_detection": None}}
        await self.send("session.update", session={"type": "realtime", "audio": audio})
        await self.send("input_audio_buffer.append", audio=b64(pcm(speech(0.3))))
        await self.send("input_audio_buffer.commit")

    async def quiet(self) -> None:
        """Until all tasks of responses and transcriptions are over."""
        while self.session.busy or self.session.transcriber.busy:
            await asyncio.sleep(0)

    def events(self, type: str) -> list[Json]:
        return [e for e in self.queue.events if e["type"] == type]

    def count(self, name: str, **labels: str) -> float:
        text = self.service.metrics.render(0, {}).decode()
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        return sum(s.value for s in samples if (s.name, s.labels) == (name, labels))

    def responses(self) -> dict[str, float]:
        """By status."""
        statuses = ("completed", "incomplete", "cancelled", "failed", "dropped")
        counts = {s: self.count("stretto_realtime_responses_total", status=s) for s in statuses}
        return {s: n for s, n in counts.items() if n}
