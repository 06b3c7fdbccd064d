from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stretto.server.realtime.vad import Batcher
from tests.server.conftest import Running, serve
from tests.server.realtime.loudness_vad import LoudnessVad
from tests.server.scripted_engine import ScriptedEngine


@contextmanager
def talking(engine: ScriptedEngine, **settings: Any) -> Iterator[Running]:
    """A server whose sessions take what is loud for speech."""
    with serve(engine, **{"drain_timeout": 1.0, **settings}) as running:
        running.server.service.sessions.batcher = Batcher(LoudnessVad)
        yield running


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def running(engine: ScriptedEngine) -> Iterator[Running]:
    with talking(engine) as it:
        yield it
