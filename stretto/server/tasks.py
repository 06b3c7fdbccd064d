"""Coroutines of one request that run at the same time, each in a task of its own. When one of these
functions returns or raises, all its tasks are over. Called on the event loop by the routes that
generate and by the media fetcher."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from stretto.server.openai.error_body import Refused

T = TypeVar("T")


async def run_all(work: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run all to their ends and return their results. The first error cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def run_until_one_ends(
    work: Sequence[Coroutine[None, None, None]], cut: asyncio.Future[None]
) -> None:
    """Run until one of them returns or raises, which cancels the others, or until `cut` is done
    because the server stops."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        await asyncio.wait((*tasks, cut), return_when=asyncio.FIRST_COMPLETED)
        tasks.sort(key=lambda task: not task.done())
        if not tasks[0].done():
            raise shutting_down()
        tasks[0].result()
    finally:
        await _end(tasks)


async def _end(tasks: list[asyncio.Task[T]]) -> None:
    """Cancel those that still run, and wait for them.

    An error holds the frame that called this, and its task holds the error. The list is cleared to
    break this circle: all that the work held, files included, is then freed with the request and
    not by the garbage collector."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # asyncio logs an error that nobody has retrieved
    tasks.clear()


def shutting_down() -> Refused:
    headers = {"connection": "close"}
    return Refused(
        503, "the server is shutting down", kind="server_error", code="draining", headers=headers
    )
