"""Places for requests: whose turn it is, how many wait and for how long, and that none is lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest

from stretto.server.admission import Admission
from stretto.server.openai.error_body import Refused
from tests.server.asks import ALOUD, ASK, CHAT
from tests.server.conftest import serve
from tests.server.held import HeldServer
from tests.server.scripted_engine import ScriptedEngine


class Desk:
    """Requests that hold their places until they are told to leave."""

    def __init__(self, admission: Admission) -> None:
        self.admission, self.served = admission, list[str]()
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, places: int = 1, live: bool = False) -> None:
        """The first letter of a name is its owner."""
        for name in names:
            self.begin(name, places=places, live=live)
            await settle()

    def begin(self, name: str, places: int = 1, live: bool = False) -> None:
        """Let one come at the next turn of the loop."""
        self.leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, places, live))

    async def _stay(self, name: str, places: int, live: bool) -> None:
        async with self.admission.place(name[0], live=live) as place:
            if places > 1:
                await place.widen(places)
            self.served.append(name)
            await self.leave[name].wait()

    async def go(self, *names: str) -> None:
        for name in names:
            self.leave[name].set()
            await settle()

    def refused(self, name: str) -> bool:
        task = self.tasks[name]
        return task.done() and isinstance(task.exception(), Refused)

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert (self.admission.running, self.admission.waiting, self.admission.live.held) == (
            0,
            0,
            0,
        )
        assert self.admission.idle.is_set()
        assert not [owner for owner in "abcdexyz" if f"'{owner}'" in repr(self.admission)]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def at_desk(
    admission: Admission,
) -> Callable[[Callable[[Desk], Coroutine[Any, Any, None]]], Callable[[], None]]:
    """A test with a desk; afterwards nothing may be held."""

    def wrap(test: Callable[[Desk], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        async def main() -> None:
            desk = Desk(admission)
            await test(desk)
            await desk.close()

        def run() -> None:
            asyncio.run(main())

        return run

    return wrap


@at_desk(Admission(3, 3))
async def test_one_owner_may_hold_all_places(desk: Desk) -> None:
    await desk.come("a1", "a2", "a3")
    assert desk.served == ["a1", "a2", "a3"]
    assert not desk.admission.idle.is_set()
    await desk.come("a4", "b1")
    assert desk.refused("a4")
    assert desk.refused("b1"), "nobody can wait where there is no queue"


@at_desk(Admission(4, 3, max_queue=4))
async def test_an_owner_leaves_a_place_to_others(desk: Desk) -> None:
    await desk.come("a1", "a2", "a3", "a4", "b1")
    assert desk.served == ["a1", "a2", "a3", "b1"]
    await desk.go("b1")
    assert desk.served == ["a1", "a2", "a3", "b1"]
    await desk.go("a1")
    assert desk.served[4:] == ["a4"]


@at_desk(Admission(4, 4, max_queue=16))
async def test_the_next_place_is_for_the_owner_with_the_fewest(desk: Desk) -> None:
    await desk.come("a1", "a2", "a3", "a4", "a5", "a6", "b1", "b2", "c1", "b3")
    await desk.go("a1", "a2", "a3", "a4")
    # With 3, 0 and 0 places b has come before c; then c has none; with 1, 1 and 1 it is a's turn,
    # and then b's.
    assert desk.served[4:] == ["b1", "c1", "a5", "b2"]
    await desk.go("c1", "b1")
    assert desk.served[8:] == ["a6", "b3"]


@at_desk(Admission(1, 1, max_queue=4))
async def test_a_full_queue_drops_the_last_of_the_owner_with_the_most(desk: Desk) -> None:
    await desk.come("a0", "a1", "a2", "a3", "a4", "a5")
    assert desk.refused("a5")
    await desk.come("b1", "b2", "b3")
    assert [n for n in desk.tasks if desk.refused(n)] == ["a3", "a4", "a5", "b3"]
    await desk.come("c1")
    assert desk.refused("b2") != desk.refused("a2"), "one of those with the most"
    await desk.go("a0", "a1", "b1", "c1")
    assert desk.served == ["a0", "a1", "b1", "c1", "b2"]


@at_desk(Admission(1, 1, max_queue=99))
async def test_one_place_goes_round(desk: Desk) -> None:
    """Nobody waits for all that another owner has in the queue, nor is passed by owners who come
    later."""
    await desk.come("a0", "a1", "a2", "a3", "b1", "b2", "c1")
    for _ in range(3):
        await desk.go(desk.served[-1])
    assert desk.served == ["a0", "a1", "b1", "c1"]
    await desk.come("d1", "e1")
    for _ in range(5):
        await desk.go(desk.served[-1])
    assert desk.served[4:] == ["a2", "b2", "d1", "e1", "a3"]


@at_desk(Admission(1, 1, max_queue=2))
async def test_what_would_be_refused_is_refused_before_its_body_is_read(desk: Desk) -> None:
    await desk.come("a0")
    desk.admission.check("a")
    await desk.come("a1", "a2")
    with pytest.raises(
        Refused, match="1 requests at once, at most 1 of one client, and 2 wait already"
    ) as refused:
        desk.admission.check("a")
    assert (refused.value.status, refused.value.code) == (429, "server_busy")
    desk.admission.check("b")


@at_desk(Admission(4, 4, 2, max_queue=9))
async def test_an_owner_may_have_a_limit_of_its_own(desk: Desk) -> None:
    await desk.come("a1", "a2", "a3", "b1")
    assert desk.refused("a3")
    with pytest.raises(Refused, match="2 requests of this API key"):
        desk.admission.check("a")
    desk.admission.check("b")
    await desk.go("a1", "b1")
    await desk.come("c1", places=8)
    assert "c1" in desk.served
    assert desk.admission.running == 3, "it has as many places as its owner may have"
    await desk.come("c2")
    assert desk.refused("c2")


# ---- wide requests


@at_desk(Admission(8, 8, max_queue=9))
async def test_a_wide_request_takes_its_places_and_is_not_overtaken(desk: Desk) -> None:
    await desk.come(*(f"a{i}" for i in range(8)))
    await desk.come("b1", places=6)
    await desk.come("c1", "c2")
    await desk.go("a0")
    assert desk.served[8:] == ["c1"], "b had one place, and gave it back to wait for six"
    await desk.go("a1", "a2", "a3", "a4", "a5")
    await desk.come("d1", "e1")
    assert desk.served[9:] == [], "places come together for b"
    await desk.go("a6")
    assert desk.served[9:] == ["b1"]
    assert desk.admission.running == 8
    await desk.go("a7", "b1")
    assert sorted(desk.served[10:]) == ["c2", "d1", "e1"]
    assert desk.admission.running == 4


@at_desk(Admission(4, 4, max_queue=16))
async def test_many_wide_requests_do_not_wait_for_each_other_for_ever(desk: Desk) -> None:
    for name in ("a1", "b1", "c1", "d1", "a2"):
        await desk.come(name, places=8)
        assert desk.admission.running <= 4
    assert desk.served == ["a1"]
    await desk.go("a1")
    await desk.go("b1", "c1", "d1", "a2")
    assert sorted(desk.served) == ["a1", "a2", "b1", "c1", "d1"]


@at_desk(Admission(4, 4, max_queue=16))
async def test_a_wide_request_that_leaves_lets_others_go_on(desk: Desk) -> None:
    await desk.come("a1")
    await desk.come("b1", places=4)
    await desk.come("c1")
    assert "c1" not in desk.served
    desk.tasks["b1"].cancel()
    await settle()
    assert "c1" in desk.served


# ---- live texts


@at_desk(Admission(8, 8, max_queue=16, max_live=4))
async def test_texts_that_are_being_written_leave_others_room_in_the_engine(desk: Desk) -> None:
    await desk.come("a1", "a2", "a3", "b1", "b2", "c1", live=True)
    assert desk.served == ["a1", "a2", "b1"], "of 4 in all: half for one, and one for each of two"
    await desk.come("a4")
    assert desk.served[3:] == ["a4"], "other requests pass them"
    await desk.go("a1")
    assert desk.served[4:] == ["c1"]
    await desk.go("b1", "a2")
    assert desk.served[5:] == ["b2", "a3"]


def test_a_live_text_without_a_place_still_counts_as_one() -> None:
    async def main() -> None:
        admission = Admission(4, 4, max_queue=4, max_live=2)
        async with admission.place("a", live=True) as place:
            place.give_back()
            assert (admission.running, admission.live.held) == (0, 1)
            assert admission.idle.is_set()
            place.give_back()
            async with AsyncExitStack() as stack:
                for _ in range(4):
                    await stack.enter_async_context(admission.place("b"))
                again = asyncio.create_task(place.take())
                await settle()
                assert not again.done()
            await again
            assert (admission.running, admission.live.held) == (1, 1)
        assert (admission.running, admission.live.held) == (0, 0)

    asyncio.run(main())


def test_draining_ends_the_queue_except_for_live_texts_that_have_begun() -> None:
    async def main() -> None:
        admission = Admission(1, 1, max_queue=4, max_live=2)

        async def ask() -> None:
            async with admission.place("b"):
                pass

        async with admission.place("a", live=True) as place:
            place.give_back()
            async with admission.place("c"):
                waits = asyncio.create_task(ask())
                again = asyncio.create_task(place.take())
                await settle()
                assert admission.waiting == 2
                admission.drain()
                for late in (waits, asyncio.create_task(ask())):
                    with pytest.raises(Refused) as refused:
                        await late
                    assert refused.value.status == 503
                assert not again.done()
            await again
        assert (admission.running, admission.waiting, admission.live.held) == (0, 0, 0)

    asyncio.run(main())


# ---- those who leave


@at_desk(Admission(1, 1, max_queue=2))
async def test_a_full_queue_ignores_cancelled_requests(desk: Desk) -> None:
    """Who is cancelled leaves at its next turn of the loop; another may come in the same one."""
    await desk.come("a1", "b1", "b2")
    desk.begin("c1")
    desk.tasks["b2"].cancel()
    await settle()
    assert not desk.refused("b1")
    assert not desk.refused("c1")
    await desk.go("a1", "b1", "c1")
    assert desk.served == ["a1", "b1", "c1"]


@at_desk(Admission(1, 1, max_queue=4))
async def test_who_leaves_as_its_turn_comes_passes_the_place_on(desk: Desk) -> None:
    await desk.come("a1", "b1", "c1")
    desk.leave["a1"].set()
    while desk.admission.waiting == 2:
        await asyncio.sleep(0)
    desk.tasks["b1"].cancel()  # it has the place, and has not run since
    await settle()
    assert desk.served == ["a1", "c1"]


@at_desk(Admission(1, 1, max_queue=4))
async def test_a_cancelled_request_gets_no_place(desk: Desk) -> None:
    async with desk.admission.place("a") as place:
        await desk.come("b1", "c1")
        desk.tasks["b1"].cancel()
        place.give_back()  # before its task has run again
        await settle()
        assert desk.served == ["c1"]


@at_desk(Admission(1, 1, max_queue=4, queue_timeout=0.01))
async def test_patience_ends(desk: Desk) -> None:
    await desk.come("a1", "b1")
    with pytest.raises(Refused, match=r"no place came free within 0.01 s"):
        await desk.tasks["b1"]
    assert desk.admission.waiting == 0


@pytest.mark.parametrize("seed", range(4))
def test_no_place_is_lost_or_made(seed: int) -> None:
    """Whatever requests do, at any moment."""

    async def main() -> None:
        rng, desk = random.Random(seed), Desk(Admission(6, 6, max_queue=10, max_live=3))
        for i in range(300):
            if rng.random() < 0.5:
                places, live = (
                    (rng.choice((1, 1, 2, 6)), False) if rng.random() < 0.7 else (1, True)
                )
                await desk.come(f"{rng.choice('abcd')}{i}", places=places, live=live)
            elif desk.tasks:
                name = rng.choice(list(desk.tasks))
                if rng.random() < 0.5:
                    desk.leave[name].set()
                else:
                    desk.tasks[name].cancel()
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            assert 0 <= desk.admission.running <= 6
            assert desk.admission.live.held <= 3
            assert desk.admission.waiting <= 10
        for name in list(desk.tasks):
            desk.leave[name].set()
            await settle()
        assert all(t.done() for t in desk.tasks.values())
        await desk.close()

    asyncio.run(main())


# ---- over HTTP


def test_eight_calls_of_the_stock_client_at_a_server_for_one() -> None:
    engine = ScriptedEngine()
    with serve(engine, max_concurrent=1) as running, ThreadPoolExecutor(8) as pool:

        def call(i: int) -> tuple[str | None, float]:
            raw = running.client().chat.completions.with_raw_response.create(
                model="scripted", messages=[{"role": "user", "content": f"Question {i}"}]
            )
            return raw.parse().choices[0].message.content, float(raw.headers["x-queue-wait-ms"])

        answers = list(pool.map(call, range(8)))
        assert [text for text, _ in answers] == ["Hello there."] * 8
        assert all(wait >= 0 for _, wait in answers)
        metrics = running.ask("/metrics").body.decode()
        assert "stretto_queue_wait_seconds_count 8.0" in metrics
        assert engine.ledger.most == 1


def test_the_queue_is_bounded_and_those_who_leave_make_room() -> None:
    with HeldServer(max_concurrent=1, max_queue=1) as held:
        first = held.start(ALOUD)
        waiting = threading.Thread(target=lambda: waited.append(held.running.ask(CHAT, ASK)))
        waited: list = []
        waiting.start()
        admission = held.running.server.service.admission
        held.running.do(until(lambda: admission.waiting == 1))
        full = held.running.ask(CHAT, ASK)
        assert (full.status, full.error["code"]) == (429, "server_busy")
        assert "stretto_num_requests_waiting 1.0" in held.running.ask("/metrics").body.decode()
        held.release()
        held.rest(first)
        waiting.join()
        assert waited[0].status == 200
        assert float(waited[0].headers["x-queue-wait-ms"]) > 0


async def until(fulfilled) -> None:
    while not fulfilled():
        await asyncio.sleep(0.001)


def test_turns_come_in_order_and_nobody_loses_a_slot() -> None:
    async def work() -> None:
        admission, order = Admission(1, 1, max_queue=3, queue_timeout=60), []

        async def one(name: str, gate: asyncio.Event) -> None:
            async with admission.place("me"):
                order.append(name)
                await gate.wait()

        gates = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(one(str(i), g)) for i, g in enumerate(gates)]
        await until(lambda: admission.waiting == 3)
        tasks[1].cancel()  # leaves the queue
        await until(lambda: admission.waiting == 2)
        for gate in gates:
            gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["0", "2", "3"]
        assert (admission.running, admission.waiting, admission.idle.is_set()) == (0, 0, True)

    asyncio.run(work())
