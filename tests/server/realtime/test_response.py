"""A response by itself: held back, released, cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from stretto.config.server import ServerConfig
from stretto.server.realtime.items import Conversation
from stretto.server.realtime.options import Options
from stretto.server.realtime.response import ResponseTask
from stretto.server.realtime.writer import ResponseWriter
from stretto.server.service import Service
from tests.server.realtime.silent import EventList
from tests.server.scripted_engine import ScriptedEngine

Json = dict[str, Any]


def respond(work: Callable[[ResponseTask, list[Json], ScriptedEngine], Awaitable[None]]) -> None:
    """Runs `work` with a response that has begun and is not released."""

    async def no_engine() -> Any:
        raise AssertionError

    async def main() -> None:
        engine = ScriptedEngine()
        session: Any = engine.session()
        await session.add({"role": "user", "content": "Hello"})
        queue = EventList()
        service = Service.of(ServerConfig(), no_engine)
        writer = ResponseWriter(Options("Ethan"), engine.info, queue, Conversation(session), "conv")
        response = ResponseTask(writer, service, session, queue, "me")
        task = response.start(response.run())
        await work(response, queue.events, engine)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        assert not engine.ledger.running

    asyncio.run(main())


def test_nobody_hears_of_it_before_it_is_released() -> None:
    async def work(response: ResponseTask, events: list[Json], engine: ScriptedEngine) -> None:
        await engine.ledger.idle.wait()  # all of it was made
        assert events == []
        response.release(None)
        assert events[0]["type"] == "response.created"
        assert any(
            e["type"] == "response.output_audio.delta" for e in events
        )  # what waited is there at once
        await response.ended()
        assert events[-1]["response"]["status"] == "completed"

    respond(work)


def test_a_cancel_is_the_end_and_there_is_one_end() -> None:
    async def work(response: ResponseTask, events: list[Json], engine: ScriptedEngine) -> None:
        response.release(None)
        while not any(e["type"] == "response.output_audio.delta" for e in events):
            await asyncio.sleep(0)
        assert response.cancel("client_cancelled")
        count = len(events)
        assert events[-1]["response"]["status_details"]["reason"] == "client_cancelled"
        assert not response.cancel("turn_detected")
        await response.ended()
        assert len(events) == count

    respond(work)


def test_what_is_dropped_was_never_there() -> None:
    async def work(response: ResponseTask, events: list[Json], engine: ScriptedEngine) -> None:
        await asyncio.sleep(0)
        assert response.cancel("turn_detected")
        await response.ended()
        response.release(None)
        assert events == []

    respond(work)
