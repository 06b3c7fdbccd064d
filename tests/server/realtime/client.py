"""A client for tests: plain JSON over a WebSocket, every event checked as strict clients do, and
where it comes."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.server.conftest import Running
from tests.server.realtime.order import Order
from tests.server.realtime.sounds import b64, pcm, speech
from tests.server.scripted_engine import ScriptedEngine

ONE_S = pcm(speech(1.0))

MOST_BYTES = 1 << 20
_strict: dict[str, TypeAdapter[Any]] = {
    get_args(model.model_fields["type"].annotation)[0]: TypeAdapter(model)
    for model in get_args(get_args(RealtimeServerEvent)[0])
}
Json = dict[str, Any]


class Client:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.seen: list[Json] = []
        self.order = Order()

    def send(self, type: str, **fields: Any) -> str:
        event_id = f"evt_{secrets.token_hex(4)}"
        self.socket.send(json.dumps({"type": type, "event_id": event_id, **fields}))
        return event_id

    def next(self) -> Json:
        data = self.socket.recv()
        assert len(data) < MOST_BYTES
        event: Json = json.loads(data)
        check(event)
        self.order.see(event)
        self.seen.append(event)
        return event

    def until(self, *types: str) -> Json:
        """The next event of one of these types. An error that nobody waits for fails the test."""
        while True:
            event = self.next()
            if event["type"] in types:
                return event
            assert event["type"] != "error", event

    def collect(self, last: str) -> list[Json]:
        """All events up to one of this type."""
        start = len(self.seen)
        self.until(last)
        return self.seen[start:]

    def update(self, **session: Any) -> Json:
        self.send("session.update", session={"type": "realtime", **session})
        return dict(self.until("session.updated")["session"])

    def manual(self, **session: Any) -> Json:
        """Turns end when the client says so."""
        audio = session.pop("audio", {})
        audio.setdefault("input", {})["turn_detection"] = None
        return self.update(audio=audio, **session)

    def append(self, data: bytes, piece: int = 4800) -> None:
        for i in range(0, len(data), piece):
            self.send("input_audio_buffer.append", audio=b64(data[i : i + piece]))

    def sync(self) -> list[Json]:
        """All that has come when the server has handled everything sent so far."""
        start = len(self.seen)
        event_id = self.send("conversation.item.retrieve", item_id="nothing")
        while True:
            event = self.next()
            if event["type"] == "error" and event["error"]["event_id"] == event_id:
                self.seen.pop()
                return self.seen[start:]


def check(event: Json) -> None:
    """As OpenAI's types have it: every required field there and of its type; `usage` and the rest
    as well."""
    assert event["event_id"]
    assert event["type"] in _strict, "there is no such event"
    _strict[event["type"]].validate_python(event)


@contextmanager
def talk(running: Running, path: str = "/v1/realtime", **options: Any) -> Iterator[Client]:
    """However long the server takes, which may be busy: what hangs is ended by pytest."""
    patient: dict[str, Any] = {"open_timeout": None, "ping_interval": None}
    url = f"ws://127.0.0.1:{running.port}{path}"
    with connect(
        url, max_size=MOST_BYTES, max_queue=None, compression=None, **patient, **options
    ) as socket:
        client = Client(socket)
        assert client.next()["type"] == "session.created"
        yield client


def types(events: list[Json]) -> list[str]:
    return [e["type"] for e in events]


def add_text(c: Client, text: str, role: str = "user", **more: Any) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    c.send(
        "conversation.item.create",
        item={"type": "message", "role": role, "content": [{"type": kind, "text": text}]},
        **more,
    )
    return c.until("conversation.item.done")


def hold(running: Running, engine: ScriptedEngine, at: int = 1) -> Any:
    """The engine stops before its event number `at`, until the function that comes back is
    called."""

    event = asyncio.Event()

    async def gate(i: int) -> None:
        if i == at:
            await event.wait()

    engine.gate = gate
    return lambda: running.loop.call_soon_threadsafe(event.set)


def closed(c: Client) -> tuple[int, str]:
    """How the server ends it, whatever it says before."""
    with pytest.raises(ConnectionClosed) as e:
        c.until("nothing that there is")
    assert e.value.rcvd is not None
    return e.value.rcvd.code, e.value.rcvd.reason


def speak(c: Client, data: bytes = ONE_S) -> str:
    c.append(data)
    c.send("input_audio_buffer.commit")
    return str(c.until("conversation.item.done")["item"]["id"])


def answer(c: Client, **response: Any) -> list[Json]:
    c.send("response.create", response=response)
    return c.collect("response.done")
