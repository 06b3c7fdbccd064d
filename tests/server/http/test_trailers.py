"""What stands behind the body of an answer, on a real connection: fields for those who read them, a
body that is whole for all."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.server.asks import SPEECH
from tests.server.conftest import HEAD, Running
from tests.server.scripted_engine import ScriptedEngine

BODY = json.dumps({"input": "Hello", "response_format": "pcm"})
PACKETS = [np.full(1920, 0.25, np.float32)] * 2


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(packets=PACKETS)


@pytest.fixture
def running(engine: ScriptedEngine) -> Iterator[Running]:
    async def open_engine() -> Any:
        return engine

    with Running(open_engine) as it:
        yield it


def answers(running: Running, count: int = 1, version: str = "1.1") -> list[bytes]:
    """All that comes for requests of one connection: heads and bodies in turn, as they are sent."""
    head = HEAD.replace("HTTP/1.1", f"HTTP/{version}")
    ask = f"POST {SPEECH} {head}Content-Length: {len(BODY)}\r\n"
    last = "Connection: close\r\n"
    with socket.create_connection(("127.0.0.1", running.port)) as it:
        for i in range(count):
            it.sendall(f"{ask}{last if i + 1 == count else ''}\r\n{BODY}".encode())
        data = b"".join(iter(lambda: it.recv(65536), b""))
    return [part for part in data.split(b"HTTP/1.1 200 OK\r\n") if part]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_end_of_the_sound_says_why_it_ended(
    running: Running, engine: ScriptedEngine, reason: Any
) -> None:
    engine.audio_end = reason
    found = answers(running, 3)
    assert len(found) == 3, "the connection goes on"
    for answer in found:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"trailer: x-finish-reason" in head
        assert body.endswith(f"\r\n0\r\nx-finish-reason: {reason}\r\n\r\n".encode())
        assert body.count(b"x-finish-reason") == 1


def test_who_reads_no_trailers_reads_the_body(running: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", running.port)
    for _ in range(2):
        connection.request("POST", SPEECH, BODY, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.read() == b"".join(
            (p * 32767).round().astype("<i2").tobytes() for p in PACKETS
        )
    connection.close()


def test_an_old_client_is_sent_none(running: Running) -> None:
    [answer] = answers(running, version="1.0")
    assert b"x-finish-reason" not in answer


def test_what_fails_before_the_sound_has_an_answer_of_its_own(
    running: Running, engine: ScriptedEngine
) -> None:
    engine.fail_at, engine.error = 0, RuntimeError("a secret")
    reply = running.ask(SPEECH, json.loads(BODY))
    assert (reply.status, reply.error["code"]) == (500, "internal_error")


def test_events_say_why_the_sound_ended(running: Running, engine: ScriptedEngine) -> None:
    engine.audio_end = "length"
    reply = running.ask(SPEECH, {**json.loads(BODY), "stream_format": "sse"})
    assert reply.events[-1]["finish_reason"] == "length"
