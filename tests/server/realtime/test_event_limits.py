"""What an event of a client may cost: limits before anything is decoded, turns between events, and
an error for each event that goes wrong, after which the session goes on."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
from typing import Any

import msgspec
import pytest

from stretto.engine.events import TextDelta, TokenLogprob
from stretto.engine.session import Item as EngineItem
from stretto.server.loop_time import LoopTurns
from stretto.server.realtime import client_events as ce
from stretto.server.realtime import (
    endpoint,
    item_reader,
    items,
    options,
    realtime_session,
    transcribe,
)
from stretto.server.realtime import tools as module
from stretto.server.realtime.client_events import (
    LARGE,
    MAX_PARTS,
    MOST,
    MOST_FIELD,
    SHORT,
    EventError,
    decode,
)
from stretto.server.realtime.endpoint import Realtime
from stretto.server.realtime.options import SHORT_TEXT_BYTES
from stretto.server.realtime.tools import MAX_TOOL_BYTES, MAX_TOOLS, MAX_TOOLS_BYTES, ToolReader
from stretto.server.request_log import REQUEST_LOG, RequestLog
from stretto.types import RequestId
from tests.server.conftest import Running
from tests.server.realtime.client import Client, talk
from tests.server.realtime.conftest import talking
from tests.server.realtime.silent import SilentSession
from tests.server.realtime.sounds import pcm, silence, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import Ask, ScriptedSession, plain

ITEM = "conversation.item.create"


def message(*content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": list(content)}


def text(words: str) -> dict[str, Any]:
    return message({"type": "input_text", "text": words})


def refusal(data: bytes) -> tuple[str, str, str | None]:
    with pytest.raises(EventError) as e:
        decode(data)
    return e.value.code, str(e.value), e.value.event_id


class Seen:
    """How many bytes the decoder of events is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        decoder = ce.decoder

        class Counting:
            def decode(_, data: bytes) -> Any:  # noqa: N805
                self.sizes.append(len(data))
                return decoder.decode(data)

        monkeypatch.setattr(ce, "decoder", Counting())


# ---- before anything is decoded


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (
            b'{"event_id":"e","type":"input_audio_buffer.commit","x":"%s"}' % (b"a" * SHORT),
            "of this type",
        ),
        (
            b'{"event_id":"e","type":"conversation.item.truncate","item_id":"i","content_index":0,'
            + b'"audio_end_ms":9.5e-324,' * (SHORT // 20)
            + b'"audio_end_ms":1}',
            "of this type",
        ),
        (
            b'{"event_id":"e","type":"session.update","session":{"audio":{"input":{"turn_detection":{'
            + b'"threshold":9.5e-324,' * (MOST_FIELD // 20)
            + b'"threshold":0.5}}}}}',
            "session.audio has more than",
        ),
        (
            b'{"event_id":"e","type":"response.create","response":{"tool_choice":{"x":["%s"]}}}'
            % (b"a" * MOST_FIELD),
            "response.tool_choice has more than",
        ),
        (
            b'{"event_id":"e","type":"conversation.item.create","item":{"type":"message","content":['
            + b'{"type":"text"},' * (SHORT // 10)
            + b'{"type":"text"}]}}',
            "item.content has more than",
        ),
        (
            b'{"event_id":"e","type":"response.create","response":{"input":[{"type":"message","content":['
            + b'{"type":"text"},' * (SHORT // 10)
            + b'{"type":"text"}]}]}}',
            "response.input.content has more than",
        ),
        (
            b'{"event_id":"e","type":"response.create","response":{"input":['
            + b'{"type":"message"},' * (SHORT // 10)
            + b'{"type":"message"}]}}',
            "response.input has more than",
        ),
    ],
)
def test_long_events_are_refused_before_they_are_decoded(
    event: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    code, words, event_id = refusal(event)
    assert (code, event_id) == ("invalid_value", "e")
    assert says in words
    assert not seen.sizes


def test_an_event_without_its_media_has_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    nested = b'{"type":"session.update","session":{"x":[' + b"[]," * (MOST // 3) + b"0]}}"
    many = b'{"type":"x","y":[' + b'{"audio":"abc"},' * (MOST // 16 + 1) + b"0]}"
    for event in (nested, many):
        code, words, _ = refusal(event)
        assert code == "invalid_value"
        assert f"{MOST:,}" in words
    assert not seen.sizes


def test_a_field_of_a_session_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    got = decode(
        b'{"type":"session.update","session":{'
        + b'"temperature":9.5e-324,' * SHORT
        + b'"temperature":1}}'
    )
    assert isinstance(got, ce.SessionUpdate)
    assert got.session.temperature == 1
    assert max(seen.sizes) < 100


def test_sounds_and_pictures_are_cut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many sounds in one event, as they are and as clients that escape slashes write them; no
    decoder sees them."""
    seen = Seen(monkeypatch)
    sound = bytes(range(256)) * 100
    url = "data:image/png;base64," + base64.b64encode(sound).decode()
    parts = [
        {"type": "input_audio", "audio": base64.b64encode(sound[i:]).decode()} for i in range(200)
    ]
    parts += [{"type": "input_image", "image_url": url}, {"type": "input_audio", "audio": "AAAA"}]
    parts += [{"type": "input_text", "text": '"audio": "' + "A" * SHORT + '"'}]
    plainly = json.dumps({"type": ITEM, "item": message(*parts)}).encode()
    for event in (
        plainly,
        plainly.replace(b"/", b"\\/"),
        plainly.replace(b'"audio": ', b'"audio"\n:\t'),
    ):
        got = decode(event)
        assert isinstance(got, ce.ItemCreate)
        content = got.item.content or []
        assert [p.audio for p in content[:200]] == [sound[i:] for i in range(200)]
        assert content[200].image_url == url
        assert content[201].audio == bytes(3)
        assert content[202].text == '"audio": "' + "A" * SHORT + '"'
    assert max(seen.sizes) < 8 * SHORT
    event = json.dumps(
        {"type": "response.create", "response": {"input": [message(*parts[:2])]}}
    ).encode()
    got = decode(event)
    assert isinstance(got, ce.ResponseCreate)
    assert [p.audio for p in got.response.input[0].content] == [sound, sound[1:]]  # type: ignore[union-attr, index]
    bad = plainly.replace(b"AAECAwQFBgcI", b"AAE\xff\x02\x01\x01\x01\x01\x01\x01\x01", 1)
    assert refusal(bad)[0] == "invalid_value"


def read_tools(tools: msgspec.Raw) -> tuple[module.Function, ...] | None:
    return asyncio.run(ToolReader(LoopTurns()).read(ce.SessionFields(tools=tools)))


def test_tools_have_limits() -> None:
    def tools(count: int, size: int) -> msgspec.Raw:
        one = {"type": "function", "name": "f", "description": "x" * size}
        return msgspec.Raw(json.dumps([one] * count).encode())

    for written, says in (
        (tools(1, MAX_TOOLS_BYTES), f"{MAX_TOOLS_BYTES:,}"),
        (tools(1, MAX_TOOL_BYTES), f"{MAX_TOOL_BYTES:,}"),
        (tools(MAX_TOOLS + 1, 1), f"{MAX_TOOLS} functions"),
        (msgspec.Raw(b"3"), "list"),
        (msgspec.Raw(b"[3]"), "objects"),
        (msgspec.Raw(b"[" + b"[" * 3000 + b"]" * 3000 + b"]"), "JSON"),
    ):
        with pytest.raises(Exception, match=says):
            read_tools(written)
    assert len(read_tools(tools(MAX_TOOLS, 100)) or ()) == MAX_TOOLS


# ---- in a session


def big_tools(tag: str) -> list[dict[str, Any]]:
    return [{"type": "function", "name": f"f{i}", "description": tag * 5000} for i in range(20)]


def test_an_update_reads_and_reports_only_what_it_changes(
    running: Running, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    read_tool = module.read_tool

    def counting(json: msgspec.Raw) -> Any:
        read.append(1)
        return read_tool(json)

    monkeypatch.setattr(module, "read_tool", counting)
    with talk(running) as c:
        first = c.manual(tools=big_tools("a"), instructions="Be kind. " * 1000)
        assert first["tools"] == big_tools("a")
        assert len(read) == 20
        for fields in (
            {"tools": big_tools("a")},
            {"instructions": "Be kind. " * 1000},
            {"temperature": 0.5},
        ):
            session = c.update(**fields)
            assert len(json.dumps(session)) < SHORT_TEXT_BYTES
            assert session["audio"]["input"]["turn_detection"] is None
        assert len(read) == 20
        assert c.update(tools=big_tools("b"))["tools"] == big_tools("b")
        assert "instructions" in c.update(instructions="Short.")
        assert c.update(tools=[])["instructions"] == "Short."
    assert engine.sessions[0].expected["tools"] is None


class Counted(LoopTurns):
    taken = 0

    async def take(self) -> None:
        self.taken += 1
        await super().take()


def test_events_of_a_session_yield_after_so_many_bytes(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "TURN_S", 1e9)
    turns = running.server.service.turns = Counted()
    sound = pcm(silence(0.05))
    with talk(running) as c:
        c.append(sound * 100, piece=2400)
        c.sync()
        sent = len(base64.b64encode(sound)) * 100
    assert turns.taken >= sent // endpoint.TURN_BYTES - 1 > 1


def test_events_of_a_session_yield_after_some_time(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "TURN_S", -1.0)
    turns = running.server.service.turns = Counted()
    with talk(running) as c:
        for _ in range(10):
            c.send("input_audio_buffer.clear")
        c.sync()
    assert turns.taken >= 10


def test_a_large_update_waits_for_its_turns(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "TURN_S", 1e9)
    turns = running.server.service.turns = Counted()
    with talk(running) as c:
        c.update(temperature=0.5)
        assert not turns.taken
        c.update(tools=big_tools("a"))
    assert turns.taken >= 1 + 100_000 // (16 << 10) - 1


def test_large_messages_are_decoded_in_a_thread(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[int, bool] = {}

    def seen(data: bytes) -> ce.Event:
        threads[len(data)] = threading.current_thread() is running.thread
        return decode(data)

    monkeypatch.setattr(endpoint, "decode", seen)
    with talk(running) as c:
        c.append(bytes(LARGE), piece=LARGE)
        c.sync()
    assert {on_loop for size, on_loop in threads.items() if size > LARGE} == {False}
    assert {on_loop for size, on_loop in threads.items() if size <= LARGE} == {True}


def test_an_append_has_so_many_bytes(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime_session, "MAX_APPEND", 1 << 12)
    with talk(running) as c:
        c.append(bytes(1 << 12), piece=1 << 13)
        c.append(bytes((1 << 12) + 2), piece=1 << 13)
        error = c.until("error")["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "audio")


def test_many_sounds_are_converted_in_a_thread(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: list[bool] = []
    read_item = item_reader.read_item

    def observe(*args: Any) -> Any:
        on_loop.append(threading.current_thread() is running.thread)
        return read_item(*args)

    monkeypatch.setattr(item_reader, "read_item", observe)
    sound = {"type": "input_audio", "audio": base64.b64encode(bytes(480)).decode()}
    with talk(running) as c:
        for count in (1, 5, MAX_PARTS):
            c.send(ITEM, item=message(*[sound] * count))
            c.until("conversation.item.done")
    assert on_loop == [True, False, False]


def refused(c: Client) -> dict[str, Any]:
    event = c.until("error", "conversation.item.done", "session.updated", "response.done")
    assert event["type"] == "error", event
    return dict(event["error"])


def test_a_conversation_has_so_many_items(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "MAX_ITEMS", 3)
    with talk(running) as c:
        for _ in range(3):
            c.send(ITEM, item=text("hello"))
            c.until("conversation.item.done")
        c.send(ITEM, item=text("hello"))
        error = refused(c)
        assert (error["code"], "at most 3 items" in error["message"]) == ("invalid_value", True)


def test_an_item_can_be_told_in_one_message(running: Running, engine: ScriptedEngine) -> None:
    parts = [{"type": "input_text", "text": "\x01" * 20_000}] * 8
    with talk(running) as c:
        c.send(ITEM, item=message(*parts))
        error = refused(c)
        assert (error["code"], "more than the" in error["message"]) == ("invalid_value", True)
        c.send(ITEM, item=message(*parts[:5]))
        c.until("conversation.item.done")
    assert len(engine.sessions) == 1


def test_an_event_that_fails_does_not_end_the_session(
    running: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talk(running) as c:

        async def broken(*args: Any, **more: Any) -> Any:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(ScriptedSession, "add", broken)
        sent = c.send(ITEM, item=text("hello"))
        error = refused(c)
        assert (error["type"], error["code"], error["event_id"]) == (
            "server_error",
            "internal_error",
            sent,
        )
        assert "a bug" not in error["message"]
        assert c.update(instructions="Go on.")["instructions"] == "Go on."
    assert any(r.exc_info for r in caplog.records)


# ---- transcriptions


def never(engine: ScriptedEngine) -> asyncio.Event:
    """Requests of this engine wait until this is set."""
    event = asyncio.Event()

    async def gate(_: int) -> None:
        await event.wait()

    engine.gate = gate
    return event


def say_something(c: Client) -> None:
    c.append(pcm(speech(0.3)))
    c.send("input_audio_buffer.commit")


def test_so_many_transcriptions_wait(
    running: Running, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcribe, "MAX_WAITING", 2)
    never(engine)
    with talk(running) as c:
        c.manual(audio={"input": {"transcription": {"model": "any"}}})
        for _ in range(3):
            say_something(c)
        c.sync()
    [failed] = [
        e for e in c.seen if e["type"] == "conversation.item.input_audio_transcription.failed"
    ]
    assert failed["error"]["code"] == "server_busy"


def test_leaving_ends_transcriptions(running: Running, engine: ScriptedEngine) -> None:
    never(engine)
    with talk(running) as c:
        c.manual(audio={"input": {"transcription": {"model": "any"}}})
        for _ in range(2):
            say_something(c)
        c.sync()
    running.do(running.server.service.sessions.idle.wait())
    assert not engine.ledger.running


def test_a_transcription_that_is_cancelled_at_once_takes_no_place() -> None:
    """Its task never runs."""

    async def main() -> list[Any]:
        session = SilentSession()
        transcriber = session.session.transcriber
        for i in range(2 * transcribe.MAX_WAITING):
            entry = items.Entry(items.Item(f"i{i}", "message"))
            options = transcribe.TranscriptionOptions(session.engine.info, ce.Transcription())
            sound = EngineItem(entry.id, {"role": "user", "content": []})
            task = transcribe.TranscriptionTask(options, entry, sound, 1.0, in_conversation=True)
            transcriber.begin(task)
            transcriber.cancel(entry.id)
            while transcriber.busy:
                await asyncio.sleep(0)
        await session.session.close()
        return session.queue.events

    assert not asyncio.run(main())


@pytest.mark.parametrize("requested", [True, False])
def test_log_probabilities_of_a_transcription(
    requested: bool, running: Running, engine: ScriptedEngine
) -> None:
    word = TokenLogprob(1, "what", b"what", -0.25)

    def script(ask: Ask) -> Any:
        if "Transcribe the" not in ask.texts[0]:
            return plain(ask)
        assert ask.given["params"].logprobs == (0 if requested else None)
        return [TextDelta((1,), "what", (word,) if requested else ())]

    engine.script = script
    with talk(running) as c:
        include = {"include": [options.LOGPROBS]} if requested else {}
        session = c.manual(audio={"input": {"transcription": {"model": "any"}}}, **include)
        assert session["include"] == ([options.LOGPROBS] if requested else None)
        say_something(c)
        done = c.until("conversation.item.input_audio_transcription.completed")
    expected = [{"token": "what", "logprob": -0.25, "bytes": list(b"what")}] if requested else None
    assert done.get("logprobs") == expected
    delta = next(e for e in c.seen if e["type"].endswith("transcription.delta"))
    assert delta.get("logprobs") == expected


# ---- what has no effect is refused


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"truncation": "disabled"}, "truncation"),
        ({"truncation": {"type": "retention_ratio", "retention_ratio": 0.8}}, "truncation"),
        ({"include": ["message.input_image.image_url"]}, "include"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    session: dict[str, Any], param: str, running: Running
) -> None:
    with talk(running) as c:
        c.send("session.update", session={"type": "realtime", "instructions": "Sing.", **session})
        error = refused(c)
        assert (error["code"], error["param"]) == ("invalid_value", param)
        assert c.update(temperature=1.0)["instructions"] == "", "all of that update"


def test_values_that_mean_the_default_are_taken(running: Running) -> None:
    with talk(running) as c:
        for session in (
            {"audio": {"output": {"speed": 1}}, "truncation": "auto", "include": None},
            {"audio": {"output": {"speed": None}}, "truncation": None, "include": []},
            {"truncation": {"type": "auto"}},
        ):
            updated = c.update(**session)
            speed = updated["audio"]["output"]["speed"]
            assert (speed, updated["truncation"], updated["include"]) == (
                1.0,
                "auto",
                None,
            )
        c.send(
            "response.create",
            response={"audio": {"output": {"speed": 4.1}}, "instructions": "Sing."},
        )
        assert refused(c)["param"] == "response.audio.output.speed"


# ---- leaving


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_leaving_logs_no_stack_trace(
    at: int, running: Running, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The web server says in two ways that nobody is there any more, depending on who closed
    first."""
    service = running.server.service
    for error in (OSError(), RuntimeError("Unexpected ASGI message 'websocket.send'")):
        sent: list[str] = []

        async def send(message: Any, sent: list[str] = sent, error: Exception = error) -> None:
            sent.append(message["type"])
            if len(sent) > at and (at or isinstance(error, OSError)):
                raise error

        events = [{"type": "websocket.connect"}]
        body = {"instructions": "Speak."}
        events += [
            {
                "type": "websocket.receive",
                "text": json.dumps({"type": "response.create", "response": body}),
            }
        ]

        async def receive(events: list[Any] = events) -> Any:
            if events:
                return events.pop(0)
            return await asyncio.Event().wait()

        request_log = RequestLog(RequestId("ws"), "ws", 0.0)
        scope = {
            "type": "websocket",
            "query_string": b"",
            REQUEST_LOG: request_log,
            "extensions": {},
        }
        if at == 0 and isinstance(error, RuntimeError):
            continue
        running.do(Realtime(service)(scope, receive, send))
        assert request_log.ended == "left"
    running.do(service.sessions.idle.wait())
    assert not engine.ledger.running
    assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]


def test_a_server_that_drains_answers_no_further_turn(engine: ScriptedEngine) -> None:
    """A turn that ended while an answer was running is not answered once the server is about to
    stop."""
    loop_event = asyncio.Event()

    async def gate(i: int) -> None:
        if i >= 6:
            await loop_event.wait()

    engine.gate = gate
    with talking(engine, drain_timeout=30.0) as running, talk(running) as c:
        c.update(
            audio={"input": {"turn_detection": {"type": "server_vad", "interrupt_response": False}}}
        )
        c.append(pcm(silence(0.3), speech(0.7), silence(1.0)))
        c.until("response.output_audio.delta")
        c.append(pcm(speech(0.5), silence(1.0)))
        c.until("input_audio_buffer.committed")
        c.sync()
        running.loop.call_soon_threadsafe(running.server.stop)

        async def drains() -> None:
            await running.server.service.sessions.draining.wait()
            loop_event.set()

        running.do(drains())
        assert c.until("response.done")["response"]["status"] == "completed"
        with pytest.raises(Exception, match="1012"):
            c.until("response.created")
    assert len(engine.asks) == 1
