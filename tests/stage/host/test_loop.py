"""The loop: order of turns, messages from other threads, sleep without polling, waking up when a
stage is due."""

import select
import threading
from collections.abc import Callable

import pytest

from stretto.errors import Busy, Gone
from stretto.stage.host.loop import TICK_NS, Loop, Wakeup
from tests.stage.simulated import Clock


class Messages:
    """Of a loop whose messages are functions."""

    def handle(self, message: Callable[[], object], blob: bytes) -> None:
        message()


class Scripted(Messages):
    def __init__(self, name: str, log: list[str], works: int = 0) -> None:
        self.name, self.log, self.works = name, log, works
        self.turns = 0
        self.due_ns: int | None = None

    def poll(self) -> bool:
        self.turns += 1
        self.log.append(self.name)
        if self.works:
            self.works -= 1
            return True
        return False


def test_work_means_another_round() -> None:
    loop = Loop(Scripted("stage", [], 1))
    assert loop.round()
    assert not loop.round()


def test_messages_run_in_order_on_the_loop_thread_before_the_turns() -> None:
    log: list[str] = []
    loop = Loop(Scripted("stage", log))
    threads = set()
    for i in range(5):
        loop.post(lambda i=i: (log.append(f"m{i}"), threads.add(threading.get_ident()))[0])
    assert loop.round()
    assert log == ["m0", "m1", "m2", "m3", "m4", "stage"]
    assert threads == {threading.get_ident()}


def test_a_message_posted_by_a_message_waits_for_the_next_round() -> None:
    log: list[str] = []
    loop = Loop(Scripted("stage", log))
    loop.post(lambda: loop.post(lambda: log.append("second")))
    loop.round()
    assert log == ["stage"]
    loop.round()
    assert log == ["stage", "second", "stage"]


def test_an_idle_loop_sleeps_and_a_ring_wakes_it() -> None:
    """No turns while nothing happens, and no processor time; a message is taken at once."""
    stage = Scripted("stage", [])
    loop = Loop(stage)
    loop.start(lambda: None)
    seen = threading.Event()
    loop.post(seen.set)
    assert seen.wait(60)
    done = threading.Barrier(2)
    loop.post(lambda: done.wait(60))
    done.wait(60)
    for _ in range(20):
        seen.clear()
        loop.post(seen.set)
        assert seen.wait(60)
    loop.stop()
    # Each message costs its own round, an empty one, and one more if it was taken before its ring:
    # nothing turned by itself.
    assert stage.turns <= 3 * 22 + 2


def test_rings_before_the_sleep_are_not_lost() -> None:
    wakeup = Wakeup()
    wakeup.wake()
    wakeup.wake()
    wakeup.sleep()  # would hang if the ring were lost
    wakeup.close()


def test_a_sleep_of_some_ticks_ends_by_itself_and_loses_no_ring() -> None:
    wakeup = Wakeup()
    wakeup.sleep(0)  # nobody rang
    wakeup.wake()
    wakeup.sleep(1 << 30)  # would hang if the ring were lost
    wakeup.sleep(0)
    wakeup.wake()
    wakeup.sleep()
    wakeup.sleep(1)
    wakeup.close()


def test_a_sleep_of_some_ticks_asks_for_as_many_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Polled:
        slept_ms: int | None = None

        def register(self, fd: int, events: int) -> None:
            pass

        def poll(self, ms: int) -> list[object]:
            self.slept_ms = ms
            return []

    polled = Polled()
    monkeypatch.setattr(select, "poll", lambda: polled)
    wakeup = Wakeup()
    wakeup.sleep(7)
    assert polled.slept_ms == 7
    assert TICK_NS == 1_000_000
    wakeup.close()


class Dreaming(Wakeup):
    """Sleeps as long as it may, on a clock of its own, and for a second where there is no end."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.slept: list[int | None] = []

    def sleep(self, ticks: int | None = None) -> None:
        self.slept.append(ticks)
        self.clock.now += (1000 if ticks is None else ticks) * TICK_NS


def test_sleeps_until_it_is_due() -> None:
    clock = Clock()
    wakeup = Dreaming(clock)
    stage = Scripted("stage", [])
    loop = Loop(stage, wakeup, clock=clock)
    start = clock.now
    loop.sleep()
    assert loop.idle_ns == 1000 * TICK_NS
    stage.due_ns = clock.now + 5 * TICK_NS + TICK_NS // 2
    loop.sleep()  # to half a tick before it is due, which is near enough
    assert stage.due_ns - clock.now == TICK_NS // 2
    loop.sleep()
    assert wakeup.slept == [None, 5]
    stage.due_ns = clock.now - 3 * TICK_NS
    loop.sleep()  # long due: another round, at once
    assert wakeup.slept == [None, 5]
    assert loop.idle_ns == clock.now - start, "asleep all the time"


def test_a_stage_gets_its_turn_when_it_is_due_and_not_before() -> None:
    """The loop alone, on a clock: two rounds to fall asleep in, one that launches, and no spinning
    in between."""
    clock = Clock()
    wakeup = Dreaming(clock)

    class Holding(Messages):
        due_ns: int | None = None
        turns = 0

        def __init__(self) -> None:
            self.launched: list[int] = []

        def poll(self) -> bool:
            self.turns += 1
            if self.due_ns is None:
                self.due_ns = clock.now + 7 * TICK_NS + 123
            if self.due_ns - clock.now >= TICK_NS:
                return False
            self.launched.append(self.due_ns - clock.now)
            self.due_ns = None
            if len(self.launched) == 10:
                loop.stop()
            return True

    stage = Holding()
    loop = Loop(stage, wakeup, clock=clock)
    loop.run()
    assert stage.launched == [123] * 10
    assert stage.turns == 20
    assert wakeup.slept == [7] * 10


def test_stopping_wakes_a_loop_that_waits_for_a_due_time() -> None:
    stage = Scripted("stage", [])
    loop = Loop(stage)
    stage.due_ns = loop.clock() + 3_600_000 * TICK_NS
    loop.start(lambda: None)
    seen = threading.Event()
    loop.post(seen.set)
    assert seen.wait(60), "a message does not wait for it either"
    loop.stop()
    assert loop.failure is None


def test_bounds_and_stopping() -> None:
    loop = Loop(Scripted("stage", []), max_messages=2)
    loop.post(lambda: None)
    loop.post(lambda: None)
    with pytest.raises(Busy):
        loop.post(lambda: None)
    loop.round()
    loop.post(lambda: None)
    loop.stop()
    with pytest.raises(Gone):
        loop.post(lambda: None)


def test_a_failure_is_stored_for_the_starter_of_the_loop() -> None:
    class Broken(Messages):
        due_ns = None

        def poll(self) -> bool:
            raise RuntimeError("broken stage")

    loop = Loop(Broken())
    with pytest.raises(RuntimeError, match="broken stage"):
        loop.run()
    assert isinstance(loop.failure, RuntimeError)


def test_a_failure_wakes_whoever_started_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        threading, "excepthook", lambda _: None
    )  # the thread dies of it, as it should
    told, loop = threading.Event(), Loop(Scripted("stage", []))
    loop.start(told.set)

    def fail() -> None:
        raise RuntimeError("broken message")

    loop.post(fail)
    assert told.wait(60)
    loop.stop()
    assert isinstance(loop.failure, RuntimeError)
    with pytest.raises(Gone):
        loop.post(lambda: None)
