"""Numbers, histograms and spans of a process, and the trace that they make."""

from __future__ import annotations

import json
import random
from itertools import accumulate
from pathlib import Path

import pytest

from stretto.observe import recorder as recorders
from stretto.observe import trace as traces
from stretto.observe.recorder import BUCKETS_S, Histogram, Recorder, labelled
from stretto.observe.trace import TraceWriter


def test_names_are_in_prometheus_form() -> None:
    assert labelled("a") == "a"
    assert labelled("a", x="1", y="2") == 'a{x="1",y="2"}'
    assert labelled('a{x="1"}', y="2") == 'a{x="1",y="2"}'


def test_numbers_are_read_when_they_are_asked_for() -> None:
    recorder, seen = Recorder(), [1]
    recorder.number("n_total", lambda: len(seen), stage="a")
    assert recorder.values() == {'n_total{stage="a"}': 1.0}
    seen.append(2)
    assert recorder.values() == {'n_total{stage="a"}': 2.0}


def test_a_histogram_is_cumulative_and_complete() -> None:
    recorder, h = Recorder(), Histogram()
    recorder.histogram("t_seconds", h, stage="a")
    for seconds in (0.0, BUCKETS_S[3], 1.5 * BUCKETS_S[3], 100.0):
        h.observe(seconds)
    values = recorder.values()
    buckets = [v for k, v in values.items() if "_bucket" in k]
    assert buckets == sorted(buckets)
    assert len(buckets) == len(BUCKETS_S) + 1
    assert values[f't_seconds_bucket{{stage="a",le="{BUCKETS_S[3]!r}"}}'] == 2
    assert (
        values['t_seconds_bucket{stage="a",le="+Inf"}'] == values['t_seconds_count{stage="a"}'] == 4
    )
    assert values['t_seconds_sum{stage="a"}'] == pytest.approx(100.0 + 2.5 * BUCKETS_S[3])


def test_what_has_gone_is_forgotten() -> None:
    recorder = Recorder()
    for link in ("a>b", "b>c"):
        recorder.number("n_total", lambda: 1, link=link, end="in")
        recorder.histogram("t_seconds", Histogram(), link=link, end="in")
    recorder.forget(link="a>b")
    assert {name for name in recorder.values() if "a>b" in name} == set()
    assert any("b>c" in name for name in recorder.values())


def test_spans_are_kept_only_for_a_trace_and_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "MAX_SPANS", 5)
    silent, told = Recorder(), Recorder(trace=True)
    for i in range(8):
        for recorder in (silent, told):
            recorder.span("stage", f"step {i}", i, i + 1)
    assert silent.take_spans(10) == []
    assert [s[1] for s in told.take_spans(2)] == ["step 3", "step 4"]
    assert [s[1] for s in told.take_spans(10)] == ["step 5", "step 6", "step 7"]


def test_a_trace_is_json_while_it_grows_and_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = TraceWriter(tmp_path / "new folder")
    trace.write(
        "p0.0", [("writer", "decode of 3", 1_000, 3_500), ("a>b put", "chunk", 4_000, 4_001)]
    )
    trace.write("p0.1", [("voice", "decode of 1", 5_000, 6_000)])
    so_far = json.loads(trace.path.read_text().rstrip().rstrip(",") + "]")
    spans = [e for e in so_far if e["ph"] == "X"]
    assert [(e["cat"], e["ts"], e["dur"]) for e in spans] == [
        ("writer", 1.0, 2.5), ("a>b put", 4.0, 0.001), ("voice", 5.0, 1.0)
    ]  # fmt: skip
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in so_far if e["ph"] == "M"}
    assert [names[e["pid"], e["tid"]] for e in spans] == ["writer", "a>b put", "voice"]
    assert {names[p, None] for p in (1, 2)} == {"p0.0", "p0.1"}
    monkeypatch.setattr(traces, "MAX_BYTES", 10)
    trace.write("p0.0", [("writer", "too much", 0, 1)])
    assert trace.dropped == 1
    trace.close()
    whole = json.loads(trace.path.read_text())
    assert len(whole) == len(so_far) + 1


def test_durations_fall_into_their_buckets() -> None:
    rng, histogram = random.Random(1), Histogram()
    durations = sorted(10 ** rng.uniform(-6.5, 1.2) for _ in range(999))
    for duration in durations:
        histogram.observe(duration)
    upto = [sum(d <= bound for d in durations) for bound in (*BUCKETS_S, float("inf"))]
    assert list(accumulate(histogram.buckets)) == upto
    assert histogram.count == 999
    assert abs(histogram.total_s - sum(durations)) < 1e-6
