"""Listeners ask at the pace of players, and the search for how many there can be."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from bench.engine.load import levels, settle
from bench.harness.listening import Listeners, Listening, Staggered, highest, smooth
from stretto.loadtest.player import Packet
from stretto.loadtest.runner import Closed, Level, Open, Sample, Targets
from tests.loadtest.clock import FakeClock
from tests.loadtest.fakes import FakeServer


def listen(load: Closed, limits: Targets) -> tuple[FakeServer, Level]:
    """Answers are made in 2 s; they sound 2 s from 0.25 s on, with a wait of 0.25 s in their
    middle."""
    clock = FakeClock()
    fake = FakeServer(clock)

    async def main() -> Level:
        return await clock.drive(Listeners(fake.send, clock).run(load, limits))

    return fake, asyncio.run(main())


def test_listeners_hear_an_answer_before_they_ask_again() -> None:
    fake, level = listen(Listening(2, answer_s=1.0), Targets(seconds=4.0))
    assert [at for _, at in fake.sent] == [0.0, 0.5, 2.5, 3.0]
    assert len(level.samples) == 4
    assert str(level.load) == "2 listeners"


def test_streams_that_begin_apart_stay_apart() -> None:
    """Answers take 2 s: the next request goes when the answer is there."""
    fake, level = listen(Staggered(4, over_s=2.0), Targets(requests=7))
    assert [at for _, at in fake.sent] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert len(level.samples) == 7
    assert str(level.load) == "concurrency 4"


def test_other_loads_are_as_ever() -> None:
    fake, _ = listen(Closed(2), Targets(requests=4))
    assert [at for _, at in fake.sent] == [0.0, 0.0, 2.0, 2.0]


def test_smooth_is_no_wait_for_anybody() -> None:
    def level(*samples: Sample) -> Level:
        return Level(Closed(1), list(samples))

    fine = Sample(0, 0.0, packets=[Packet(0.1, 1.0), Packet(1.0, 1.0)])
    late = Sample(0, 0.0, packets=[Packet(0.1, 1.0), Packet(1.2, 1.0)])
    assert smooth(level(fine))
    assert not smooth(level(fine, late))
    assert not smooth(level(fine, Sample(1, 0.0, error="Busy")))
    assert not smooth(level(fine, Sample(1, 0.0)))
    assert not smooth(level())
    assert not smooth(Level(Closed(1), [fine], interrupted=True))


@given(st.integers(0, 400), st.integers(0, 50), st.integers(0, 600), st.integers(1, 400))
def test_the_search_finds_what_passes(limit: int, known: int, guess: int, most: int) -> None:
    known = min(known, limit, most)
    asked: list[int] = []

    async def probe(at: int) -> bool:
        asked.append(at)
        return at <= limit

    found = asyncio.run(highest(probe, known, guess, 40, most))
    assert known <= found <= limit
    assert found >= min(limit, most) / 1.1 - 1
    assert all(1 <= at <= most for at in asked)
    asked.clear()
    assert asyncio.run(highest(probe, known, guess, 2, most)) <= limit
    assert len(asked) <= 2


def test_reading_aloud_has_levels_of_its_own() -> None:
    class Given:
        concurrency = rate = requests = warmup = workload = duration = max_requests = None
        search, seed, read = False, 0, True

        def __init__(self) -> None:
            self.host: list[str] = []

    args = Given()
    settle(args)  # type: ignore[arg-type]
    rest = levels(args)  # type: ignore[arg-type]
    assert [load for load, _ in rest] == [
        *map(Closed, (1, 8, 32, 128)),
        *map(Open, (1.0, 10.0, 20.0)),
    ]
    assert all(limits.seconds is not None for load, limits in rest if isinstance(load, Closed))
    assert [limits.requests for load, limits in rest if isinstance(load, Open)] == [16, 40, 80]
    assert (args.search, args.workload, args.host) == (
        True,
        ["read"],
        ["max_rows=128", "max_waiting=1024"],
    )
    args = Given()
    args.read = False
    settle(args)  # type: ignore[arg-type]
    assert [load for load, _ in levels(args)] == [Closed(1), Closed(4)]  # type: ignore[arg-type]
    assert not args.host
