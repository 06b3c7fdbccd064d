"""Who may open a session, how many there may be, and how one ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from stretto.server.realtime import endpoint
from stretto.server.realtime import response as response_module
from tests.server.conftest import PATIENCE_S, Running, read_until
from tests.server.realtime.client import closed, hold, talk, types
from tests.server.realtime.conftest import talking
from tests.server.realtime.sounds import b64, pcm, silence, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import say

KEY = "secret-key"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with talking(ScriptedEngine(), api_key=(KEY, "other"), realtime_sessions_per_key=2) as running:
        yield running


def refused(running: Running, path: str = "/v1/realtime", **options: Any) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as e, talk(running, path, **options):
        pass
    response = e.value.response
    return response.status_code, json.loads(response.body)["error"]["code"]


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/v1/realtime", {"additional_headers": {"Authorization": f"Bearer {KEY}"}}),
        ("/realtime", {"additional_headers": {"api-key": KEY}}),
        (f"/v1/realtime?api-key={KEY}&model=scripted", {}),
        (
            "/v1/realtime",
            {
                "subprotocols": [
                    "realtime",
                    f"openai-insecure-api-key.{KEY}",
                    "openai-agents-sdk.0.20.0",
                ]
            },
        ),
    ],
)
def test_keys_in_all_the_places_that_clients_put_them(
    guarded: Running, path: str, options: Any
) -> None:
    with talk(guarded, path, **options) as c:
        assert c.socket.subprotocol == ("realtime" if "subprotocols" in options else None)


def test_wrong_keys_are_refused_before_the_upgrade(guarded: Running) -> None:
    assert refused(guarded) == (401, "invalid_api_key")
    assert refused(guarded, "/realtime") == (401, "invalid_api_key")
    assert refused(guarded, "/v1/realtime?api-key=wrong") == (401, "invalid_api_key")
    assert refused(guarded, subprotocols=["realtime", "openai-insecure-api-key.wrong"]) == (
        401,
        "invalid_api_key",
    )


def test_pages_of_others_are_refused(running: Running) -> None:
    assert refused(running, origin="https://evil.example") == (403, "origin_not_allowed")
    assert refused(running, origin="null") == (403, "origin_not_allowed")
    with talk(running, origin=f"http://127.0.0.1:{running.port}"):
        pass


def test_other_refusals(running: Running, engine: ScriptedEngine) -> None:
    assert refused(running, "/v1/realtime?model=gpt-9") == (404, "model_not_found")
    assert refused(running, "/v1/realtime/calls") == (404, "not_found")
    assert refused(running, "/v1/realtime?intent=song") == (400, "invalid_value")
    assert running.ask("/v1/realtime").status == 426
    engine.state = "loading"
    assert refused(running) == (503, "loading")
    engine.state = "ready"


def test_a_model_that_only_reads_aloud_holds_no_conversation() -> None:
    with talking(ScriptedEngine(card={"output_modalities": ("audio",)})) as running:
        assert refused(running) == (400, "invalid_value")


def test_so_many_sessions_and_no_more(guarded: Running) -> None:
    mine = {"additional_headers": {"Authorization": f"Bearer {KEY}"}}
    other = {"additional_headers": {"Authorization": "Bearer other"}}
    guarded.do(
        guarded.server.service.sessions.idle.wait()
    )  # those of earlier tests may still be closing
    with talk(guarded, **mine), talk(guarded, **mine):
        assert refused(guarded, **mine) == (429, "rate_limit_exceeded")
        with talk(guarded, **other):
            pass
    guarded.do(guarded.server.service.sessions.idle.wait())
    with talk(guarded, **mine):
        pass
    with talking(ScriptedEngine(), realtime_sessions=1) as running, talk(running):
        assert refused(running) == (429, "server_busy")


def test_a_key_is_never_logged(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    def ours() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name.startswith("stretto")]

    with caplog.at_level("INFO"):
        with talk(guarded, f"/v1/realtime?api-key={KEY}"):
            pass
        while not any("/v1/realtime" in line and "status=101" in line for line in ours()):
            time.sleep(0.01)
    assert KEY not in "".join(ours())


# ---- the end of a session


def test_too_long_and_too_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "POLL_S", 0.01)
    with talking(ScriptedEngine(), realtime_minutes=0.001) as running, talk(running) as c:
        assert c.until("error")["error"]["code"] == "session_expired"
        assert closed(c) == (1001, endpoint.EXPIRED.text)
    with talking(ScriptedEngine(), realtime_idle=0.05) as running, talk(running) as c:
        assert closed(c) == (1008, endpoint.IDLE.text)
        running.do(running.server.service.sessions.idle.wait())
        assert (
            'stretto_realtime_closed_total{reason="idle"} 1.0'
            in running.ask("/metrics").body.decode()
        )


def test_a_session_that_speaks_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "POLL_S", 0.01)
    engine, ahead, polls = ScriptedEngine(), 0.0, 0

    def monotonic() -> float:
        nonlocal polls
        polls += 1
        return time.monotonic() + ahead

    clock = SimpleNamespace(monotonic=monotonic, perf_counter=time.perf_counter)
    monkeypatch.setattr(endpoint, "time", clock)
    with talking(engine, realtime_idle=300.0) as running, talk(running) as c:
        go_on = hold(running, engine)
        c.update(instructions="Speak.")
        c.send("response.create")
        c.until("response.created")
        ahead = 400.0
        before = polls
        while polls < before + 20:
            running.do(asyncio.sleep(0))
        go_on()
        assert c.until("response.done")["response"]["status"] == "completed"
        ahead = 800.0
        assert closed(c)[0] == 1008


def test_who_has_listened_for_long_may_think_before_speaking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "POLL_S", 0.001)
    with talking(ScriptedEngine()) as running:
        service = running.server.service

        class Speaking:
            """For the first three looks."""

            polls = 0

            @property
            def busy(self) -> bool:
                self.polls += 1
                return self.polls <= 3

        async def watch() -> bool:
            session: Any = Speaking()
            connection = endpoint.RealtimeConnection(
                service, session, *[None] * 3, last_received=-1e9
            )  # type: ignore[list-item]
            task = asyncio.create_task(connection.watch())
            while session.polls < 6 and not task.done():
                await asyncio.sleep(0.001)
            ended = task.done()
            task.cancel()
            return not ended

        assert running.do(watch())


def test_draining_lets_an_answer_end(engine: ScriptedEngine) -> None:
    with (
        talking(engine, drain_timeout=30.0) as running,
        talk(running) as busy,
        talk(running) as quiet,
    ):
        go_on = hold(running, engine)
        busy.update(instructions="Speak.")
        busy.send("response.create")
        busy.until("response.created")
        running.loop.call_soon_threadsafe(running.server.stop)
        assert closed(quiet) == (1012, endpoint.DRAINING.text)
        assert refused(running)[0] == 503
        go_on()
        assert busy.until("response.done")["response"]["status"] == "completed"
        assert closed(busy) == (1012, endpoint.DRAINING.text)


def test_a_client_that_vanishes_leaves_nothing(running: Running, engine: ScriptedEngine) -> None:
    hold(running, engine)
    with talk(running) as c:
        c.append(pcm(silence(0.3), speech(0.7), silence(1.0)))
        c.until("response.created")
        c.socket.socket.close()
    running.do(running.server.service.sessions.idle.wait())
    assert not engine.ledger.running
    assert engine.sessions[0].closed
    assert running.server.service.admission.running == 0


def test_a_client_that_does_not_read_is_closed(engine: ScriptedEngine) -> None:
    """It asks for an hour of speech and takes none of it; others notice nothing."""
    engine.script = lambda ask: say("word " * 50, 600.0, 50)
    with talking(engine, send_timeout=0.3, realtime_lead=10_000.0) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE_S) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            s.sendall(
                b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: "
                b"websocket\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            )
            read_until(s, b"session.created")
            s.sendall(frame(b'{"type": "session.update", "session": {"instructions": "x"}}'))
            s.sendall(frame(b'{"type": "response.create"}'))
            with talk(running) as other:
                other.update(instructions="fine")
            running.do(running.server.service.sessions.idle.wait())
        assert (
            'stretto_realtime_closed_total{reason="slow"} 1.0'
            in running.ask("/metrics").body.decode()
        )
        assert not engine.ledger.running


def frame(data: bytes) -> bytes:
    """A masked text frame."""
    assert len(data) < 126
    return bytes([0x81, 0x80 | len(data), 0, 0, 0, 0]) + data


def test_a_message_too_large_ends_only_its_own_session(running: Running) -> None:
    with talk(running) as other:
        with contextlib.suppress(ConnectionClosed), talk(running) as c:
            c.send("input_audio_buffer.append", audio="A" * (22 << 20))
            assert closed(c)[0] == 1009
        other.update(instructions="still here")


def test_a_session_holds_so_much_and_no_more() -> None:
    with talking(ScriptedEngine(), realtime_held_mb=1.0) as running, talk(running) as c:
        c.manual()
        c.append(bytes(500_000), 500_000)
        c.append(bytes(500_000), 500_000)
        assert c.until("error")["error"]["code"] == "input_audio_buffer_full"
        part = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * (1 << 20)}
        c.send(
            "conversation.item.create", item={"type": "message", "role": "user", "content": [part]}
        )
        assert c.until("error")["error"]["code"] == "conversation_full"
        c.send("input_audio_buffer.clear")
        c.until("input_audio_buffer.cleared")


def test_what_the_engine_has_forgotten_is_not_held() -> None:
    engine = ScriptedEngine()
    with talking(engine, realtime_held_mb=1.0) as running, talk(running) as c:
        c.manual()
        c.append(bytes(600_000), 600_000)
        c.send("input_audio_buffer.commit")
        c.until("conversation.item.done")
        c.append(bytes(600_000), 600_000)
        assert c.until("error")["error"]["code"] == "input_audio_buffer_full"
        session = engine.sessions[0]
        running.do(session.remove(session.items[0].id))  # as its context was full
        running.do(session.add({"role": "user", "content": "Go on."}, id="own"))
        c.send("response.create")
        c.until("response.done")
        c.append(bytes(600_000), 600_000)
        assert not c.sync()


def test_sound_is_sent_no_further_ahead_than_allowed(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 0.2 s; the next one goes when no more than 0.5 s are ahead."""
    now = [0.0]
    monkeypatch.setattr(response_module, "clock", lambda: now[0])
    engine.script = lambda ask: say("word", 60.0, 300)
    with talking(engine, realtime_lead=0.5) as running, talk(running) as c:
        c.manual(instructions="x")
        c.send("response.create")
        sent = 0
        for now[0], expected in ((0.0, 3), (0.45, 5), (0.85, 7)):
            while sent < expected:
                c.until("response.output_audio.delta")
                sent += 1
            assert "response.output_audio.delta" not in types(c.sync())
        c.send("response.cancel")
        assert c.until("response.done")["response"]["status"] == "cancelled"


def test_pings_are_answered_while_much_is_going_on(running: Running) -> None:
    with talk(running) as c:
        c.manual()
        for _ in range(3):
            c.send("input_audio_buffer.append", audio=b64(bytes(10 << 20)))
            assert c.socket.ping().wait()


def test_plain_http_still_works_beside_it(running: Running) -> None:
    with connect(f"ws://127.0.0.1:{running.port}/v1/realtime"):
        assert running.ask("/health").status == 200
