"""An event loop in a thread, with scripted events: how far it runs ahead of its caller, and that
nothing is left running or waiting, however it ends."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stretto import Engine
from stretto.engine.sync import AHEAD, LoopThread
from stretto.errors import Gone, Invalid, StageDead

LIMIT_S = 30.0  # for what takes no time unless it hangs


class Scripted:
    """Its events are numbers; it notes how many were taken of a request, and how requests and
    itself ended."""

    def __init__(self) -> None:
        self.thread = LoopThread()
        self.taken, self.left, self.closed = 0, 0, 0
        self.waits = threading.Event()  # a request has no more to say for now

    async def close(self) -> None:
        self.closed += 1

    def generate(self, count: int = 1000, error: Exception | None = None) -> Iterator[int]:
        return self.thread.iterate(lambda: self._generate(count, error))

    async def _generate(self, count: int, error: Exception | None) -> AsyncIterator[int]:
        try:
            for i in range(count):
                await asyncio.sleep(0)
                self.taken = i + 1
                yield i
            if error is not None:
                raise error
            if count == 0:
                self.waits.set()
                await asyncio.Event().wait()  # for ever
        finally:
            self.left += 1

    def rounds(self, count: int = 50) -> None:
        """Let the loop go round so often."""

        async def turn() -> None:
            for _ in range(count):
                await asyncio.sleep(0)

        self.thread.run(turn())


@contextmanager
def scripted() -> Iterator[Scripted]:
    engine = Scripted()
    try:
        yield engine
    finally:
        engine.thread.close(engine.close())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = {t for t in threading.enumerate() if t not in before and t.name == "stretto-engine"}
    assert not left, "its thread is still running"


def test_it_runs_a_few_events_ahead_of_a_slow_caller_and_loses_none() -> None:
    with scripted() as engine:
        events: Any = engine.generate(count=40)
        for i in range(40):
            assert next(events) == i
            engine.rounds()
            # One more is in the task's hand, which waits for room.
            assert engine.taken == min(40, i + 1 + AHEAD + 1)
        assert list(events) == []
        assert engine.left == 1


def test_closing_the_iterator_ends_the_request() -> None:
    with scripted() as engine:
        events: Any = engine.generate()
        next(events)
        engine.rounds()  # it waits for room
        events.close()
        engine.rounds()
        assert engine.left == 1


def test_errors_come_through_behind_what_came_before_them() -> None:
    with scripted() as engine:
        events: Any = engine.generate(count=3, error=StageDead("lost"))
        assert [next(events) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(StageDead, match="lost"):
            next(events)


def test_what_is_open_at_the_end_is_gone() -> None:
    """One that waits for room, one that waits for an event in another thread, one that begins too
    late."""
    ends: list[BaseException] = []

    def listen(events: Iterator[Any]) -> None:
        try:
            list(events)
        except Gone as e:
            ends.append(e)

    with scripted() as engine:
        late = engine.generate()
        full = engine.generate()
        next(full)
        engine.rounds()
        other = threading.Thread(target=listen, args=(engine.generate(count=0),), daemon=True)
        other.start()
        assert engine.waits.wait(LIMIT_S)
    other.join(LIMIT_S)
    assert len(ends) == 1
    listen(full)
    listen(late)
    assert len(ends) == 3
    assert (engine.closed, engine.left) == (1, 2)


def test_a_call_that_is_open_at_the_end_is_gone() -> None:
    ends: list[BaseException] = []

    async def forever() -> None:
        engine.waits.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            engine.thread.run(forever())
        except Gone as e:
            ends.append(e)

    with scripted() as engine:
        other = threading.Thread(target=call, daemon=True)
        other.start()
        assert engine.waits.wait(LIMIT_S)
    other.join(LIMIT_S)
    assert len(ends) == 1
    call()
    assert len(ends) == 2


def test_an_engine_that_cannot_start_leaves_nothing_running() -> None:
    with pytest.raises(Invalid), Engine("nowhere", device="cpu"):
        pass
