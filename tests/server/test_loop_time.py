"""What a request may cost on the event loop: fields have limits before they are decoded, turns are
one a pass."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.server.app import metrics_of
from stretto.server.http import exchange
from stretto.server.http.body import ON_THE_LOOP, TURN_BYTES, Body
from stretto.server.http.exchange import SMALL
from stretto.server.loop_time import HEAVY, LoopTurns, ThreadTurns
from stretto.server.metrics import PAGE_S, Metrics
from stretto.server.openai import chat, transcriptions, voices
from stretto.server.openai import chat_params as chatparams
from stretto.server.openai.chat_params import LONGEST, MAX_SCHEMA
from stretto.server.shares import Shares
from tests.server.conftest import Running, serve
from tests.server.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
SHAPE = b'{"type":"json_schema","json_schema":{"name":"a","schema":%s}}'
DEEP = b"[" * 60 + b"]" * 60


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def running(engine: ScriptedEngine) -> Iterator[Running]:
    with serve(engine, drain_timeout=1.0) as it:
        yield it


class Decoders:
    """Counts the bytes that decoders of untyped values are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> None:
        self.sizes: list[int] = []
        for module, name in places:
            monkeypatch.setattr(module, name, Counting(getattr(module, name), self.sizes))


class Counting:
    def __init__(self, decoder: Any, sizes: list[int]) -> None:
        self.decoder, self.sizes = decoder, sizes

    def decode(self, data: Any) -> Any:
        self.sizes.append(len(memoryview(data)))
        return self.decoder.decode(data)


def many(unit: bytes, size: int) -> bytes:
    return b"[" + unit * (size // len(unit)) + b"0]"


def with_field(name: str, value: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":"hi"}],"%s":%s}' % (name.encode(), value)


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("chat_template_kwargs", b'{"a":' + many(b"1e300,", LONGEST["chat_template_kwargs"]) + b"}",
        None),
        ("tool_choice", b'{"function":{"name":"f"},"x":' + many(b"1e300,",
        LONGEST["tool_choice"]) + b"}", None),
        ("logit_bias", b'{"1":0' + b',"1":9.5e-324' * (LONGEST["logit_bias"] // 13) + b"}", None),
        (
            "response_format",
            SHAPE % (b'{"enum":' + many(DEEP + b",", MAX_SCHEMA + 4096) + b"}"),
            "response_format.json_schema.schema",
        ),
        ("response_format", b'{"type":"text","x":' + many(b"[],",
        LONGEST["response_format"]) + b"}", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pad", [0, ON_THE_LOOP])
def test_long_fields_are_refused_before_they_are_decoded(
    name: str,
    value: bytes,
    param: str | None,
    pad: int,
    running: Running,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Decoders(monkeypatch, (chatparams, "_values"))
    reply = running.ask(CHAT, with_field(name, value) + b" " * pad)
    assert reply.status == 400
    assert reply.error["param"] == (param or name)
    assert "more than the" in reply.error["message"]
    assert not seen.sizes
    assert not engine.calls


@pytest.mark.parametrize("pad", [0, ON_THE_LOOP])
def test_tools_are_limited_where_a_call_is_required(
    pad: int, running: Running, engine: ScriptedEngine
) -> None:
    function = {"name": "f", "parameters": {"type": "object", "description": "x" * MAX_SCHEMA}}
    body = {**ASK, "tools": [{"type": "function", "function": function}]}
    assert running.ask(CHAT, json.dumps(body).encode() + b" " * pad).status == 200
    reply = running.ask(CHAT, json.dumps({**body, "tool_choice": "required"}).encode() + b" " * pad)
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert "more than the" in reply.error["message"]
    assert len(engine.calls) == 1


def test_a_field_counts_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them in one body are thousands of numbers to read, of which one is good for
    something."""
    decoded: list[int] = []
    decoder = exchange.raw_fields

    class Fields:
        def decode(self, data: bytes) -> Any:
            fields = decoder.decode(data)
            decoded.append(len(fields))
            return fields

    monkeypatch.setattr(exchange, "raw_fields", Fields())
    body = b'{"input":"hi",' + b'"seed":1,' * SMALL + b'"response_format":"pcm"}'
    assert running.ask("/v1/audio/speech", body).status == 200
    assert decoded == [3]


def test_schemas_are_compact_and_closed(running: Running, engine: ScriptedEngine) -> None:
    """Our word on white space is the last, and an object has the fields that it lists."""
    schema = (
        '{ "type" : "object",\n "x-guidance" : {"whitespace_flexible": true}, "title": "é\\u00e9", '
        '"properties": {"a": {"type": "object", "properties": {}}, "b": {"type": "object"}}}'
    )
    assert running.ask(CHAT, with_field("response_format", SHAPE % schema.encode())).status == 200
    grammar = engine.calls[0]["params"].grammar
    assert json.loads(grammar.removeprefix("start: %json ")) == {
        "type": "object",
        "x-guidance": {"whitespace_flexible": False},
        "title": "éé",
        "properties": {
            "a": {"type": "object", "properties": {}, "additionalProperties": False},
            "b": {"type": "object"},
        },
        "additionalProperties": False,
    }
    tool = b'{"type":"function","function":{"name":"f","parameters":%s}}'
    body = with_field("tools", b"[" + tool % b"{}" + b"]")[:-1] + b',"tool_choice":"required"}'
    assert running.ask(CHAT, body).status == 200
    assert '%json {"x-guidance":' in engine.calls[1]["params"].grammar
    for bad in (b"[]", b"3", b'"{}"'):
        body = with_field("tools", b"[" + tool % bad + b"]")[:-1] + b',"tool_choice":"required"}'
        assert running.ask(CHAT, body).error["param"] == "tools"
    bad = running.ask(CHAT, with_field("response_format", SHAPE % schema.encode("latin-1")))
    assert (bad.status, bad.error["param"]) == (400, "response_format.json_schema")


def test_long_schemas_are_read_in_a_thread(
    running: Running, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def record(*args: Any) -> str:
        threads.append(threading.current_thread().name)
        return ""

    monkeypatch.setattr(chat, "grammar_of", record)
    for size in (100, 20_000):
        schema = json.dumps({"type": "object", "description": "x" * size}).encode()
        assert running.ask(CHAT, with_field("response_format", SHAPE % schema)).status == 200
    assert threads[0] == "server"
    assert threads[1] != "server"


def test_template_variables_that_nest_without_end(running: Running) -> None:
    for depth in (500, 1500):
        body = with_field("chat_template_kwargs", b'{"a":' + b"[" * depth + b"]" * depth + b"}")
        assert running.ask(CHAT, body).error["param"] in ("chat_template_kwargs", None)


def test_heavy_requests_take_turns(running: Running) -> None:
    turns = running.server.service.turns
    taken: list[int] = []

    class Counted(LoopTurns):
        async def take(self) -> None:
            taken.append(1)
            await turns.take()

    running.server.service.turns = Counted()
    assert running.ask(CHAT, ASK).status == 200
    assert not taken
    assert running.ask(CHAT, json.dumps(ASK).encode() + b" " * HEAVY).status == 200
    assert len(taken) == 1


def test_one_turn_in_each_pass_of_the_loop() -> None:
    async def main() -> list[int]:
        turns, passes, done = LoopTurns(), 0, []

        async def count() -> None:
            nonlocal passes
            while len(done) < 10:
                passes += 1
                await asyncio.sleep(0)

        async def work() -> None:
            await turns.take()
            done.append(passes)

        waiting = [asyncio.create_task(work()) for _ in range(10)]
        leaves = asyncio.create_task(turns.take())
        leaves.cancel()
        await asyncio.gather(count(), *waiting)
        return done

    done = asyncio.run(main())
    assert len(set(done)) == len(done)


def test_threads_work_for_one_client_once_and_for_two_at_most() -> None:
    async def main() -> None:
        turns, ends = ThreadTurns(), {name: asyncio.Event() for name in ("a1", "a2", "b1", "c1")}
        running: list[str] = []

        async def work(name: str) -> None:
            async with turns.turn(name[0]):
                running.append(name)
                await ends[name].wait()
                running.remove(name)

        async def settle() -> list[str]:
            for _ in range(10):
                await asyncio.sleep(0)
            return running

        tasks = [asyncio.create_task(work(name)) for name in ends]
        assert await settle() == ["a1", "b1"]
        ends["b1"].set()
        assert await settle() == ["a1", "c1"]
        ends["a1"].set()
        assert await settle() == ["c1", "a2"]
        tasks[-1].cancel()
        ends["a2"].set()
        await asyncio.wait(tasks)
        async with turns.turn("a"), turns.turn("b"):
            pass

    asyncio.run(main())


def test_large_bodies_are_read_in_turns(running: Running) -> None:
    taken: list[int] = []

    class Counted(LoopTurns):
        async def take(self) -> None:
            taken.append(1)
            await super().take()

    assert running.server.service.body_turns.rest_s > 0
    running.server.service.body_turns = Counted()
    assert running.ask(CHAT, json.dumps(ASK).encode() + b" " * (ON_THE_LOOP // 2)).status == 200
    assert not taken
    assert running.ask(CHAT, json.dumps(ASK).encode() + b" " * (4 * TURN_BYTES)).status == 200
    assert taken


FORM = (
    b'--m\r\nContent-Disposition: form-data; name="%s"\r\n\r\nv\r\n'
    b'--m\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nsound\r\n--m--\r\n'
)
READERS: dict[str, Any] = {
    "transcription": (transcriptions.reader(False), transcriptions, "part_of", b"model"),
    "voice": (voices.read_voice, voices, "_message", b"name"),
}


@pytest.mark.parametrize("which", READERS)
def test_a_client_has_one_thread_at_a_time(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forms are to be cut: one client's one after the other, another client's at once."""
    read, module, name, field = READERS[which]
    copy = getattr(module, name)
    begun: queue.SimpleQueue[int] = queue.SimpleQueue()
    go_on = threading.Event()

    def slow(*given: Any) -> Any:
        begun.put(1)
        go_on.wait()
        return copy(*given)

    monkeypatch.setattr(module, name, slow)
    service: Any = SimpleNamespace(
        thread_turns=ThreadTurns(),
        engine=lambda: SimpleNamespace(info=SimpleNamespace(cloning=True)),
    )

    async def form(client: str) -> None:
        log: Any = SimpleNamespace(client=client, content_type="multipart/form-data; boundary=m")
        with closing(Body(Shares(1 << 20), client)) as body:
            body.add(FORM % field)
            made = await read(service, body, log)
        (made.file if which == "transcription" else made).close()

    async def main() -> None:
        waiting = [asyncio.create_task(form(client)) for client in "aab"]
        try:
            for _ in range(2):  # "a" and "b"
                await asyncio.to_thread(begun.get)
            for _ in range(10):  # a third thread would have begun by now
                await asyncio.to_thread(int)
            assert begun.empty()
        finally:
            go_on.set()
        await asyncio.gather(*waiting)
        assert begun.get() == 1
        assert begun.empty()

    asyncio.run(main())


def test_a_clip_is_refused_before_it_is_cut() -> None:
    class Uncut(ScriptedEngine):
        async def outline(self, *_: Any) -> Any:
            raise AssertionError("nobody needs its fields")

    body = b'{"name":"v","audio":"' + b"A" * (1 << 20) + b'"}'
    with serve(Uncut()) as running:
        answer = running.ask("/v1/audio/voices", body)
    assert answer.status == 400
    assert answer.error["param"] == "model"


def test_many_readers_of_metrics_get_one_page(running: Running, engine: ScriptedEngine) -> None:
    clock, made = [0.0], []
    service = running.server.service
    service.metrics = Metrics(lambda: clock[0])
    render = service.metrics.render
    service.metrics.render = lambda *a: (made.append(1), render(*a))[1]  # type: ignore[method-assign]
    pages = [running.ask("/metrics").body for _ in range(5)]
    assert len(set(pages)) == len(made) == 1
    engine.numbers = {"stretto_new": 1.0}
    clock[0] = PAGE_S - 0.01
    assert b"stretto_new" not in running.ask("/metrics").body
    clock[0] = PAGE_S
    assert b"stretto_new 1.0" in running.ask("/metrics").body
    assert b"stretto_new 1.0" in metrics_of(service)
    assert len(made) == 2
