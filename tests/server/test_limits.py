"""Limits and states: what is too large, too many or too slow; clients that leave; loading,
draining, dying."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from stretto.engine.protocol import EngineClient
from stretto.errors import StrettoError
from tests.server.asks import ALOUD, ASK, CHAT, SOUND, SPEECH
from tests.server.conftest import HEAD, PATIENCE_S, Running, serve
from tests.server.held import HeldServer
from tests.server.scripted_engine import ScriptedEngine

# ---- limits


def test_a_large_body_is_refused_while_it_is_read() -> None:
    with serve(ScriptedEngine(), max_body_mb=0.01) as running:
        for size in (11_000, 30_000):
            reply = running.ask(CHAT, b" " * size)
            assert reply.status == 413
            assert reply.error["code"] == "request_too_large"
        with pytest.raises(openai.APIStatusError) as caught:
            running.client().chat.completions.create(
                model="x", messages=[{"role": "user", "content": "x" * 20_000}]
            )
        assert caught.value.status_code == 413
        with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S) as s:
            s.sendall(f"POST {CHAT} {HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
            for _ in range(6):  # and no end
                s.sendall(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
            assert s.recv(4096).startswith(b"HTTP/1.1 413 ")
        for lie in (
            b"Content-Length: 99999999999",
            b"Expect: 100-continue\r\nContent-Length: 20000",
        ):
            with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S) as s:
                s.sendall(f"POST {CHAT} {HEAD}".encode() + lie + b"\r\n\r\n")
                assert s.recv(4096).startswith(b"HTTP/1.1 413 ")
        assert running.ask(CHAT, ASK).status == 200


def test_a_body_that_does_not_come() -> None:
    with serve(ScriptedEngine(), body_timeout=0.05) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S) as s:
            s.sendall(f"POST {CHAT} {HEAD}Content-Length: 100\r\n\r\n{{".encode())
            assert s.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert running.ask("/health").status == 200


def test_too_many_at_once() -> None:
    """One request is held inside the engine; what comes meanwhile is told to come back."""
    with HeldServer(
        max_concurrent=2,
        max_concurrent_share=1.0,
        max_queue=0,
        max_concurrent_per_key=1,
        api_key=("a", "b"),
    ) as held:
        first = held.start(ALOUD, key="a")
        same_key = held.running.ask(CHAT, ASK, headers={"Authorization": "Bearer a"})
        assert same_key.status == 429
        assert same_key.error["code"] == "rate_limit_exceeded"
        assert int(same_key.headers["retry-after"]) >= 1
        second = held.start(ALOUD, key="b")
        full = held.running.ask(CHAT, ASK, headers={"Authorization": "Bearer b"})
        assert full.status == 429
        assert full.error["code"] == "server_busy"
        assert "stretto_num_requests_running 2.0" in held.running.ask("/metrics").body.decode()
        held.release()
        for s in (first, second):
            assert held.rest(s).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert held.running.ask(CHAT, ASK, headers={"Authorization": "Bearer a"}).status == 200


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, ALOUD),
        (SPEECH, {"input": "Hi", "response_format": "pcm"}),
        ("/v1/responses", {"input": "Hi", "stream": True}),
    ],
)
def test_leaving_cancels_at_once(path: str, asked: dict[str, Any]) -> None:
    with HeldServer() as held:
        s = held.start(asked, path)
        assert len(held.engine.ledger.running) == 1
        s.close()
        held.running.do(
            held.engine.ledger.idle.wait()
        )  # the engine was never released: only leaving ends this
        held.running.do(held.running.server.service.admission.idle.wait())
        assert (held.engine.ledger.closed, held.engine.ledger.finished) == (1, 0)
        while "stretto_disconnects_total 1.0" not in held.running.ask("/metrics").body.decode():
            pass  # counted last


def test_leaving_before_a_whole_answer() -> None:
    with HeldServer() as held:
        data = json.dumps(ALOUD).encode()
        s = socket.create_connection(("127.0.0.1", held.running.port), timeout=PATIENCE_S)
        s.sendall(f"POST {CHAT} {HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)

        async def started() -> None:
            while not held.engine.ledger.running:
                await asyncio.sleep(0)

        held.running.do(started())
        s.close()
        held.running.do(held.engine.ledger.idle.wait())
        assert held.engine.ledger.finished == 0


def test_a_reader_that_stops_reading_is_dropped() -> None:
    """Megabytes for a client that takes none: the server gives up on it and frees the engine."""
    packets = [np.zeros(400_000, np.float32)] * 40
    engine = ScriptedEngine(pieces=["x"], packets=packets)
    with serve(engine, send_timeout=0.2) as running:
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", running.port))
        data = json.dumps({**ALOUD, "stream": True}).encode()
        s.sendall(f"POST {CHAT} {HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)

        async def over() -> None:
            while not engine.ledger.closed:
                await asyncio.sleep(0.01)

        running.do(over())
        assert engine.ledger.finished == 0
        s.close()


# ---- states


def test_loading_then_ready_then_draining() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine(packets=SOUND)

    async def open_engine() -> EngineClient:
        await gate.wait()
        return engine

    running = Running(open_engine)
    running.thread.start()
    assert running.bound.wait()
    try:
        loading = running.ask("/health")
        assert loading.status == 503
        assert loading.json["status"] == "loading"
        assert running.ask("/live").status == 200
        early = running.ask(CHAT, ASK)
        assert early.status == 503
        assert early.error["code"] == "loading"
        assert int(early.headers["retry-after"]) >= 1
        running.loop.call_soon_threadsafe(gate.set)
        running.do(running.server.service.opened.wait())
        assert running.ask("/health").json["status"] == "ready"
        assert running.ask(CHAT, ASK).status == 200
        engine.state = "dead"
        dead = running.ask("/health")
        assert (dead.status, dead.json["status"]) == (503, "dead")
        assert running.ask(CHAT, ASK).error["code"] == "dead"
        engine.state = "ready"
    finally:
        running.__exit__()
    assert running.status == 0
    assert engine.closed


def test_draining_finishes_what_runs() -> None:
    with HeldServer() as held:
        s = held.start(ALOUD)
        held.running.loop.call_soon_threadsafe(held.running.server.stop)

        async def draining() -> None:
            while not held.running.server.service.draining:
                await asyncio.sleep(0)

        held.running.do(draining())
        health = held.running.ask("/health")
        assert (health.status, health.json["status"]) == (503, "draining")
        refused = held.running.ask(CHAT, ASK)
        assert refused.status == 503
        assert refused.error["code"] == "draining"
        held.release()
        assert held.rest(s).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        held.running.thread.join()
        assert held.running.status == 0
        assert held.engine.ledger.finished == 1


def test_draining_refuses_those_that_wait() -> None:
    with HeldServer(max_concurrent=1, max_queue=4) as held:
        s = held.start(ALOUD)
        service = held.running.server.service
        with ThreadPoolExecutor() as pool:
            waits = pool.submit(held.running.ask, CHAT, ASK)

            async def drain() -> None:
                while not service.admission.waiting:
                    await asyncio.sleep(0.001)
                held.running.server.stop()

            held.running.do(drain())
            refused = waits.result()
        assert (refused.status, refused.error["code"]) == (503, "draining")
        held.release()
        assert held.rest(s).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        held.running.thread.join()
        assert held.running.status == 0


def test_draining_has_an_end() -> None:
    with HeldServer(drain_timeout=0.05) as held:
        s = held.start(ALOUD)
        held.running.loop.call_soon_threadsafe(held.running.server.stop)
        held.running.thread.join()
        assert held.running.status == 0
        assert held.engine.ledger.finished == 0
        assert not held.engine.ledger.running
        assert b'"code":"draining"' in held.rest(s)  # told within the stream


def test_a_model_that_cannot_be_loaded() -> None:
    async def open_engine() -> EngineClient:
        raise StrettoError("no such weights")

    with Running(open_engine) as running:
        health = running.ask("/health")
        assert (health.status, health.json["status"]) == (503, "dead")
        assert "no such weights" in health.json["error"]
        assert running.ask(CHAT, ASK).status == 503
    assert running.status == 1
