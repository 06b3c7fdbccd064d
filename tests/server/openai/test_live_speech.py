"""Speech of a text that comes over a WebSocket while it is written: as of the text at once; limits
and errors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import runpy
import sys
import wave
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from stretto.config.engine import EngineConfig, HostSettings
from stretto.config.server import ServerConfig
from stretto.engine.passages import PAUSE_S
from stretto.preprocess.pool.pool import PoolSettings
from stretto.server import keys
from stretto.server.admission import Admission
from stretto.server.openai import live_speech as livespeech
from stretto.server.request_log import REQUEST_LOG, RequestLog
from stretto.server.service import Service
from stretto.testing.qwen3_tts import write_tiny
from stretto.types import RequestId
from tests.server.asks import ASK, CHAT
from tests.server.conftest import Running
from tests.server.http.bodies import Turned
from tests.server.openai.clips import SPEECH, VOICES, same, sound
from tests.server.real_engine import Served, served
from tests.server.scripted_engine import ScriptedEngine

EXAMPLE = Path(__file__).parents[3] / "examples" / "client_live_speech.py"
TEXT = "Hello there, how are you on this fine morning?"
FRAMES = 16
"""More than the text has tokens: the speech cannot end before the text has."""
FIXED = {"seed": 3, "min_audio_frames": FRAMES, "max_audio_frames": FRAMES}
ENDLESS = {"min_audio_frames": 4000, "max_audio_frames": 4000}


def start(folder: Path, kind: Any, **settings: Any) -> Iterator[Served]:
    if kind is not None:
        write_tiny(folder, 0, kind)
    config = EngineConfig(prompts=PoolSettings(), host=HostSettings(max_rows=4))
    with served(
        folder, config, api_key=("one", "two"), realtime_sessions_per_key=2, **settings
    ) as it:
        yield it


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from start(
        tmp_path_factory.mktemp("live") / "custom",
        "custom_voice",
        allowed_origins=("https://page.example",),
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its checkpoint limits each passage to a few frames, so that long texts take no long time."""
    folder = tmp_path_factory.mktemp("live") / "base"
    write_tiny(folder, 0, "base")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 4}))
    yield from start(folder, None)


@contextmanager
def opened(it: Served, key: str = "one", **options: Any) -> Iterator[ClientConnection]:
    options.setdefault("additional_headers", {"authorization": f"Bearer {key}"})
    address = f"ws://127.0.0.1:{it.running.port}{livespeech.PATH}"
    with connect(address, proxy=None, open_timeout=None, ping_interval=None, **options) as socket:
        yield socket


def send(socket: ClientConnection, message: str | bytes) -> None:
    with contextlib.suppress(
        ConnectionClosed
    ):  # the server may have had enough of what came before
        socket.send(message)


def tell(socket: ClientConnection, type: str, **fields: Any) -> None:
    send(socket, json.dumps({"type": type, **fields}))


def heard(socket: ClientConnection) -> tuple[list[dict[str, Any]], bytes]:
    """Events and bytes until the server closes."""
    events: list[dict[str, Any]] = []
    data = b""
    with contextlib.suppress(ConnectionClosed):
        while True:
            message = socket.recv()
            if isinstance(message, bytes):
                data += message
            else:
                events.append(json.loads(message))
    return [*events, {"type": "closed", "code": socket.close_code}], data


def spoken(it: Served, *pieces: str, **config: Any) -> np.ndarray:
    with opened(it) as socket:
        tell(socket, "session.config", **{**FIXED, **config})
        for piece in pieces:
            tell(socket, "input.text", text=piece)
        tell(socket, "input.done")
        events, data = heard(socket)
    assert [e["type"] for e in events] == ["audio.start", "audio.done", "session.done", "closed"], (
        events
    )
    assert (events[0]["format"], events[0]["sample_rate"], events[-1]["code"]) == (
        "pcm",
        24_000,
        1000,
    )
    assert events[1]["total_bytes"] == len(data)
    assert events[1]["usage"]["output_tokens"] == FRAMES
    assert events[1]["usage"]["input_tokens"] == 3 + len(
        it.engine.builder.tokenizer.encode(TEXT)
    ), "and its role"
    return np.frombuffer(data, np.int16)


def test_pieces_are_the_text_at_once(custom: Served) -> None:
    whole = spoken(custom, TEXT)
    assert len(whole) == FRAMES * 1920
    assert same(whole, spoken(custom, *TEXT))
    assert same(
        whole,
        spoken(custom, "", *(f"{word} " for word in TEXT.split(" ")[:-1]), TEXT.split(" ")[-1], ""),
    )
    assert not same(whole, spoken(custom, TEXT, voice="vivian"))


def test_a_cloned_voice_as_by_the_other_route(base: Served) -> None:
    """Which has the same layout for a text that is there."""
    base.post(VOICES, 1, name="granny", audio=sound(), text="hello")
    at_once = base.post(SPEECH, 1, input=TEXT, voice="granny", response_format="pcm", **FIXED).body
    assert same(np.frombuffer(at_once, np.int16), spoken(base, *TEXT, voice="granny"))


def test_a_long_text_is_cut_as_by_the_other_route(base: Served) -> None:
    """And spoken on, though the speech of a passage may end before its text has come."""
    base.post(VOICES, 1, name="reader", audio=sound())
    text = " ".join(
        f"{'The rain in the garden is quiet this morning, ' * 18}and number {i} ends."
        for i in range(3)
    )
    few = {"greedy_speech": True, "voice": "reader"}
    at_once = base.post(SPEECH, 1, input=text, response_format="pcm", **few).body
    assert len(at_once) > 2 * (3 * 2 * 1920 + 2 * int(PAUSE_S * 24_000)), "three passages"
    for size in (100, len(text)):
        with opened(base) as socket:
            tell(socket, "session.config", **few)
            for i in range(0, len(text), size):
                tell(socket, "input.text", text=text[i : i + size])
            tell(socket, "input.done")
            events, data = heard(socket)
        assert events[-1]["code"] == 1000, events
        assert events[1]["finish_reason"] == "length", "of a passage at least"
        assert same(np.frombuffer(at_once, np.int16), np.frombuffer(data, np.int16))


def test_speech_starts_before_the_text_ends_and_a_leaver_is_freed(custom: Served) -> None:
    with opened(custom) as socket:
        tell(socket, "session.config", **ENDLESS)
        tell(socket, "input.text", text=TEXT)
        assert json.loads(socket.recv())["type"] == "audio.start"
        assert isinstance(socket.recv(), bytes)
    custom.do(nothing_left(custom))


def test_sound_in_events_and_in_a_format(custom: Served) -> None:
    with opened(custom) as socket:
        tell(
            socket,
            "session.config",
            **FIXED,
            encoding="base64",
            response_format="wav",
            stream_audio=True,
        )
        tell(socket, "input.text", text=TEXT)
        tell(socket, "input.done")
        events, data = heard(socket)
    assert not data
    sound = b"".join(
        base64.b64decode(e["audio"]) for e in events if e["type"] == "speech.audio.delta"
    )
    assert sound.startswith(b"RIFF")
    assert same(np.frombuffer(sound[44:], np.int16), spoken(custom, TEXT))


CONFIG = {"type": "session.config", **ENDLESS}  # not over before it is wrong
LONG = {"type": "input.text", "text": "a " * 20_000}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"type": "input.text", "text": "a"}], "type"),
        ([{**CONFIG, "voice": "nobody"}, {"type": "input.text", "text": "a"}], "voice"),
        ([{**CONFIG, "language": "klingon"}, {"type": "input.text", "text": "a"}], "language"),
        ([{**CONFIG, "response_format": "amr"}], "response_format"),
        ([{**CONFIG, "speed": 0.2}, {"type": "input.text", "text": "a"}], "speed"),
        ([{**CONFIG, "colour": "red"}], "colour"),
        ([CONFIG, CONFIG], "type"),
        ([CONFIG, {"type": "input.done"}], "input"),
        ([CONFIG, {"type": "input.text", "text": " "}, {"type": "input.done"}], "input"),
        ([CONFIG, {"type": "input.text", "text": 5}], "input"),
        ([CONFIG, LONG, LONG], "input"),
        ([CONFIG, {"type": "input.text", "text": "a"}, {"type": "input.done"},
        {"type": "input.done"}], "type"),
        ([{"type": "nonsense"}], "type"),
        ([b"\xff\x00"], None),
        ([b"[" * 100_000], None),
    ],
)  # fmt: skip
def test_bad_messages_end_the_connection(
    custom: Served, messages: list[Any], param: str | None
) -> None:
    with opened(custom) as socket:
        for message in messages:
            send(socket, message if isinstance(message, bytes) else json.dumps(message))
        events, _ = heard(socket)
    [error] = [e for e in events if e["type"] == "error"]
    assert (error["error"]["type"], events[-1]["code"]) == ("invalid_request_error", 1008)
    assert error["error"]["param"] == param, error
    custom.do(nothing_left(custom))


async def nothing_left(it: Served) -> None:
    service = it.running.server.service
    await service.sessions.idle.wait()
    await service.admission.idle.wait()
    while it.engine.metrics()["stretto_engine_running"]:
        await asyncio.sleep(0.01)


def test_handshakes_are_refused_as_those_of_sessions(custom: Served) -> None:
    def refused(**options: Any) -> tuple[int, str]:
        with pytest.raises(InvalidStatus) as e, opened(custom, **options):
            pass
        return e.value.response.status_code, json.loads(e.value.response.body)["error"]["code"]

    assert refused(key="wrong") == (401, "invalid_api_key")
    assert refused(origin="https://elsewhere.example") == (403, "origin_not_allowed")
    with opened(custom, origin="https://page.example"):
        pass
    custom.do(nothing_left(custom))  # one that has just been closed may still count
    with opened(custom), opened(custom):
        assert refused() == (429, "rate_limit_exceeded")
        with opened(custom, key="two"):
            pass
    custom.do(nothing_left(custom))
    page = {"subprotocols": ["speech", "openai-insecure-api-key.one"], "additional_headers": {}}
    with opened(custom, **page) as socket:
        assert socket.subprotocol == "speech"
    asked = custom.running.ask(livespeech.PATH, headers={"authorization": "Bearer one"})
    assert (asked.status, asked.headers["upgrade"]) == (426, "websocket")
    custom.do(nothing_left(custom))


def test_who_is_silent_is_sent_away(custom: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livespeech, "INPUT_TIMEOUT_S", 0.05)
    with opened(custom) as socket:
        tell(socket, "session.config", **FIXED)
        tell(socket, "input.text", text="Hello")
        events, _ = heard(socket)
    assert events[-2]["error"]["code"] == "timeout"
    custom.do(nothing_left(custom))


def test_the_example_as_it_stands(
    custom: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", StringIO("Hello, how are you?"))
    monkeypatch.setattr(sys, "argv", ["client_live_speech.py", custom.running.url, "one"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "s of speech in speech.wav" in capsys.readouterr().out
    with wave.open("speech.wav") as file:
        assert file.getnframes() >= 2 * 1920


# ---- with a model that needs the whole text, as the scripted one is


@contextmanager
def scripted(live: bool = False, **settings: Any) -> Iterator[tuple[ScriptedEngine, Served]]:
    engine = ScriptedEngine(packets=[np.full(1920, 0.25, np.float32)], live_text=live)

    async def open_engine() -> Any:
        return engine

    if "api_key_file" not in settings:
        settings["api_key"] = ("one", "two")
    with Running(open_engine, **settings) as running:
        yield engine, Served(running, engine)  # type: ignore[arg-type]


def test_a_model_that_needs_the_whole_text_has_it() -> None:
    with scripted() as (engine, it), opened(it) as socket:
        tell(socket, "session.config", voice="alloy", seed=5)
        for piece in ("Hel", "lo ", "there."):
            tell(socket, "input.text", text=piece)
        assert not engine.calls
        tell(socket, "input.done")
        events, data = heard(socket)
    assert [call["text"] for call in engine.calls] == ["Hello there."]
    assert (engine.calls[0]["voice"], engine.calls[0]["params"].seed) == ("Chelsie", 5)
    assert len(data) == events[1]["total_bytes"] == 2 * 1920
    assert events[1]["finish_reason"] == "stop"


def test_speech_that_was_cut_says_so() -> None:
    with scripted() as (engine, it), opened(it) as socket:
        engine.audio_end = "length"
        tell(socket, "session.config")
        tell(socket, "input.text", text="Hello")
        tell(socket, "input.done")
        assert heard(socket)[0][1]["finish_reason"] == "length"


def test_a_server_that_goes_keeps_nobody_who_says_nothing() -> None:
    with scripted() as (_, it), opened(it) as socket:
        tell(socket, "session.config")
        it.running.loop.call_soon_threadsafe(it.running.server.service.sessions.drain)
        events, _ = heard(socket)
    assert (events[-2]["error"]["code"], events[-1]["code"]) == ("draining", 1012)


def test_the_longest_duration() -> None:
    with scripted(realtime_minutes=0.001) as (_, it), opened(it) as socket:
        events, _ = heard(socket)
    assert (events[-2]["error"]["code"], events[-1]["code"]) == ("session_expired", 1008)


def test_a_failure_of_ours_is_said_and_nothing_more() -> None:
    with scripted() as (engine, it), opened(it) as socket:
        engine.fail_at, engine.error = 0, RuntimeError("a secret")
        tell(socket, "session.config")
        tell(socket, "input.text", text="Hello")
        tell(socket, "input.done")
        events, _ = heard(socket)
    assert (events[-2]["error"]["code"], events[-1]["code"]) == ("internal_error", 1011)
    assert "secret" not in json.dumps(events)


def test_requests_of_others_count() -> None:
    async def take(service: Any) -> Any:
        place = service.admission.place("someone else")
        await place.__aenter__()
        return place

    async def leave(place: Any) -> None:
        await place.__aexit__(None, None, None)

    with scripted(max_concurrent=1, max_queue=0) as (_, it):
        with opened(it) as socket:
            place = it.running.do(take(it.running.server.service))
            tell(socket, "session.config")
            tell(socket, "input.text", text="Hello")
            tell(socket, "input.done")
            events, _ = heard(socket)
        assert (events[-2]["error"]["code"], events[-1]["code"]) == ("server_busy", 1008)
        with pytest.raises(InvalidStatus) as e, opened(it):
            pass
        assert e.value.response.status_code == 429
        it.running.do(leave(place))


# ---- places: only while there is text ahead of the speech


def until(it: Served, condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    it.running.do(wait())


def ask(it: Served, key: str = "two") -> int:
    return it.running.ask(CHAT, ASK, headers={"authorization": f"Bearer {key}"}).status


@contextmanager
def dribbling(it: Served, count: int) -> Iterator[list[ClientConnection]]:
    """Texts of which two words have come."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(opened(it)) for _ in range(count)]
        for socket in sockets:
            tell(socket, "session.config")
            tell(socket, "input.text", text="two words ")
        yield sockets


def test_a_place_goes_back_when_all_of_the_text_is_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livespeech, "KEEP_PLACE_S", 0.01)
    with scripted(live=True, max_concurrent=4, max_queue=0) as (engine, it):
        admission = it.running.server.service.admission
        with dribbling(it, 1) as [socket]:
            until(it, lambda: len(engine.ledger.running) == 1 and admission.running == 0)
            with ExitStack() as stack:
                for i in range(4):
                    it.do(stack_place(stack, it, admission.place(f"client {i}")))
                assert ask(it) == 429
            assert ask(it) == 200
            tell(socket, "input.text", text="and more")
            tell(socket, "input.done")
            events, data = heard(socket)
        assert events[-1]["code"] == 1000
        assert len(data) == 2 * 2 * 1920
        it.do(nothing_waits(it))


def test_a_text_that_goes_on_waits_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livespeech, "KEEP_PLACE_S", 0.01)
    with scripted(live=True, max_concurrent=4) as (engine, it):
        admission = it.running.server.service.admission
        with dribbling(it, 1) as [socket]:
            until(it, lambda: len(engine.ledger.running) == 1 and admission.running == 0)
            with ExitStack() as stack:
                for i in range(4):
                    it.do(stack_place(stack, it, admission.place(f"client {i}")))
                tell(socket, "input.text", text="and more")
                until(it, lambda: admission.waiting == 1)
            tell(socket, "input.done")
            events, data = heard(socket)
        assert (events[-1]["code"], len(data)) == (1000, 2 * 2 * 1920)


def test_a_text_with_speech_to_come_keeps_its_place() -> None:
    """The clock begins anew with each piece of text and of sound."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        admission = Admission(2, 2)
        async with admission.place("me", live=True) as place:
            stream = livespeech.SpeechStream(None, None, None, None)  # type: ignore[arg-type]
            text = stream.read_text("one ", place)
            assert await anext(text) == "one "
            for _ in range(3):
                coming = asyncio.ensure_future(anext(text))
                loop.ahead += 0.9 * livespeech.KEEP_PLACE_S  # type: ignore[attr-defined]
                await turn()
                stream.mark_progress()  # sound came
                loop.ahead += 0.9 * livespeech.KEEP_PLACE_S  # type: ignore[attr-defined]
                await turn()
                assert admission.running == 1
                stream.pieces.put_nowait("more ")
                assert await coming == "more "
            coming = asyncio.ensure_future(anext(text))
            await turn()
            loop.ahead += livespeech.KEEP_PLACE_S  # type: ignore[attr-defined]
            while admission.running:
                await asyncio.sleep(0)
            stream.pieces.put_nowait("end")
            assert await coming == "end"
            assert admission.running == 1

    async def turn() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    with contextlib.closing(Turned()) as loop:
        loop.run_until_complete(main())


def test_dribbling_texts_leave_others_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of one key at a server for 64, which are as many as there were places."""
    monkeypatch.setattr(livespeech, "KEEP_PLACE_S", 0.01)
    with scripted(live=True) as (engine, it), dribbling(it, 64):
        admission = it.running.server.service.admission
        until(it, lambda: admission.waiting == 48 and admission.running == 0)
        assert len(engine.ledger.running) == 16, "half of those that may be read at once"
        assert ask(it) == 200
        with opened(it, "two") as socket:
            tell(socket, "session.config")
            tell(socket, "input.text", text="Hello")
            tell(socket, "input.done")
            events, _ = heard(socket)
            assert events[-1]["code"] == 1000


async def nothing_waits(it: Served) -> None:
    service = it.running.server.service
    await service.sessions.idle.wait()
    assert (
        service.admission.running,
        service.admission.waiting,
        service.admission.live.held,
    ) == (0, 0, 0)


async def stack_place(stack: ExitStack, it: Served, place: Any) -> None:
    await place.__aenter__()
    stack.callback(lambda: it.do(leave_place(place)))


async def leave_place(place: Any) -> None:
    await place.__aexit__(None, None, None)


# ---- limits of a connection


def test_a_key_that_is_revoked_ends_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "REREAD_S", 0.0)
    monkeypatch.setattr(livespeech, "POLL_S", 0.01)
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    with scripted(live=True, api_key_file=str(file)) as (engine, it), dribbling(it, 1) as [socket]:
        until(it, lambda: bool(engine.ledger.running))
        with opened(it, "two") as other:
            file.write_text("two\n# one has gone\n")
            events, _ = heard(socket)
            assert (events[-2]["error"]["code"], events[-1]["code"]) == ("invalid_api_key", 1008)
            tell(other, "session.config")
            tell(other, "input.text", text="Hello")
            tell(other, "input.done")
            assert heard(other)[0][-1]["code"] == 1000


def test_a_message_has_a_greatest_size() -> None:
    with scripted() as (_, it), opened(it) as socket:
        send(socket, json.dumps({"type": "session.config"}) + " " * livespeech.MAX_MESSAGE)
        tell(socket, "session.config")  # which would be one too many
        events, _ = heard(socket)
    assert (events[-2]["error"]["code"], events[-1]["code"]) == ("context_length_exceeded", 1008)
    assert f"{livespeech.MAX_MESSAGE:,} bytes" in events[-2]["message"]


def test_many_messages_at_once_leave_others_their_turn() -> None:
    """Those that are here already come without any waiting."""
    sent: list[Any] = []

    async def main() -> None:
        service = Service.of(ServerConfig(), open_engine)
        service.start()
        await service.opened.wait()
        many = 2000
        messages = iter(
            [{"type": "websocket.connect"}, text({"type": "session.config"})]
            + [text({"type": "input.text", "text": "a"})] * many
            + [{"type": "websocket.disconnect"}]
        )
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def receive() -> Any:
            return next(messages)

        async def take(message: Any) -> None:
            sent.append(message["type"])

        beside = asyncio.create_task(others())
        request_log = RequestLog(RequestId("x"), "x", 0.0, owner="anyone", client="me")
        await livespeech.LiveSpeech(service)(
            {"type": "websocket", REQUEST_LOG: request_log}, receive, take
        )
        beside.cancel()
        await service.close()
        assert request_log.ended == "left"
        assert turns > many / 2

    async def open_engine() -> Any:
        return ScriptedEngine()

    asyncio.run(main())
    assert sent == ["websocket.accept"]


def test_a_listener_that_takes_nothing_is_dropped() -> None:
    """A message may take `send_timeout` seconds, and then what it holds goes back."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        service = Service.of(ServerConfig(send_timeout=30.0), open_engine)
        service.start()
        await service.opened.wait()
        coming = iter(
            [
                {"type": "websocket.connect"},
                text({"type": "session.config"}),
                text({"type": "input.text", "text": "Hello"}),
                text({"type": "input.done"}),
            ]
        )
        sending = asyncio.Event()

        async def receive() -> Any:
            if (message := next(coming, None)) is None:
                await asyncio.Event().wait()
            return message

        async def take(message: Any) -> None:
            if message["type"] != "websocket.accept":
                sending.set()
                await asyncio.Event().wait()

        request_log = RequestLog(RequestId("x"), "x", 0.0, owner="anyone", client="me")
        app = livespeech.LiveSpeech(service)
        task = asyncio.ensure_future(
            app({"type": "websocket", REQUEST_LOG: request_log}, receive, take)
        )
        await sending.wait()
        await pass_time(loop, 29.0)
        assert (task.done(), service.admission.running) == (False, 1)
        await pass_time(loop, 2.0)
        assert (task.done(), service.admission.running) == (True, 0)
        assert (request_log.ended, service.sessions.running) == ("left", 0)
        await service.close()

    async def open_engine() -> Any:
        return ScriptedEngine(packets=[np.zeros(4000, np.float32)])

    with contextlib.closing(Turned()) as loop:
        loop.run_until_complete(main())


async def pass_time(loop: Any, seconds: float) -> None:
    loop.ahead += seconds
    for _ in range(50):
        await asyncio.sleep(0)


def text(message: Any) -> Any:
    return {"type": "websocket.receive", "bytes": json.dumps(message).encode()}
