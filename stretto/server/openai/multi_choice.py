"""Several answers to one question. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from stretto.engine.protocol import Event


async def together(several: Sequence[AsyncIterator[Event]]) -> AsyncIterator[tuple[int, Event]]:
    """Events of several answers as they come, each with its answer's number. What fails in one ends
    all; the caller closes the iterators."""
    if len(several) == 1:
        async for event in several[0]:
            yield 0, event
        return
    waiting = {_next(events): i for i, events in enumerate(several)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = waiting.pop(task)
                came = task.result()
                if came is not None:
                    waiting[_next(several[i])] = i
                    yield i, came
    finally:
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)


def _next(events: AsyncIterator[Event]) -> asyncio.Task[Event | None]:
    async def one() -> Event | None:
        return await anext(events, None)

    return asyncio.create_task(one())
