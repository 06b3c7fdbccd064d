"""How much a server carries: the search, what it searches for, and the command against servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import Invalid
from stretto.loadtest.find import (
    MOST,
    PRECISION,
    Bounds,
    FirstWithin,
    Limit,
    NoUnderrun,
    Probe,
    Prober,
    Search,
    conclusion,
    find,
    probe_line,
    to_json,
)
from stretto.loadtest.player import Packet
from stretto.loadtest.runner import Bench, Closed, Level, Open, Sample
from stretto.loadtest.sse import Piece, RequestFailed, Sound, StreamEnd, Words
from tests.loadtest.clock import FakeClock
from tests.loadtest.command import run as command
from tests.server.conftest import Running
from tests.server.scripted_server import Script, ScriptedServer

LISTENERS = Bounds(1, 1, MOST, whole=True)
RATES = Bounds(1.0, 0.125, MOST)


def probe(load: float, failure: str | None = None, **changes: object) -> Probe:
    return Probe(load, failure, Level(Closed(1)), **changes)  # type: ignore[arg-type]


def search(bounds: Bounds, carried: Callable[[float, int], bool]) -> tuple[Search, list[float]]:
    """`carried`: whether a server carries a load, the nth time it is tried."""
    tried: list[float] = []

    async def measure(load: float) -> Probe:
        tried.append(load)
        return probe(load, None if carried(load, tried.count(load)) else "too much")

    return asyncio.run(find(measure, bounds)), tried


# --- the search


def test_loads_double_then_bisect_and_the_answer_is_tried_twice() -> None:
    result, tried = search(LISTENERS, lambda load, _: load <= 21)
    assert tried == [1, 2, 4, 8, 16, 32, 24, 20, 22, 21, 21]
    assert result.highest is not None
    assert (result.highest.load, result.complete) == (21, True)
    assert result.lowest_failure is not None
    assert result.lowest_failure.load == 22


@given(st.integers(1, MOST), st.integers(1, MOST))
def test_any_number_of_listeners_is_found(most: int, start: int) -> None:
    result, tried = search(Bounds(start, 1, MOST, whole=True), lambda load, _: load <= most)
    assert result.highest is not None
    assert most - max(1, PRECISION * most) <= result.highest.load <= most
    assert result.complete
    assert len(tried) <= 26
    assert all(load == int(load) and 1 <= load <= MOST for load in tried)


@given(st.floats(0.2, MOST - 1), st.floats(0.2, MOST))
def test_any_rate_above_the_least_is_found(most: float, start: float) -> None:
    result, _ = search(Bounds(start, 0.01, MOST), lambda load, _: load <= most)
    assert result.highest is not None
    assert most / (1 + PRECISION) - 0.01 <= result.highest.load <= most
    assert result.complete


def test_nothing_is_carried() -> None:
    result, tried = search(LISTENERS, lambda load, _: False)
    assert tried == [1]
    assert result.highest is None
    result, tried = search(RATES, lambda load, _: False)
    assert tried == [1.0, 0.5, 0.25, 0.125]
    assert result.highest is None
    assert not result.complete


def test_all_is_carried() -> None:
    result, tried = search(LISTENERS, lambda load, _: True)
    assert tried[-2:] == [MOST, MOST]
    assert "1024 listeners or more" in conclusion(NoUnderrun(), result, LISTENERS)


def test_a_load_that_passed_by_chance_is_not_the_answer() -> None:
    result, tried = search(LISTENERS, lambda load, time: load <= 8 or (load <= 12 and time == 1))
    assert tried == [1, 2, 4, 8, 16, 12, 14, 13, 12, 10, 11, 11, 10, 9, 9, 8]
    assert result.highest is not None
    assert (result.highest.load, result.complete) == (8, True)


def test_a_search_ends_where_nothing_more_can_be_found_out() -> None:
    async def measure(load: float) -> Probe:
        return probe(load) if load < 4 else probe(load, "8 of 8 requests failed", last=True)

    seen: list[float] = []
    result = asyncio.run(find(measure, LISTENERS, lambda p: seen.append(p.load)))
    assert seen == [1, 2, 4]
    assert result.highest is not None
    assert (result.highest.load, result.complete) == (2, False)
    assert "did not end" in conclusion(NoUnderrun(), result, LISTENERS)


def test_an_interrupted_second_try_takes_nothing_back() -> None:
    stopped = probe(8, last=True)
    stopped.level.interrupted = True
    result = Search([probe(8), stopped])
    assert result.highest is not None
    assert (result.highest.load, result.complete) == (8, False)


# --- what is searched for


def spoken(first: float, *gaps: float, error: str | None = None) -> Sample:
    """Packets of a second, each so long after the one before."""
    sample = Sample(0, 0.0, error=error)
    at = first
    sample.packets.append(Packet(at, 1.0))
    for gap in gaps:
        at += gap
        sample.packets.append(Packet(at, 1.0))
    return sample


def test_no_player_may_wait() -> None:
    samples = [spoken(0.1, 0.9, 1.0), spoken(0.1, 1.25, 1.25)]
    assert NoUnderrun().failure(samples[:1]) is None
    assert NoUnderrun().failure(samples) == "a player waited 500.0 ms"
    assert NoUnderrun(0.5).failure(samples) is None


@pytest.mark.parametrize(
    ("share", "late", "fails"), [(0.99, 1, False), (0.99, 9, True), (0.5, 90, False)]
)
def test_first_audio_within_a_limit(share: float, late: int, fails: bool) -> None:
    samples = [spoken(0.1)] * 200 + [spoken(0.9)] * late
    failure = FirstWithin(0.3, share).failure(samples)
    assert failure == (f"first audio p{100 * share:g} was 900.0 ms" if fails else None)


def test_answers_without_speech_are_judged_by_their_first_text() -> None:
    samples = [Sample(0, 0.0, words=[0.2, 0.9])]
    assert FirstWithin(0.3, spoken=False).failure(samples) is None
    assert FirstWithin(0.1, spoken=False).failure(samples) == "first text p99 was 200.0 ms"
    assert FirstWithin(0.3).failure(samples) is not None


@pytest.mark.parametrize(
    ("limit", "load", "answers"),
    [
        (NoUnderrun(), 1, (32, 1)),
        (NoUnderrun(), 100, (400, 100)),
        (FirstWithin(0.3), 1, (100, 20)),  # a p99 of fewer answers is their maximum
        (FirstWithin(0.3, 0.5), 1, (32, 7)),
        (FirstWithin(0.3), 64, (640, 128)),  # ten seconds
    ],
)
def test_a_probe_is_long_enough_to_mean_something(
    limit: Limit, load: float, answers: tuple[int, int]
) -> None:
    assert limit.num_answers(load) == answers


def test_number_of_answers_is_at_least_one_per_listener() -> None:
    assert NoUnderrun().num_answers(8, 12) == (12, 8)
    assert NoUnderrun().num_answers(64, 12) == (64, 64)
    assert FirstWithin(0.3).num_answers(64, 12) == (12, 3)


# --- measuring, on a clock of the test's


@dataclass
class Server:
    """Two seconds of speech, the second after 0.8 s; beyond `room` requests at a time it is that
    much slower."""

    clock: FakeClock
    room: int = 4
    refuses: int = 10**9
    running: int = 0

    async def send(self, index: int) -> AsyncIterator[tuple[float, Piece]]:
        start = self.clock.now()
        if self.running >= self.refuses:
            raise RequestFailed("http 429", "full")
        self.running += 1
        slower = max(1.0, self.running / self.room)
        try:
            for after, piece in (
                (0.1, Words("a")),
                (0.2, SECOND),
                (1.0, SECOND),
                (1.1, StreamEnd("stop")),
            ):
                await self.clock.sleep_until(start + after * slower)
                yield self.clock.now(), piece
        finally:
            self.running -= 1


SECOND = Sound("A" * (2 * 24000 * 4 // 3))


def measured(
    limit: Limit, bounds: Bounds, until: float = float("inf"), **server: object
) -> tuple[Server, Search]:
    clock = FakeClock()
    fake = Server(clock, **server)  # type: ignore[arg-type]
    prober = Prober(Bench(fake.send, clock), limit, cpu=lambda: 0.0)
    return fake, asyncio.run(clock.drive(find(prober, bounds), until))


def test_listeners_of_a_server_that_slows_down() -> None:
    """The second packet is late by 0.8 s times the slowness, less the second that the first one
    plays."""
    _, result = measured(NoUnderrun(), LISTENERS)
    assert result.highest is not None
    assert result.highest.load == 5
    first = result.probes[0]
    assert (len(first.level.warmup), len(first.level.samples)) == (1, 32)
    assert first.level.seconds == pytest.approx(32 * 1.1), "the warm-up is not in it"


def test_the_rate_of_a_server_that_slows_down() -> None:
    limit = FirstWithin(0.3)
    _, result = measured(limit, RATES)
    assert result.highest is not None
    assert 1 <= result.highest.load <= 8
    assert result.lowest_failure is not None
    assert "first audio p99 was" in str(result.lowest_failure.failure)
    seeds = [p.level.load.seed for p in result.probes if isinstance(p.level.load, Open)]
    assert seeds == list(range(len(result.probes))), "a load that is tried again has other arrivals"


def test_the_same_seeds_give_the_same_search() -> None:
    runs = [measured(FirstWithin(0.3), RATES)[1] for _ in range(2)]
    assert [p.load for p in runs[0].probes] == [p.load for p in runs[1].probes]


def test_a_load_that_is_refused_is_not_carried_and_ends_at_once() -> None:
    fake, result = measured(NoUnderrun(), LISTENERS, refuses=3)
    assert result.highest is not None
    assert result.highest.load == 3
    refused = next(p for p in result.probes if p.load == 4)
    assert refused.failure == "1 of 4 requests were refused (http 429: full)"
    assert not refused.last
    assert fake.running == 0


def test_a_server_that_answers_nobody_ends_the_search() -> None:
    async def send(index: int) -> AsyncIterator[tuple[float, Piece]]:
        raise RequestFailed("connect", "the server cannot be reached")
        yield  # a generator

    prober = Prober(Bench(send, FakeClock()), NoUnderrun(), cpu=lambda: 0.0)
    result = asyncio.run(find(prober, LISTENERS))
    assert [(p.load, p.last) for p in result.probes] == [(1, True)]
    assert "connect" in conclusion(NoUnderrun(), result, LISTENERS)


def test_what_is_known_when_it_is_interrupted() -> None:
    _, result = measured(NoUnderrun(), LISTENERS, until=60.0)
    assert result.probes[-1].level.interrupted
    assert result.probes[-1].failure is None
    assert result.highest is not None
    assert result.highest.load < 5
    assert "interrupted" in probe_line(NoUnderrun(), result.probes[-1])


def test_a_probe_that_ends_in_its_warm_up_is_no_proof() -> None:
    clock = FakeClock()
    prober = Prober(
        Bench(Server(clock).send, clock), NoUnderrun(), seconds=1.0, warmup=9, cpu=lambda: 0.0
    )
    result = asyncio.run(clock.drive(prober(1)))
    assert not result.passed
    assert "warm-up" in str(result.failure)


def test_a_busy_client_says_so() -> None:
    clock = FakeClock()
    cpu = iter((0.0, 40.0))
    prober = Prober(Bench(Server(clock).send, clock), NoUnderrun(), cpu=lambda: next(cpu))
    assert "this client used" in probe_line(NoUnderrun(), asyncio.run(clock.drive(prober(1))))


def test_json_of_a_search() -> None:
    limit = NoUnderrun()
    _, result = measured(limit, LISTENERS)
    record = json.loads(json.dumps(to_json(limit, result, 3)))
    assert (record["name"], record["highest"], record["complete"]) == ("listeners", 5, True)
    assert [p["level"] for p in record["probes"]] == list(range(3, 3 + len(result.probes)))
    assert {p["passed"] for p in record["probes"]} == {True, False}


# --- the command, against a server on the loopback


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture
def server(running: ScriptedServer) -> ScriptedServer:
    running.reset()
    running.script = Script(text="Hi there.", packets=(1, 2))
    return running


SHORT = (
    "--prompt-tokens",
    "5",
    "--quiet",
    "--underrun-ms",
    "60000",
    "--first-audio-ms",
    "60000",
)  # nothing is late


def test_both_limits_of_a_server(
    server: ScriptedServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stretto.loadtest.find.MOST", 4)
    out = tmp_path / "new" / "found.json"
    assert (
        command(
            "bench", server.url, "--find", *SHORT, "-n", "3", "--warmup", "1", "--json", str(out)
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "\n  2 listeners: passed; 3 answers in " in printed
    assert "most listeners with waits of at most 60.00 s: 4 listeners or more, " in printed
    assert "highest rate with first audio p99 within 60.00 s: 4 requests/s or more, " in printed
    record = json.loads(out.read_text())
    listeners, rate = record["find"]
    assert [p["load"] for p in listeners["probes"]] == [1, 2, 4, 4]
    assert (listeners["highest"], rate["highest"]) == (4, 4)
    assert [p["level"] for p in (*listeners["probes"], *rate["probes"])] == list(
        range(len(record["levels"]))
    )
    for level, number in zip(record["levels"], (3, 3, 4, 4), strict=False):
        assert (len(level["samples"]), len(level["warmup"])) == (number, 1)
    assert record["levels"][0]["samples"][0]["packets"]
    questions = [body["messages"][0]["content"] for body in server.requests]
    assert len(questions) == 1 + sum(len(one["samples"]) + 1 for one in record["levels"])
    assert len(set(questions)) == len(questions), "no two requests are the same"


def test_a_full_server_is_named_in_the_answer(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script.refuse, server.script.refuse_from, server.script.refusals = (
        (429, {}, "full"),
        2,
        10**9,
    )
    assert command("bench", server.url, "--find", *SHORT, "-c", "1") == 1
    printed = capsys.readouterr().out
    assert "none (1 listener: 1 of 1 requests were refused (http 429: full))" in printed
    assert "highest rate" not in printed, "only what -c names"


def test_a_server_without_speech(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.loadtest.find.MOST", 2)
    server.script.silent = True
    assert command("bench", server.url, "--find", *SHORT, "-n", "1", "--warmup", "0") == 0
    printed = capsys.readouterr().out
    assert "The answers have no speech" in printed
    assert "highest rate with first text p99 within 60.00 s: 2 requests/s or more" in printed
    assert "most listeners" not in printed
    assert command("bench", server.url, "--find", *SHORT, "-c", "1") == 1, (
        "there is nothing to search for"
    )


def test_a_server_that_refuses_everything(server: ScriptedServer) -> None:
    server.script = Script(refuse=(400, {}, "unknown model"), refusals=10**9)
    with pytest.raises(RequestFailed, match="unknown model"):
        command("bench", server.url, "--find", *SHORT)


@pytest.mark.parametrize(
    "argv",
    [
        ["-c", "1", "2"], ["-c", "1", "-r", "1"], ["-c", "2000"], ["--underrun-ms", "-1"],
        ["--first-audio-ms", "0"],
        ["--percentile", "100"], ["--text-only", "-c", "1"], ["-r", "0.001"],
    ],
)  # fmt: skip
def test_senseless_arguments(argv: list[str]) -> None:
    with pytest.raises(Invalid):
        command("bench", "http://127.0.0.1:9", "--find", *argv)


def test_a_real_server(
    real_server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model behind the real server and engine: every answer of each probe is as long as it
    was asked for."""
    monkeypatch.setattr("stretto.loadtest.find.MOST", 2)

    out = tmp_path / "found.json"
    lengths = (
        "--stretto-extras",
        "--exact-tokens",
        "--max-tokens",
        "3",
        "--frames",
        "4",
        "-n",
        "2",
        "--warmup",
        "1",
    )
    assert command("bench", real_server.url, "--find", *SHORT, *lengths, "--json", str(out)) == 0
    record = json.loads(out.read_text())
    assert [(one["name"], one["highest"], one["complete"]) for one in record["find"]] == [
        ("listeners", 2, True),
        ("rate", 2, True),
    ]
    answers = [s for level in record["levels"] for s in (*level["warmup"], *level["samples"])]
    assert {s["error"] for s in answers} == {None}
    assert {s["text_tokens"] for s in answers} == {3}
    speech = pytest.approx((4 * 1920 - 555) / 24000)
    assert all(sum(seconds for _, seconds in s["packets"]) == speech for s in answers)


def test_interrupted(server: ScriptedServer, tmp_path: Path) -> None:
    """Ctrl-C on a real process, while the third load runs: what is known is printed and written."""
    out = tmp_path / "found.json"
    server.script.answers = 1 + 2 * 4
    program = (
        "import signal, sys; from tests.loadtest.command import run; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"argv = {[server.url, '--find', *SHORT, '-n', '3', '--warmup', '1', '--json', str(out)]!r}; "  # noqa: E501
        "sys.exit(run('bench', *argv))"
    )
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root, env=env
    )
    try:
        server.wait_for_requests(1 + 2 * 4 + 4)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert b"4 listeners: interrupted" in printed
    assert b"most listeners with waits of at most 60.00 s: 2 listeners" in printed
    assert b"the search did not end" in printed
    (found,) = json.loads(out.read_text())["find"]
    assert (found["highest"], found["complete"], len(found["probes"])) == (2, False, 3)
