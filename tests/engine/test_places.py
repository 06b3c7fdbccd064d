"""A request counts from the moment it is accepted, while its prompt is still being built: against
the limit, and for whoever waits until all are over."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import Event, Finished
from stretto.engine.pipeline import Pipeline
from stretto.errors import Busy, Gone
from stretto.messages.requests import Ended
from stretto.params import Params, RequestOptions
from stretto.preprocess.packed_prompt import PackedPrompt
from tests.engine.common import collect, run


class Engine(PipelineEngine):
    """Without hosts: its pipeline says it is up, and prompts are built when `go` is set."""

    def __init__(self, model: Path, **config: Any) -> None:
        super().__init__(model, EngineConfig(**config))
        self.go = asyncio.Event()

    def ask(self) -> AsyncIterator[Event]:
        async def build() -> PackedPrompt:
            await self.go.wait()
            return PackedPrompt.of_ids((1, 2, 3))

        return self.requests.run(build, RequestOptions("text", Params(max_text_tokens=4)))

    async def answer(self) -> None:
        """End what was admitted, as the thinker would."""
        while not self.requests.running:
            await asyncio.sleep(0)
        for request in self.requests.running.values():
            request.apply(Ended(request.id, "thinker", "stop", 0.0), b"")


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "ready", lambda self, speak: True)
    monkeypatch.setattr(Pipeline, "stages_by_host", lambda self, stages: {})


@pytest.mark.usefixtures("up")
def test_a_drain_waits_for_prompts_that_are_being_built(tiny_dir: Path) -> None:
    async def work() -> None:
        engine = Engine(tiny_dir)
        asked = engine.ask()
        running = asyncio.create_task(collect(engine.ask()))
        await asyncio.sleep(0)
        draining = asyncio.create_task(engine.drain(60.0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not draining.done()
        with pytest.raises(Busy):
            await anext(asked)  # it came too late, though it was asked for before
        engine.go.set()
        await engine.answer()
        assert isinstance((await running).end, Finished)
        await draining
        assert engine.metrics()["stretto_engine_running"] == 0

    run(work())


@pytest.mark.usefixtures("up")
def test_prompts_that_are_being_built_take_places(tiny_dir: Path) -> None:
    async def work() -> None:
        engine = Engine(tiny_dir, max_requests=2)
        running = [asyncio.create_task(collect(engine.ask())) for _ in range(2)]
        await asyncio.sleep(0)
        assert engine.metrics()["stretto_engine_running"] == 2
        with pytest.raises(Busy):
            await anext(engine.ask())
        assert engine.metrics()["stretto_engine_refused_total"] == 1
        running[0].cancel()  # gives its place back, also without a ticket
        await asyncio.gather(running[0], return_exceptions=True)
        third = asyncio.create_task(collect(engine.ask()))
        await asyncio.sleep(0)
        engine.go.set()
        while len(engine.requests.running) < 2:
            await asyncio.sleep(0)
        await engine.answer()
        await asyncio.gather(running[1], third)
        await engine.drain(0.0)
        assert engine.metrics()["stretto_engine_running"] == 0

    run(work())


@pytest.mark.usefixtures("up")
def test_a_prompt_that_is_built_after_the_end_is_gone(tiny_dir: Path) -> None:
    async def work() -> None:
        engine = Engine(tiny_dir)
        running = asyncio.create_task(collect(engine.ask()))
        await asyncio.sleep(0)
        await engine.close()
        engine.go.set()
        with pytest.raises(Gone):
            await running

    run(work())
