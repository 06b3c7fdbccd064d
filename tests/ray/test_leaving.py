"""What a replica that goes tells its WebSockets, without Ray: when it goes is told by hand."""

from __future__ import annotations

import asyncio
import logging

import pytest

from stretto.ray import leaving
from stretto.ray.leaving import MISSING, close_websockets_on_exit
from tests.server.realtime.client import closed, hold, talk
from tests.server.realtime.conftest import talking
from tests.server.scripted_engine import ScriptedEngine


def test_sessions_are_told_and_requests_are_taken_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "POLL_S", 0.001)
    engine = ScriptedEngine()
    with (
        talking(engine, drain_timeout=60.0) as running,
        talk(running) as busy,
        talk(running) as quiet,
    ):
        going: list[bool] = []
        service = running.server.service
        work = asyncio.run_coroutine_threadsafe(
            close_websockets_on_exit(service, lambda: bool(going)), running.loop
        )
        go_on = hold(running, engine)
        busy.update(instructions="Speak.")
        busy.send("response.create")
        busy.until("response.created")
        quiet.sync()
        going.append(True)
        assert closed(quiet)[0] == 1012
        assert running.ask("/health").status == 200, (
            "the ingress sends more until it has heard of it"
        )
        go_on()
        assert busy.until("response.done")["response"]["status"] == "completed"
        assert closed(busy)[0] == 1012
        work.cancel()


def test_what_lasts_too_long_is_cut() -> None:
    with talking(ScriptedEngine(), drain_timeout=0.0) as running:
        service = running.server.service
        running.do(close_websockets_on_exit(service, lambda: True))
        assert service.cut.done()
        assert running.ask("/health").status == 503


def test_a_missing_flag_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with (
        talking(ScriptedEngine()) as running,
        caplog.at_level(logging.WARNING, logger=leaving.__name__),
    ):
        running.do(close_websockets_on_exit(running.server.service, None))
        assert MISSING in caplog.text
        assert not running.server.service.sessions.draining.is_set()
