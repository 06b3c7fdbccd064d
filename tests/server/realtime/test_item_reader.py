"""Items of a client on their way to the engine: there is room for each before it is decoded and for
what comes of it, and many sounds wait for their client's turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from stretto.config.server import ServerConfig
from stretto.engine.session import Item
from stretto.server.realtime import client_events as ce
from stretto.server.realtime.client_events import EventError
from stretto.server.realtime.item_reader import MAX_INLINE_SOUNDS, ItemReader
from stretto.server.service import Service
from tests.server.scripted_engine import ScriptedEngine

MEDIA_BYTES = 1 << 20  # of what the engine makes of an item


@dataclass(slots=True)
class Memory:
    """What is reserved, between the items that are decoded, up to a limit."""

    limit: int = 1 << 30
    log: list[int | str] = field(default_factory=list)

    def reserve(self, size: int, code: str, param: str) -> None:
        if size > self.limit:
            raise EventError(code, "there is no room", param)
        self.log.append(size)

    async def item(self, message: Any, *, id: str) -> Item:
        self.log.append("decoded")
        picture = {"type": "image", "data": np.zeros(MEDIA_BYTES, np.uint8)}
        return Item(id, {"role": "user", "content": [picture]})

    def reader(self, service: Any = None) -> ItemReader:
        return ItemReader(service, cast(Any, self), cast(Any, None), "me", cast(Any, self))


def sounds(count: int) -> ce.Item:
    parts = [ce.Part("input_audio", audio=bytes(4800)) for _ in range(count)]
    return ce.Item("message", role="user", content=parts)


def test_room_is_taken_before_an_item_is_decoded_and_for_what_comes_of_it() -> None:
    memory = Memory()
    items, size = asyncio.run(memory.reader().read_input([sounds(1)] * 2, 1000, "audio/pcm"))
    assert len(items) == 2
    each = size // 2
    assert each > MEDIA_BYTES
    first, decoded, second, third, again, fourth = memory.log
    assert decoded == again == "decoded"
    assert second == 1000 + each
    assert fourth == 1000 + 2 * each
    assert isinstance(first, int)
    assert isinstance(third, int)
    assert 1000 + 4800 < first < second < third < fourth


def test_what_finds_no_room_is_not_decoded() -> None:
    memory = Memory(limit=2000)
    with pytest.raises(EventError) as e:
        asyncio.run(memory.reader().read_input([sounds(1)], 1000, "audio/pcm"))
    assert (e.value.code, e.value.param) == ("conversation_full", "response.input[0]")
    assert memory.log == []


@pytest.mark.parametrize(("count", "waits"), [(MAX_INLINE_SOUNDS, False), (5, True)])
def test_many_sounds_wait_for_a_turn_of_the_threads(
    count: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(work: Any, *args: Any) -> Any:
        return work(*args)

    monkeypatch.setattr(asyncio, "to_thread", at_once)

    async def main() -> None:
        service = Service.of(ServerConfig(), cast(Any, ScriptedEngine))
        memory = Memory()
        async with service.thread_turns.turn("me"):
            coming = asyncio.ensure_future(
                memory.reader(service).read_input([sounds(count)], 0, "audio/pcm")
            )
            for _ in range(10):
                await asyncio.sleep(0)
            assert ("decoded" in memory.log) is not waits
        await coming

    asyncio.run(main())
