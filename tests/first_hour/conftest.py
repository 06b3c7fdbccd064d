"""A server with the real engine and the tiny model, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.config.engine import EngineConfig
from stretto.config.preprocess import PoolSettings
from stretto.engine.engine import PipelineEngine
from stretto.engine.protocol import EngineClient
from tests.server.conftest import Running


@pytest.fixture(scope="session")
def real(tiny_dir: Path) -> Iterator[Running]:
    async def open_engine() -> EngineClient:
        engine = PipelineEngine(tiny_dir, EngineConfig(prompts=PoolSettings()))
        await engine.start()
        return engine

    with Running(open_engine) as running:
        yield running
