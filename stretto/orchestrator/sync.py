"""The engine for callers without an event loop, over one in a thread of its own. Imports no torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from stretto.orchestrator.api import Event, Message
from stretto.orchestrator.engine import PipelineEngine
from stretto.orchestrator.settings import EngineConfig


class SyncEngine:
    """Use it so:

    with SyncEngine(model) as engine:
        for event in engine.generate(messages): ..."""

    def __init__(self, model: str | Path, config: EngineConfig | None = None) -> None:
        self._model, self._config = Path(model), config or EngineConfig()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stretto-engine", daemon=True)
        self._engine: PipelineEngine | None = None

    def __enter__(self) -> SyncEngine:
        self._thread.start()
        self._engine = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
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
        if self._engine is not None:
            asyncio.run_coroutine_threadsafe(self._engine.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def engine(self) -> PipelineEngine:
        assert self._engine is not None, "use it in a with statement"
        return self._engine

    def generate(self, messages: Sequence[Message], **kwargs: Any) -> Iterator[Event]:
        """As `PipelineEngine.generate`. Closing the iterator cancels the request."""
        return self._iterate(lambda: self.engine.generate(messages, **kwargs))

    def speak(self, text: str, **kwargs: Any) -> Iterator[Event]:
        return self._iterate(lambda: self.engine.speak(text, **kwargs))

    def _iterate(self, start: Callable[[], AsyncIterator[Event]]) -> Iterator[Event]:
        out: SimpleQueue[Event | BaseException | None] = SimpleQueue()

        async def pump() -> None:
            try:
                async for event in start():
                    out.put(event)
                out.put(None)
            except BaseException as e:
                out.put(e)
                raise

        task = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := out.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            task.cancel()
