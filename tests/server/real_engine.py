"""A server with the real engine and the tiny model behind it, for tests that ask over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stretto.config.engine import EngineConfig
from stretto.engine.engine import PipelineEngine
from tests.server.conftest import Reply, Running

T = TypeVar("T")


@dataclass(slots=True)
class Served:
    running: Running
    engine: PipelineEngine
    keys: tuple[str, ...] = ()

    def post(self, path: str, key: int | None = None, **body: Any) -> Reply:
        """A request with the key of this number, from 1 on."""
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {self.keys[key - 1]}"
        reply = self.running.ask(path, body, headers=headers)
        assert reply.status == 200, reply.body
        return reply

    def chat(self, messages: Any, key: int | None = None, **body: Any) -> Any:
        return self.post("/v1/chat/completions", key, messages=messages, **body).json

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """On the engine's loop, with patience."""
        return asyncio.run_coroutine_threadsafe(work, self.running.loop).result()


async def started(start: asyncio.Task[None]) -> None:
    await start


@contextmanager
def served(
    model: Path | PipelineEngine, config: EngineConfig | None = None, **settings: Any
) -> Iterator[Served]:
    """Of an engine that was made and not started, or of one with this model and configuration."""
    engines: list[PipelineEngine] = []
    starts: list[asyncio.Task[None]] = []

    async def open_engine() -> PipelineEngine:
        engines.append(
            model
            if isinstance(model, PipelineEngine)
            else PipelineEngine(model, config or EngineConfig())
        )
        starts.append(asyncio.create_task(engines[0].start()))
        return engines[0]

    with Running(open_engine, drain_timeout=1.0, **settings) as running:
        it = Served(running, engines[0], settings.get("api_key", ()))
        it.do(started(starts[0]))
        yield it
