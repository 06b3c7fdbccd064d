"""What clients send, while it arrives and while it is prepared: nobody's body holds up anybody
else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.config.server import ServerConfig
from stretto.preprocess.pool import split as cuts
from stretto.preprocess.pool.pool import PoolSettings, PromptPool
from stretto.server.http import exchange
from stretto.server.http.body import ON_THE_LOOP, TURN_BYTES, TURN_REST_S, Body
from stretto.server.http.exchange import Exchange
from stretto.server.loop_time import LoopTurns
from stretto.server.openai import chat
from stretto.server.openai.error_body import Refused
from stretto.server.request_log import RequestLog
from stretto.server.shares import Shares
from stretto.types import RequestId
from tests.preprocess.pool.workers import BUILDER, picture, sound
from tests.server.asks import ASK, CHAT, SPEECH
from tests.server.conftest import PATIENCE_S, Running
from tests.server.http.bodies import Turned
from tests.server.scripted_engine import ScriptedEngine
from tests.virtual import run_virtual

HEAVY = {"messages": [{"role": "user", "content": [picture(6000)] * 8}]}  # seconds of work


class Front:
    """A server with a real prompt worker and an engine that says what it is told to."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.engine = ScriptedEngine(packets=[np.zeros(1920, np.float32)])
        self.directory = directory
        self.running = Running(self.open, **settings)

    async def open(self) -> ScriptedEngine:
        self.pool = PromptPool(self.directory, BUILDER, PoolSettings())
        await self.pool.start()
        self.engine.prompts = self.pool
        return self.engine

    def __enter__(self) -> Front:
        self.running.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker, signal.SIGCONT)
        self.running.__exit__()

    @property
    def worker(self) -> int:
        assert self.pool.worker.process is not None
        return self.pool.worker.process.pid

    @property
    def service(self) -> Any:
        return self.running.server.service

    def until(self, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        self.running.do(wait())

    def post(self, body: bytes, length: int | None = None) -> socket.socket:
        """Sends a request, or the beginning of one, on a connection of its own."""
        s = socket.create_connection(("127.0.0.1", self.running.port), timeout=PATIENCE_S)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        s.sendall(
            f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode()
            + body
        )
        return s

    def nothing_is_held(self) -> None:
        self.until(
            lambda: (
                not (
                    self.service.admission.running
                    or self.service.bodies.held
                    or self.pool.queue.running
                )
            )
        )
        assert not self.engine.ledger.running


@pytest.fixture(scope="module")
def front(roomy_dir: Path) -> Iterator[Front]:
    with Front(roomy_dir, max_concurrent=2) as front:
        yield front
        front.nothing_is_held()


def test_bad_messages_and_tools_are_named(front: Front) -> None:
    tool = {"type": "function", "function": {"name": "a b"}}
    for change, param in (
        ({"messages": "hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": None}, "messages"),
        (
            {"messages": [{"role": "assistant", "audio": {"id": "audio_" + "0" * 32}}]},
            "messages[0].audio",
        ),
        ({"tools": [tool]}, "tools[0].function.name"),
    ):
        reply = front.running.ask(CHAT, {**ASK, **change})
        assert reply.status == 400
        assert reply.error["param"] == param
        assert param.rpartition(".")[2] in reply.error["message"]
        padded = {**ASK, **change, "stop": "x" * 200}
        large = (
            json.dumps(padded).encode() + b" " * ON_THE_LOOP
        )  # the same when it is cut elsewhere
        assert front.running.ask(CHAT, large).error["param"] == param
    missing = front.running.ask(CHAT, {"stream": False})
    assert (missing.status, missing.error["param"]) == (400, "messages")
    assert (
        front.running.ask(CHAT, b'{"model": null}' + b" " * ON_THE_LOOP).error["param"]
        == "messages"
    )
    assert front.running.ask(CHAT, b'{"modle": 1}' + b" " * ON_THE_LOOP).error["param"] == "modle"


def test_half_a_surrogate_pair_is_replaced(front: Front) -> None:
    """As cutting a JavaScript string in two leaves it."""
    half, whole = (
        json.dumps({"messages": [{"role": "user", "content": f"cut {c}"}]})
        for c in ("\ud83d", "\ufffd")
    )
    want = front.running.ask(CHAT, whole.encode()).json["usage"]
    for body in (half, half + " " * ON_THE_LOOP):
        assert front.running.ask(CHAT, body.encode()).json["usage"] == want
    assert front.running.ask(SPEECH, b'{"input": "cut \\ud83d", "voice": "alloy"}').status == 200


def test_a_large_body_is_the_same_request(front: Front) -> None:
    content = [sound(), {"type": "text", "text": "What is it?"}]
    small = {"messages": [{"role": "user", "content": content}], "max_tokens": 5}
    large = json.dumps(small).encode() + b"\n" * ON_THE_LOOP
    replies = [front.running.ask(CHAT, body).json for body in (small, large)]
    assert replies[0]["usage"] == replies[1]["usage"]
    assert replies[0]["usage"]["prompt_tokens"] > 30
    speech = front.running.ask(SPEECH, b'{"input": "Hi"}' + b" " * ON_THE_LOOP)
    assert speech.status == 413  # nothing that can be read aloud is so long


def test_earlier_answers_are_recalled_in_small_and_large_bodies(front: Front) -> None:
    aloud = {**ASK, "modalities": ["text", "audio"]}
    said = front.running.ask(CHAT, aloud).json["choices"][0]["message"]["audio"]["id"]
    body = json.dumps(
        {
            "messages": [
                *ASK["messages"],
                {"role": "assistant", "audio": {"id": said}},
                *ASK["messages"],
            ]
        }
    )
    replies = [front.running.ask(CHAT, body.encode() + pad) for pad in (b"", b" " * ON_THE_LOOP)]
    assert [r.status for r in replies] == [200, 200]
    assert replies[0].json["usage"] == replies[1].json["usage"]


def test_the_loop_decodes_nothing_large(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the worker stands still, so does a large request, and nothing else."""
    decoded: list[int] = []

    def outline(body: bytes, *how: Any) -> Any:
        decoded.append(len(body))
        return cuts.outline(body, *how)

    def decode(data: bytes, *how: Any) -> Any:
        decoded.append(len(data))
        return exchange.decode(data, *how)

    monkeypatch.setattr(chat, "decode", decode)
    monkeypatch.setattr(chat, "outline", outline)
    os.kill(front.worker, signal.SIGSTOP)
    nested = b'{"messages":[' + b"[{}]," * (1 << 18) + b"0]}"
    s = front.post(nested)
    front.until(lambda: front.pool.queue.running == 1)
    assert front.running.ask("/live").status == 200
    assert front.running.ask("/health").status == 200
    os.kill(front.worker, signal.SIGCONT)
    with s:
        assert s.recv(4096).startswith(b"HTTP/1.1 400 ")
    front.nothing_is_held()
    assert len(decoded) == 1
    assert decoded[0] < 100


def test_leaving_while_the_prompt_is_prepared(front: Front) -> None:
    body = json.dumps(HEAVY).encode()
    for sent in (body, body + b" " * ON_THE_LOOP):
        s = front.post(sent)
        front.until(lambda: front.pool.queue.running == 1 and front.service.admission.running == 1)
        s.close()
        front.nothing_is_held()
    # In the queue, behind others of the same client: they leave too, the last one first.
    sockets = [front.post(body) for _ in range(2)]
    front.until(lambda: front.pool.queue.waiting == 1)
    for s in reversed(sockets):
        s.close()
    front.nothing_is_held()
    assert front.running.ask(CHAT, ASK).status == 200


def test_bodies_on_their_way_hold_no_slot(front: Front) -> None:
    slow = [front.post(b'{"messages"', 1000) for _ in range(8)]  # of which there are two
    front.until(lambda: front.service.bodies.held == 8 * 11)
    assert front.service.admission.running == 0
    assert front.running.ask(CHAT, ASK).status == 200
    for s in slow:
        s.close()
    front.nothing_is_held()


def test_all_bodies_together_are_bounded(tiny_dir: Path) -> None:
    with Front(tiny_dir, max_body_mb=1.0, max_bodies_mb=1.5) as front:
        first = front.post(b" " * 1_000_000, 1_048_576)
        front.until(lambda: front.service.bodies.held == 1_000_000)
        second = front.running.ask(CHAT, b" " * 1_000_000)
        assert second.status == 429
        assert second.error["code"] == "rate_limit_exceeded"
        assert int(second.headers["retry-after"]) >= 1
        assert front.running.ask(CHAT, ASK).status == 200  # small ones still fit
        first.close()
        front.nothing_is_held()


def test_a_body_must_keep_a_rate(tiny_dir: Path) -> None:
    with Front(tiny_dir, body_grace=0.2, min_body_kb_s=1000.0, body_timeout=600.0) as front:
        with front.post(b'{"messages"', 1000) as s:
            assert s.recv(4096).startswith(b"HTTP/1.1 408 ")
        front.nothing_is_held()


@pytest.mark.parametrize(
    ("size", "limit_s", "late"), [(100, 2000, False), (40, 2000, True), (100, 250, True)]
)
def test_what_came_of_a_body_counts(size: int, limit_s: float, late: bool) -> None:
    """In pieces of so many KiB, one a minute, at a KiB a second and two minutes of grace: the
    deadline moves with what came, so that the last byte of a body that is fast enough is not late.
    But none may take longer than the limit."""
    loop = Turned()

    async def receive() -> dict[str, Any]:
        loop.ahead += 60.0
        await asyncio.sleep(0)  # what is due by now comes first
        parts.append(b" " * (size << 10))
        return {"type": "http.request", "body": parts[-1], "more_body": len(parts) < 10}

    parts: list[bytes] = []
    config = ServerConfig(body_grace=120.0, min_body_kb_s=1.0, body_timeout=limit_s)
    with contextlib.closing(Body(Shares(1 << 31), "me")) as body:
        exchange = exchange_of(receive, config)
        work = exchange.read_body(body, 1 << 30, LoopTurns())
        with contextlib.closing(loop):
            if late:
                with pytest.raises(Refused, match="too long to arrive"):
                    loop.run_until_complete(work)
            else:
                loop.run_until_complete(work)
                assert body.size == 10 * size << 10


def exchange_of(receive: Any, config: ServerConfig) -> Exchange:
    """One whose body comes from `receive`, and whose answer nobody reads."""
    request_log = RequestLog(RequestId("r"), "r", arrived=0.0)
    return Exchange({"type": "http", "headers": []}, receive, receive, config, request_log)


def test_the_answers_of_a_request_write_one_after_the_other() -> None:
    """The client reads nothing at first, so the head waits; the data of another answer must not
    pass it."""
    sent: list[str] = []

    async def work() -> None:
        reads = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                await reads.wait()
            sent.append(message["type"])

        exchange = exchange_of(send, ServerConfig())
        head = asyncio.create_task(exchange.start_events())
        await asyncio.sleep(0)
        data = asyncio.create_task(exchange.write(b"data"))
        await asyncio.sleep(0)
        assert sent == []
        reads.set()
        await asyncio.gather(head, data)

    asyncio.run(work())
    assert sent == ["http.response.start", "http.response.body"]


def test_large_bodies_leave_the_loop_time() -> None:
    """What has come is there at once; all of it would be read in one go. Two at a time: one reads
    as much as a turn allows, then nobody for a while."""
    read: list[str] = []

    def upload(name: str, parts: int) -> Coroutine[Any, Any, None]:
        left = parts

        async def receive() -> dict[str, Any]:
            nonlocal left
            left -= 1
            read.append(name)
            return {"type": "http.request", "body": b" " * TURN_BYTES, "more_body": left > 0}

        exchange = exchange_of(receive, ServerConfig())
        return exchange.read_body(Body(Shares(1 << 31), name), 1 << 30, turns)

    async def main() -> float:
        start = asyncio.get_running_loop().time()
        await asyncio.gather(upload("a", 10), upload("b", 10))
        await upload("small", 2)  # it is large with its last part alone
        return asyncio.get_running_loop().time() - start

    turns = LoopTurns(TURN_REST_S)
    seconds = run_virtual(lambda _: main())
    assert seconds == pytest.approx(16 * TURN_REST_S), "one rest for each part of a large body"
    assert "".join(read[:20]) == "aabb" + 8 * "ab"


def test_a_body_gives_back_what_it_held() -> None:
    shares = Shares(2 << 20)
    with contextlib.closing(Body(shares, "me")) as body:
        body.add(b"a" * 1000)
        assert body.data == b"a" * 1000
        body.add(b"b" * ON_THE_LOOP)
        assert body.memfile is not None
        assert bytes(body.memfile.view()) == b"a" * 1000 + b"b" * ON_THE_LOOP
        assert shares.held == body.size == 1000 + ON_THE_LOOP
        with pytest.raises(Refused):
            body.add(b"c" * (1 << 20))
    assert shares.held == 0
    body.close()
    assert shares.held == 0
