"""The engine without an event loop, over one whose events are scripted: how far it runs ahead of
its caller, and that nothing is left running or waiting, however it ends."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.engine import sync
from stretto.engine.sync import AHEAD, SyncEngine
from stretto.errors import Gone, Invalid, StageDead

LIMIT_S = 30.0  # for what takes no time unless it hangs


class Scripted:
    """Its events are numbers; it notes how many were taken of a request, and how requests and
    itself ended."""

    refuses: type[Exception] | None = None

    def __init__(self, model: Path, config: object) -> None:
        self.taken, self.left, self.closed = 0, 0, 0
        self.waits = threading.Event()  # a request has no more to say for now
        if self.refuses is Invalid:
            raise Invalid("no model")

    async def start(self) -> None:
        if self.refuses is StageDead:
            raise StageDead("no memory")

    async def close(self) -> None:
        self.closed += 1

    async def generate(
        self, messages: object, count: int = 1000, error: Exception | None = None
    ) -> AsyncIterator[int]:
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


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(threading.enumerate())
    monkeypatch.setattr(sync, "PipelineEngine", Scripted)
    yield
    left = {t for t in threading.enumerate() if t not in before and t.name == "stretto-engine"}
    assert not left, "its thread is still running"


def rounds(engine: SyncEngine, count: int = 50) -> None:
    """Let the loop go round so often."""

    async def turn() -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(turn(), engine._loop).result(LIMIT_S)


def test_it_runs_a_few_events_ahead_of_a_slow_caller_and_loses_none() -> None:
    with SyncEngine("model") as engine:
        events: Any = engine.generate([], count=40)
        for i in range(40):
            assert next(events) == i
            rounds(engine)
            # One more is in the task's hand, which waits for room.
            assert engine.engine.taken == min(40, i + 1 + AHEAD + 1)  # type: ignore[attr-defined]
        assert list(events) == []
        assert engine.engine.left == 1  # type: ignore[attr-defined]


def test_closing_the_iterator_ends_the_request() -> None:
    with SyncEngine("model") as engine:
        events: Any = engine.generate([])
        next(events)
        rounds(engine)  # it waits for room
        events.close()
        rounds(engine)
        assert engine.engine.left == 1  # type: ignore[attr-defined]


def test_errors_come_through_behind_what_came_before_them() -> None:
    with SyncEngine("model") as engine:
        events: Any = engine.generate([], count=3, error=StageDead("lost"))
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

    with SyncEngine("model") as engine:
        late = engine.generate([])
        full = engine.generate([])
        next(full)
        rounds(engine)
        other = threading.Thread(target=listen, args=(engine.generate([], count=0),), daemon=True)
        other.start()
        inner: Any = engine.engine
        assert inner.waits.wait(LIMIT_S)
    other.join(LIMIT_S)
    assert len(ends) == 1
    listen(full)
    listen(late)
    assert len(ends) == 3
    assert (inner.closed, inner.left) == (1, 2)


@pytest.mark.parametrize("error", [Invalid, StageDead])
def test_an_engine_that_cannot_start_leaves_nothing_running(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "refuses", error)
    engine = SyncEngine("model")
    with pytest.raises(error), engine:
        pass
    assert engine._loop.is_closed()
    assert not engine._thread.is_alive()
