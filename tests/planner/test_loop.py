"""The replayed host's thread: rounds as in the real loop, one turn after the other, and sleep in whole ticks."""

from __future__ import annotations

from collections.abc import Callable

from stretto.planner.loop import TICK_S, HostLoop


class Work:
    """Turns that take milliseconds when there is something to do."""

    def __init__(self) -> None:
        self.todo: dict[str, list[float]] = {"a": [], "b": []}
        self.did: list[tuple[str, float]] = []
        self.now = 0.0
        self.due: float | None = None
        self.loop = HostLoop((self.turn("a"), self.turn("b")), lambda: self.due)

    def turn(self, name: str) -> Callable[[], bool]:
        def take() -> bool:
            if not self.todo[name]:
                return False
            self.loop.busy(self.now, self.todo[name].pop(0))
            self.did.append((name, self.now))
            return True

        return take

    def run(self, now: float) -> None:
        self.now = now
        self.loop.run(now)


def test_one_turn_after_the_other() -> None:
    """What comes while a turn is taken waits for its own turn, in this round or in the next."""
    work = Work()
    work.todo["b"] = [1.0]
    work.run(0.0)
    assert work.did == [], "nobody has rung"
    work.loop.ring()
    work.run(0.0)
    assert work.did == [("b", 0.0)]
    work.todo["a"] = [2.0]
    work.todo["b"] = [1.0]
    work.run(0.0005)
    assert len(work.did) == 1, "it is busy"
    assert work.loop.next == 0.001
    work.run(0.001)
    work.run(0.003)
    assert work.did[1:] == [("a", 0.001), ("b", 0.003)]


def test_it_sleeps_after_a_round_in_which_nothing_happened() -> None:
    work = Work()
    work.loop.ring()
    work.run(0.0)
    assert work.loop.next is None
    work.todo["a"] = [1.0]
    work.run(5.0)
    assert work.did == []
    work.loop.ring()
    work.run(6.0)
    assert work.did == [("a", 6.0)]


def test_it_wakes_up_for_what_is_due_by_whole_ticks() -> None:
    work = Work()
    work.due = 3.7 * TICK_S
    work.loop.ring()
    work.run(0.0)
    assert work.loop.next == 3 * TICK_S, "what is due within less than a tick is due now"
    work.todo["b"] = [1.0]
    work.run(2.9 * TICK_S)
    assert work.did == []
    work.run(3 * TICK_S)
    assert work.did == [("b", 3 * TICK_S)]
