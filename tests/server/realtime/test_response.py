"""A response by itself: held back, released, cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from stretto.params import Params
from stretto.server.admission import Admission
from stretto.server.realtime.items import Conversation
from stretto.server.realtime.options import Options
from stretto.server.realtime.response import ResponseTask
from stretto.server.realtime.send_queue import SendQueue
from stretto.server.realtime.writer import ResponseWriter
from stretto.server.shares import Holding, Shares
from tests.server.realtime.scripted import TalkEngine

Json = dict[str, Any]


def respond(work: Callable[[ResponseTask, list[Json], TalkEngine], Awaitable[None]]) -> None:
    """Runs `work` with a response that has begun and that nobody was told of yet."""

    async def main() -> None:
        engine = TalkEngine()
        session = engine.session()
        await session.add({"role": "user", "content": "Hello"})
        told: list[Json] = []
        conversation = Conversation(session)  # type: ignore[arg-type]
        options = Options("Ethan")
        writer = ResponseWriter(
            options,
            engine.info,
            lambda e: told.append(json.loads(msgspec.json.encode(e))),
            conversation,
            "conv",
        )

        async def start(on_prompt: Any) -> Any:
            return session.respond(modalities=("text", "audio"), params=Params())

        send_queue = SendQueue(5.0, Holding(Shares(1 << 20), "me"))
        response = ResponseTask(writer, start, send_queue, Admission(8, 8), "me", lead=10.0)
        response.task = asyncio.create_task(response.run())
        await work(response, told, engine)
        if not response.task.done():
            response.task.cancel()
            await asyncio.wait([response.task])
        assert not engine.ledger.running

    asyncio.run(main())


def test_nobody_hears_of_it_before_it_is_released() -> None:
    async def work(response: ResponseTask, told: list[Json], engine: TalkEngine) -> None:
        await engine.ledger.idle.wait()  # all of it was made
        assert told == []
        response.release()
        assert told[0]["type"] == "response.created"
        assert any(
            e["type"] == "response.output_audio.delta" for e in told
        )  # what waited is there at once
        await response.ended()
        assert told[-1]["response"]["status"] == "completed"

    respond(work)


def test_a_cancel_is_the_end_and_there_is_one_end() -> None:
    async def work(response: ResponseTask, told: list[Json], engine: TalkEngine) -> None:
        response.release()
        while not any(e["type"] == "response.output_audio.delta" for e in told):
            await asyncio.sleep(0)
        assert response.cancel("client_cancelled")
        count = len(told)
        assert told[-1]["response"]["status_details"]["reason"] == "client_cancelled"
        assert not response.cancel("turn_detected")
        await response.ended()
        assert len(told) == count

    respond(work)


def test_what_is_dropped_was_never_there() -> None:
    async def work(response: ResponseTask, told: list[Json], engine: TalkEngine) -> None:
        await asyncio.sleep(0)
        assert response.cancel("turn_detected")
        await response.ended()
        response.release()
        assert told == []

    respond(work)
