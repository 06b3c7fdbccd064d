"""The loop: order of turns, messages from other threads, sleep without polling."""

import threading

import pytest

from stretto.errors import Busy, Gone
from stretto.stage.loop import Bell, Loop


class Scripted:
    def __init__(self, name: str, log: list[str], works: int = 0) -> None:
        self.name, self.log, self.works = name, log, works
        self.turns = 0

    def turn(self) -> bool:
        self.turns += 1
        self.log.append(self.name)
        if self.works:
            self.works -= 1
            return True
        return False


def test_downstream_goes_first_and_work_means_another_round() -> None:
    log: list[str] = []
    loop = Loop([Scripted("thinker", log, 1), Scripted("talker", log), Scripted("code2wav", log)])
    assert loop.round()
    assert log == ["code2wav", "talker", "thinker"]
    assert not loop.round()


def test_messages_run_in_order_on_the_loop_thread_before_the_turns() -> None:
    log: list[str] = []
    loop = Loop([Scripted("stage", log)])
    threads = set()
    for i in range(5):
        loop.post(lambda i=i: (log.append(f"m{i}"), threads.add(threading.get_ident()))[0])
    assert loop.round()
    assert log == ["m0", "m1", "m2", "m3", "m4", "stage"]
    assert threads == {threading.get_ident()}


def test_a_message_posted_by_a_message_waits_for_the_next_round() -> None:
    log: list[str] = []
    loop = Loop([Scripted("stage", log)])
    loop.post(lambda: loop.post(lambda: log.append("second")))
    loop.round()
    assert log == ["stage"]
    loop.round()
    assert log == ["stage", "second", "stage"]


def test_an_idle_loop_sleeps_and_a_ring_wakes_it() -> None:
    """No turns while nothing happens, and no processor time; a message is taken at once."""
    stage = Scripted("stage", [])
    loop = Loop([stage])
    loop.start()
    seen = threading.Event()
    loop.post(seen.set)
    assert seen.wait(10)
    done = threading.Barrier(2)
    loop.post(lambda: done.wait(10))
    done.wait(10)
    for _ in range(20):
        seen.clear()
        loop.post(seen.set)
        assert seen.wait(10)
    loop.stop()
    # Each message costs its own round and at most one empty one: nothing turned by itself.
    assert stage.turns <= 2 * 22 + 2


def test_rings_before_the_sleep_are_not_lost() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    bell.sleep()  # would hang if the ring were lost
    bell.close()


def test_bounds_and_stopping() -> None:
    loop = Loop([], max_messages=2)
    loop.post(lambda: None)
    loop.post(lambda: None)
    with pytest.raises(Busy):
        loop.post(lambda: None)
    loop.round()
    loop.post(lambda: None)
    loop.stop()
    with pytest.raises(Gone):
        loop.post(lambda: None)


def test_a_failure_is_kept_for_whoever_started_the_loop() -> None:
    class Broken:
        def turn(self) -> bool:
            raise RuntimeError("broken stage")

    loop = Loop([Broken()])
    with pytest.raises(RuntimeError, match="broken stage"):
        loop.run()
    assert isinstance(loop.failure, RuntimeError)
    with pytest.raises(Gone):
        loop.post(lambda: None)
