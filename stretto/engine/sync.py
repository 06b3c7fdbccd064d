"""An event loop in a thread of its own, for callers without one. Imports no torch.

What iterates has a task on the loop that hands its events over, a few ahead of the caller: beyond
that it waits, and so a slow caller is throttled as any other listener is. Any thread may call; what
is still open at the end is `Gone`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from stretto.errors import Gone

T = TypeVar("T")
# events that wait for the caller here; more wait in the engine, which bounds them by
# `max_buffered_s`
AHEAD = 4


class LoopThread:
    """It runs from the beginning; whoever made it calls `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="stretto-engine", daemon=True
        )
        self._gate = threading.Lock()  # so that nothing is begun behind the back of `close`
        self._closed = False
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine that runs on the loop."""
        future = self._begin(work)
        try:
            return future.result()
        except CancelledError:
            raise Gone("the engine was closed") from None
        finally:
            future.cancel()  # the caller was interrupted

    def iterate(self, start: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """Iterate over what `start` yields; it is called on the loop. Closing this iterator closes
        that one."""
        out: SimpleQueue[T | None] = SimpleQueue()
        room = asyncio.Semaphore(AHEAD)

        async def pump() -> None:
            # Closed here: a task that is cancelled while it waits for room is not within the
            # generator.
            async with aclosing(cast(AsyncGenerator[T, None], start())) as events:
                async for event in events:
                    await room.acquire()
                    out.put(event)

        task = self._begin(pump())
        task.add_done_callback(lambda _: out.put(None))  # however it ended, even before it began
        try:
            while (event := out.get()) is not None:
                self._release(room)
                yield event
            task.result()
        except CancelledError:
            raise Gone("the engine was closed") from None
        finally:
            task.cancel()

    def close(self, last: Coroutine[Any, Any, object] | None = None) -> None:
        """Run `last` to its end, then end all there is on the loop, and the thread."""
        with self._gate:
            self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._shut(last), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _shut(self, last: Coroutine[Any, Any, object] | None) -> None:
        """Requests whose caller does not listen now would wait for it for ever."""
        if last is not None:
            await last
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._gate:
            if self._closed:
                work.close()
                raise Gone("the engine was closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _release(self, room: asyncio.Semaphore) -> None:
        with self._gate:
            if not self._closed:
                self._loop.call_soon_threadsafe(room.release)
