"""Requests to a server that traces: each is a span with its stages, in its caller's trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stretto.config.engine import EngineConfig
from stretto.config.server import ServerConfig
from stretto.errors import Invalid, StageDead, StrettoError
from stretto.observe import otlp
from tests.observe.collector import Collector, collecting
from tests.observe.spans import SPAN, TRACE
from tests.server.conftest import Running, serve
from tests.server.real_engine import served
from tests.server.realtime.client import add_text, answer, talk
from tests.server.realtime.conftest import talking
from tests.server.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "mine"}
MS = 1_000_000


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(otlp, "BATCH_WAIT_S", 0.0)
    with collecting() as it:
        yield it


def exported(running: Running) -> str:
    [line] = [
        line
        for line in running.ask("/metrics").body.decode().splitlines()
        if line.startswith('stretto_otlp_traces_total{outcome="exported"}')
    ]
    return line.rpartition(" ")[2]


def test_a_spoken_answer_and_what_each_stage_did(tiny_dir: Path, collector: Collector) -> None:
    with served(tiny_dir, EngineConfig(), otlp_endpoint=collector.url) as it:
        body = {**ASK, "modalities": ["text", "audio"], "max_audio_frames": 4}
        reply = it.running.ask(CHAT, body, headers=HEADERS)
        assert reply.status == 200
    spans = collector.spans(collector.received.qsize())
    whole = spans["POST chat"]
    assert (whole.trace, whole.parent) == (TRACE, SPAN)
    assert whole.attributes["stretto.client_request_id"] == "mine"
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["gen_ai.usage.output_tokens"] == 3
    assert whole.attributes["stretto.first_audio_s"] > 0
    stages = {
        s.attributes["stretto.stage"] for n, s in spans.items() if n != "POST chat" and s.attributes
    }
    assert stages == {"thinker", "talker", "code2wav", "packets"}
    for span in spans.values():
        assert span.trace == TRACE
        assert whole.start - MS <= span.start <= span.stop <= whole.stop + MS


def test_the_log_names_the_trace(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="stretto.access")
    with serve(ScriptedEngine(), otlp_endpoint=collector.url) as running:
        running.ask(CHAT, ASK, headers=HEADERS)
        running.ask("/health")
    assert [r.fields["trace"] for r in caplog.records] == [TRACE]  # type: ignore[attr-defined]
    assert collector.spans(1).keys() == {"POST chat"}
    assert collector.received.empty(), "all was sent when the server ended; probes are no requests"


def test_requests_are_counted_when_they_are_sent(collector: Collector) -> None:
    with serve(ScriptedEngine(), otlp_endpoint=collector.url) as running:
        assert exported(running) == "0.0"
        running.ask(CHAT, ASK)
        collector.spans(1)
        while exported(running) != "1.0":
            pass


@pytest.mark.parametrize(
    ("error", "words"), [(StageDead("talker: it died"), "talker: it died"), (Invalid("no"), "")]
)
def test_what_fails_by_the_servers_fault_is_an_error(
    error: StrettoError, words: str, collector: Collector
) -> None:
    engine = ScriptedEngine(fail_at=0, error=error)
    with serve(engine, otlp_endpoint=collector.url) as running:
        running.ask(CHAT, ASK)
        [span] = collector.spans(1).values()
    assert span.error == words
    assert span.attributes["stretto.ended"] == type(error).__name__


def test_speech_that_is_written_meanwhile(collector: Collector) -> None:
    engine = ScriptedEngine(packets=[np.zeros(1920, np.float32)])
    with serve(engine, otlp_endpoint=collector.url) as running:
        body = {"input": "Hello", "voice": "Ethan", "response_format": "pcm"}
        running.ask("/v1/audio/speech", body)
        [span] = collector.spans(1).values()
    assert span.name == "POST speech"
    assert span.attributes["stretto.audio_s"] == 0.08


def test_answers_of_a_session_are_parts_of_it(collector: Collector) -> None:
    with talking(ScriptedEngine(), otlp_endpoint=collector.url) as running:
        with talk(running, additional_headers=HEADERS) as c:
            c.manual()
            add_text(c, "Hello")
            answer(c)
        spans = collector.spans(2)
    part, whole = spans["realtime response"], spans["WEBSOCKET realtime"]
    assert (whole.trace, whole.parent) == (TRACE, SPAN)
    assert (part.trace, part.parent) == (TRACE, whole.id)
    assert part.attributes["stretto.outcome"] == "completed"
    assert part.attributes["stretto.audio_s"] == 1.0
    assert whole.start <= part.start <= part.stop <= whole.stop


@pytest.mark.parametrize("url", ["collector:4318", "ftp://c", "http://user:word@c", "http://c?x=1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(Invalid, match="otlp_endpoint"):
        ServerConfig(otlp_endpoint=url)
