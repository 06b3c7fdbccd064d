"""The engine for callers without an event loop, over one in a thread of its own. Imports no torch.

Each request has a task on the loop that hands its events over, a few ahead of the caller: beyond
that it waits, and so a slow caller is throttled as any other listener is. Any thread may call; what
is still open at the end is `Gone`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from stretto.config.engine import EngineConfig
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import Event, Message
from stretto.errors import Gone
from stretto.preprocess.pool.jobs import Conversation

T = TypeVar("T")
# events that wait for the caller here; more wait in the engine, which bounds them by
# `max_buffered_s`
AHEAD = 4


class SyncEngine:
    """Use it so:

    with SyncEngine(model) as engine:
        for event in engine.generate(messages): ..."""

    def __init__(self, model: str | Path, config: EngineConfig | None = None) -> None:
        self._model = Path(model)
        self._config = config or EngineConfig()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="stretto-engine", daemon=True
        )
        self._engine: PipelineEngine | None = None
        self._gate = threading.Lock()  # so that nothing is begun behind the back of `_shut`
        self._closed = False

    def __enter__(self) -> SyncEngine:
        self._thread.start()
        try:
            self._engine = self._begin(self._open()).result()
        except BaseException:
            self.__exit__()
            raise
        return self

    async def _open(self) -> PipelineEngine:
        engine = PipelineEngine(self._model, self._config)
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        return engine

    def __exit__(self, *exc: object) -> None:
        with self._gate:
            self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _shut(self) -> None:
        """End all there is on the loop. Requests whose caller does not listen now would wait for it
        for ever."""
        if self._engine is not None:
            await self._engine.close()
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

    @property
    def engine(self) -> PipelineEngine:
        assert self._engine is not None, "use it in a with statement"
        return self._engine

    def generate(self, messages: Sequence[Message], **kwargs: Any) -> Iterator[Event]:
        """As `PipelineEngine.generate`. Closing the iterator cancels the request."""
        return self._iterate(lambda: self.engine.generate(messages, **kwargs))

    def speak(self, text: str, **kwargs: Any) -> Iterator[Event]:
        return self._iterate(lambda: self.engine.speak(text, **kwargs))

    def enrol(self, clip: Conversation) -> bytes:
        return self._begin(self.engine.enrol(clip)).result()

    def _iterate(self, start: Callable[[], AsyncIterator[Event]]) -> Iterator[Event]:
        out: SimpleQueue[Event | None] = SimpleQueue()
        room = asyncio.Semaphore(AHEAD)

        async def pump() -> None:
            # Closed here: a task that is cancelled while it waits for room is not within the
            # generator.
            async with aclosing(cast(AsyncGenerator[Event, None], start())) as events:
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

    def _release(self, room: asyncio.Semaphore) -> None:
        with self._gate:
            if not self._closed:
                self._loop.call_soon_threadsafe(room.release)
