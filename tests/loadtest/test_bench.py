from __future__ import annotations

import asyncio
import json
from itertools import islice, takewhile

import pytest

from stretto.loadtest.player import Packet
from stretto.loadtest.report import errors, overview, rates, record, rows, table
from stretto.loadtest.runner import Bench, Closed, Goal, Level, Load, Open, Sample, Targets
from stretto.loadtest.sse import RequestFailed, Used
from stretto.loadtest.workload import poisson
from tests.loadtest.clock import FakeClock
from tests.loadtest.fakes import FakeServer


def run(
    load: Load, limits: Targets, *, until: float = float("inf"), **server: object
) -> tuple[FakeServer, Level]:
    clock = FakeClock()
    fake = FakeServer(clock, **server)  # type: ignore[arg-type]

    async def main() -> Level:
        return await clock.drive(Bench(fake.send, clock).run(load, limits), until)

    return fake, asyncio.run(main())


def test_what_is_measured_of_one_request() -> None:
    _, level = run(Closed(1), Targets(requests=1))
    (sample,) = level.samples
    assert sample.words == [0.1]
    assert sample.packets == [Packet(0.25, 1.0), Packet(1.5, 1.0)]
    assert (sample.first_text, sample.first_audio, sample.end) == (0.1, 0.25, 2.0)
    assert sample.rtf == 0.75
    assert (sample.finish, sample.error, sample.prompt_tokens, sample.text_tokens) == (
        "stop",
        None,
        9,
        5,
    )


@pytest.mark.parametrize("streams", [1, 3, 8])
def test_closed_loop_keeps_just_so_many_in_flight(streams: int) -> None:
    fake, level = run(Closed(streams), Targets(requests=12))
    assert fake.most == streams
    assert len(level.samples) == 12
    assert level.seconds == 2.0 * -(-12 // streams)
    assert sorted(s.index for s in level.samples) == list(range(12))


def test_closed_loop_begins_nothing_after_its_time() -> None:
    fake, level = run(Closed(2), Targets(seconds=3.0))
    assert [at for _, at in fake.sent] == [0.0, 0.0, 2.0, 2.0]
    assert level.seconds == 4.0


def test_open_loop_sends_when_chance_says_however_slow_the_server() -> None:
    fake, level = run(Open(5.0, seed=3), Targets(requests=30))
    assert [at for _, at in fake.sent] == pytest.approx(list(islice(poisson(5.0, 3), 30)))
    assert fake.most > 5
    assert len(level.good) == 30
    fake, _ = run(Open(5.0, seed=3), Targets(seconds=2.0))
    assert len(fake.sent) == len(list(takewhile(lambda at: at < 2.0, poisson(5.0, 3))))


def test_warm_up_is_not_counted_and_not_repeated() -> None:
    fake, level = run(Closed(2), Targets(requests=4, warmup=3))
    assert len(fake.sent) == 7
    assert sorted(s.index for s in level.samples) == [3, 4, 5, 6]
    assert min(s.sent for s in level.samples) == 0.0


def test_failures_are_counted_by_kind_and_the_rest_goes_on() -> None:
    broken = {
        1: RequestFailed("http 429", "full"),
        3: RequestFailed("timeout", "?"),
        4: RequestFailed("http 429", "full"),
    }
    _, level = run(Closed(2), Targets(requests=6), broken=broken)
    assert errors(level) == {"http 429": 2, "timeout": 1}
    assert len(level.good) == 3
    words = table(level, [0.0])
    assert "3 failed: 2 http 429, 1 timeout" in words
    assert "the first said: full" in words


def test_answer_without_speech_is_a_failure() -> None:
    _, level = run(Closed(1), Targets(requests=2), silent=True)
    assert errors(level) == {"no audio": 2}


@pytest.mark.parametrize("load", [Closed(2), Open(1.0)])
def test_interrupted_run_gives_what_it_has(load: Load) -> None:
    fake, level = run(load, Targets(requests=100), until=5.0)
    assert level.interrupted
    assert 0 < len(level.samples) < 100
    assert all(s.end == 2.0 for s in level.samples)
    assert fake.running == 0, "nothing is left behind"
    assert "(interrupted)" in table(level, [0.0])


def test_rows_and_rates() -> None:
    _, level = run(Closed(4), Targets(requests=8))
    found = rows(level, [0.0, 1.5])
    p50 = {key: row.summary.p50 for key, row in found.items() if row.summary}
    want = {
        "first_text_s": 0.1, "first_audio_s": 0.25, "gap_s": 1.25, "end_to_end_s": 2.0, "rtf": 0.75,
        "audio_s": 2.0,
        "underruns_0ms": 1, "wait_0ms_s": 0.25, "underruns_1500ms": 0, "wait_1500ms_s": 0.0,
    }  # fmt: skip
    assert p50 == pytest.approx(want)
    speed = {"requests_per_s": 2.0, "audio_s_per_s": 4.0, "text_tokens_per_s": 10.0}
    assert rates(level) == {"good_share": 0.0, "good_requests_per_s": 0.0, **speed}
    assert rates(level, Goal(1.0, 0.3)) == {"good_share": 1.0, "good_requests_per_s": 2.0, **speed}
    assert "player +1500 ms: waits" in table(level, [0.0, 1.5])


def test_overview_has_a_line_per_level() -> None:
    levels = [run(load, Targets(requests=4))[1] for load in (Closed(1), Closed(4), Open(2.0))]
    head, *lines = overview([*levels, Level(Closed(9))]).splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["concurrency", "1"], ["concurrency", "4"]]
    assert "100 %" in lines[0], "each answer had an underrun"
    assert len({len(line) for line in (head, *lines)}) == 1, "columns line up"


def test_record_holds_every_sample_and_is_json() -> None:
    _, level = run(Open(2.0, seed=7), Targets(requests=3))
    loaded = json.loads(
        json.dumps(
            record([level], [0.0], {"url": "x"}, {"model": "tiny"}, "2026-01-01T00:00:00+00:00")
        )
    )
    (one,) = loaded["levels"]
    assert one["load"] == {"kind": "open", "rate": 2.0, "seed": 7}
    assert len(one["samples"]) == 3
    assert one["samples"][0]["packets"] == [[0.25, 1.0], [1.5, 1.0]]
    assert one["summary"]["first_audio_s"]["p99"] == 0.25
    assert loaded["client"]["cores"] >= 1
    assert loaded["server"] == {"model": "tiny"}


def test_usage_of_other_servers() -> None:
    sample = Sample(0, 0.0)
    sample.take(1.0, Used({"prompt_tokens": 4, "completion_tokens": 17}))
    assert (sample.prompt_tokens, sample.text_tokens) == (4, 17)
