"""The admission queue: its order, its bound, its time limit, and what callers learn of it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stretto.server.admission import Admission
from stretto.server.openai.error_body import Refused
from tests.server.conftest import serve
from tests.server.scripted_engine import ScriptedEngine
from tests.server.test_http import ALOUD, ASK, CHAT
from tests.server.test_limits import HeldServer


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
        waiting.join(120)
        assert waited[0].status == 200
        assert float(waited[0].headers["x-queue-wait-ms"]) > 0


async def until(fulfilled) -> None:
    while not fulfilled():
        await asyncio.sleep(0.001)


def test_turns_come_in_order_and_nobody_loses_a_slot() -> None:
    async def work() -> None:
        admission, order = Admission(1, 1, queue=3, patience=60), []

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


def test_patience_ends() -> None:
    async def work() -> None:
        admission = Admission(1, 1, queue=1, patience=0.01)
        async with admission.place("a"):
            with pytest.raises(Refused, match="no place came free") as refused:
                async with admission.place("b"):
                    raise AssertionError
        assert refused.value.status == 429
        assert (admission.running, admission.waiting) == (0, 0)

    asyncio.run(work())
