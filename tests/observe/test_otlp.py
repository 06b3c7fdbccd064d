"""Traces reach a collector, and one that is slow, broken or absent costs only traces."""

from __future__ import annotations

import builtins
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.observe import otlp
from stretto.observe.otlp import MAX_WAITING, TraceExporter, trace_metrics, traces_url
from stretto.observe.trace_records import StageTimes, TraceContext, TraceRecord
from tests.observe.collector import Collector, collecting
from tests.observe.spans import SPAN, TRACE, Step

S = 1_000_000_000
SERVER, INTERNAL = 2, 1  # kinds


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as it:
        yield it


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No record waits for others."""
    monkeypatch.setattr(otlp, "BATCH_WAIT_S", 0.0)


@pytest.fixture
def exporter(collector: Collector) -> Iterator[TraceExporter]:
    it = TraceExporter(collector.url, "1.2.3")
    yield it
    collector.hold.set()
    it.close()


def record(context: TraceContext | None = None, **fields: Any) -> TraceRecord:
    given: dict[str, Any] = {
        "context": context or TraceContext.of(""),
        "name": "POST chat",
        "start_ns": 100 * S,
        "stop_ns": 103 * S,
        "attributes": {"stretto.route": "chat", "stretto.key": None},
        **fields,
    }
    return TraceRecord(**given)


def outcomes(exporter: TraceExporter) -> dict[str, float]:
    return {k.partition('"')[2].partition('"')[0]: v for k, v in exporter.metrics().items() if v}


def settle(exporter: TraceExporter, count: int) -> None:
    """Until so many records have been dealt with."""
    while sum(outcomes(exporter).values()) < count:
        os.sched_yield()


def test_a_request_with_its_queue_and_its_stages(
    collector: Collector, exporter: TraceExporter
) -> None:
    steps = [
        Step("thinker", "prefill", 0.0, 0.25),
        Step("thinker", "decode", 0.25, 0.5),
        Step("thinker", "decode", 0.5, 1.0),
        Step("packets", "packet", 0.75, 0.75),
    ]
    context = TraceContext.of(f"00-{TRACE}-{SPAN}-01")
    times = StageTimes(101 * S, steps)
    exporter.put(record(context, queued_ns=S // 2, stages=[times], error="talker: it died"))
    spans = collector.spans(5)
    whole = spans["POST chat"]
    assert (whole.trace, whole.parent, whole.id) == (TRACE, SPAN, f"{context.span_id:016x}")
    assert (whole.start, whole.stop, whole.kind) == (100 * S, 103 * S, SERVER)
    assert whole.error == "talker: it died"
    assert whole.attributes == {"stretto.route": "chat"}
    assert whole.resource["service.name"] == "stretto"
    assert whole.resource["service.version"] == "1.2.3"
    parts = {n: s for n, s in spans.items() if s is not whole}
    assert {(s.trace, s.parent, s.kind) for s in parts.values()} == {(TRACE, whole.id, INTERNAL)}
    assert {n: (s.start - 100 * S, s.stop - 100 * S) for n, s in parts.items()} == {
        "queue": (0, S // 2),
        "thinker prefill": (S, S + S // 4),
        "thinker decode": (S + S // 4, 2 * S),
        "packets packet": (S + 3 * S // 4, S + 3 * S // 4),
    }
    assert parts["thinker decode"].attributes == {"stretto.stage": "thinker", "stretto.steps": 2}
    assert collector.paths == {"/v1/traces"}


def test_parts_of_a_trace_that_began_here(collector: Collector, exporter: TraceExporter) -> None:
    session = TraceContext.of("")
    exporter.put(record(session.child(), name="realtime response", server=False))
    exporter.put(record(session, name="WEBSOCKET realtime"))
    spans = collector.spans(2)
    part, whole = spans["realtime response"], spans["WEBSOCKET realtime"]
    assert (part.trace, part.parent) == (whole.trace, whole.id)
    assert (whole.parent, part.kind) == ("", INTERNAL)


@pytest.mark.parametrize("child", [True, False])
def test_a_callers_trace_that_is_not_kept(
    child: bool, collector: Collector, exporter: TraceExporter
) -> None:
    dropped = TraceContext.of(f"00-{TRACE}-{SPAN}-00")
    exporter.put(record(dropped.child() if child else dropped))
    exporter.put(record(name="POST speech"))
    assert collector.spans(1).keys() == {"POST speech"}


def test_the_operators_own_variables(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "voices")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment=blue")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    it = TraceExporter(collector.url, "1.2.3")
    it.put(record())
    [span] = collector.spans(1).values()
    it.close()
    assert span.resource["service.name"] == "voices"
    assert span.resource["deployment"] == "blue"
    assert collector.headers["x-key"] == "secret"


@pytest.mark.parametrize("sampler", ["parentbased_traceidratio", "always_off"])
def test_a_trace_and_its_parts_are_sampled_together(
    sampler: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    it = TraceExporter(collector.url, "1")
    context = TraceContext.of("")
    it.put(record(context.child()))
    it.put(record(context))
    it.close()
    assert collector.received.empty()


def test_a_slow_collector_costs_traces_and_nothing_else(
    collector: Collector, exporter: TraceExporter
) -> None:
    collector.hold.clear()
    exporter.put(record())
    collector.asked.wait()  # the thread has this one, and is stuck with it
    for _ in range(MAX_WAITING + 7):
        exporter.put(record())
    assert outcomes(exporter) == {"dropped": 7.0}
    collector.hold.set()
    exporter.close(60.0)
    assert outcomes(exporter) == {"exported": MAX_WAITING + 1, "dropped": 7.0}


def test_a_collector_that_refuses(
    collector: Collector, exporter: TraceExporter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for count, status in enumerate((400, 400, 200), 1):
        collector.status = status
        exporter.put(record())
        settle(exporter, count)
    exporter.close(60.0)
    assert outcomes(exporter) == {"failed": 2.0, "exported": 1.0}
    said = [r.getMessage() for r in caplog.records if r.name.startswith(("stretto", "opentel"))]
    url = f"{collector.url}/v1/traces"
    assert said == [f"{url} takes no traces; they are dropped", f"traces are sent to {url}"]


def test_what_waits_is_sent_at_the_end(collector: Collector, exporter: TraceExporter) -> None:
    for _ in range(3):
        exporter.put(record())
    exporter.close(60.0)
    assert collector.received.qsize() == 3
    exporter.put(record())
    assert outcomes(exporter) == {"exported": 3.0, "dropped": 1.0}


def test_the_end_does_not_wait_for_a_collector_that_hangs(
    collector: Collector, exporter: TraceExporter
) -> None:
    collector.hold.clear()
    exporter.put(record())
    collector.asked.wait()
    exporter.put(record())
    exporter.close(0.0)  # returns, although the collector has not answered
    assert outcomes(exporter) == {"dropped": 1.0}


def test_a_record_that_is_wrong_ends_its_batch_only(
    collector: Collector, exporter: TraceExporter, caplog: pytest.LogCaptureFixture
) -> None:
    exporter.put(record(stages=[StageTimes(0, [object()])]))  # type: ignore[list-item]
    settle(exporter, 1)
    exporter.put(record())
    assert collector.spans(1)
    assert "traces could not be made" in caplog.text


def test_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "stretto.observe.otlp_spans", raising=False)
    with pytest.raises(StrettoError, match=r"^--otlp-endpoint needs .* 'stretto\[otel\]'"):
        TraceExporter("http://127.0.0.1:4318", "1")


def test_nothing_of_it_is_imported_where_it_is_off() -> None:
    code = (
        "import sys; from stretto.config.server import ServerConfig;"
        "from stretto.server.app import make_app; make_app(ServerConfig(), None);"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp", "https://c/otlp/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_addresses(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


def test_numbers_are_there_although_nothing_is_traced() -> None:
    assert set(trace_metrics().values()) == {0.0}
    assert 'stretto_otlp_traces_total{outcome="dropped"}' in trace_metrics()
