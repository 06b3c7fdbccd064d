"""What waits to be sent: in order, bounded, and nobody waits for ever."""

import asyncio
import json

import pytest

from stretto.server.realtime import send_queue as module
from stretto.server.realtime.send_queue import SendQueue, SlowClient
from stretto.server.realtime.server_events import Cleared, ItemDeleted
from stretto.server.shares import Holding, Shares


def queue(timeout: float, memory: int = 1 << 30) -> SendQueue:
    return SendQueue(timeout, Holding(Shares(memory), "me"))


def test_everything_in_order_with_ids_of_their_own() -> None:
    async def main() -> None:
        box, got = queue(5.0), []

        async def send(data: bytes) -> None:
            got.append(json.loads(data))

        task = asyncio.create_task(box.run(send))
        for i in range(5):
            box.put(ItemDeleted(item_id=str(i)))
            await asyncio.sleep(0)
        box.finish()
        box.put(Cleared())  # too late
        await task
        assert [e["item_id"] for e in got] == list("01234")
        assert len({e["event_id"] for e in got}) == 5
        assert box.size == 0

    asyncio.run(main())


def test_a_client_that_takes_nothing() -> None:
    async def main() -> None:
        box = queue(0.01)
        box.put(Cleared())

        async def never(data: bytes) -> None:
            await asyncio.Event().wait()

        with pytest.raises(SlowClient):
            await box.run(never)

    asyncio.run(main())


def test_a_client_that_asks_and_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(module, "HIGH_WATER_BYTES", 500)
        monkeypatch.setattr(module, "MAX_BYTES", 1000)
        box, hold = queue(60.0), asyncio.Event()

        async def send(data: bytes) -> None:
            await hold.wait()

        task = asyncio.create_task(box.run(send))
        for _ in range(5):
            box.put(ItemDeleted(item_id="x" * 100))
        waiting = asyncio.create_task(box.wait_for_space())
        await asyncio.sleep(0)
        assert not waiting.done()
        for _ in range(100):
            box.put(ItemDeleted(item_id="x" * 100))
        assert box.overflowed
        hold.set()
        with pytest.raises(SlowClient):
            await task
        waiting.cancel()

    asyncio.run(main())


def test_a_client_whose_share_of_the_memory_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have a little in any case; what lies here is given back."""

    async def main() -> None:
        monkeypatch.setattr(module, "HIGH_WATER_BYTES", 500)
        box = queue(5.0, memory=1)
        memory = box.held.shares
        while box.size < 300:
            box.put(ItemDeleted(item_id="x" * 100))
        assert not box.overflowed
        assert memory.of("me") == box.size
        while box.size <= 500:
            box.put(ItemDeleted(item_id="x" * 100))
        assert box.overflowed
        box.close()
        box.put(Cleared())
        assert memory.held == 0

    asyncio.run(main())
