"""An engine through which many requests went holds no more than before them."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from pathlib import Path

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine.engine import PipelineEngine
from stretto.engine.pipeline import Pipeline
from stretto.messages.requests import Ended, Text
from stretto.params import Params
from stretto.types import RequestId
from tests.engine.common import CHATS, collect, run

WARM, COUNTED = 30, 200


async def ask(engine: PipelineEngine, number: int) -> None:
    """A request with an id of its caller's, as a server gives each; every third is left in the
    middle."""
    events = engine.generate(
        CHATS["text"],
        modalities=["text"],
        params=Params(max_text_tokens=4),
        request_id=RequestId(f"req-{number:024}"),
    )
    reading = asyncio.create_task(collect(events))
    while not engine.requests.running:
        await asyncio.sleep(0)
    [request] = engine.requests.running.values()
    request.apply(Text(request.id, (11, 12)), b"")
    if number % 3:
        request.apply(Ended(request.id, "thinker", "stop", 0.0, (1.0, 2.0)), b"")
    else:
        await asyncio.sleep(0)
        reading.cancel()
    await asyncio.wait([reading])


def traced() -> int:
    """Bytes, but for those of the chat template, whose names the interpreter's own cache of methods
    takes up."""
    gc.collect()
    ours = [tracemalloc.Filter(True, f"*/{part}/*") for part in ("stretto/engine", "asyncio")]
    return sum(t.size for t in tracemalloc.take_snapshot().filter_traces(ours).traces)


def test_requests_leave_nothing_behind(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "ready", lambda self, speak: True)
    monkeypatch.setattr(Pipeline, "stages_by_host", lambda self, stages: {})

    async def work() -> int:
        engine = PipelineEngine(tiny_dir, EngineConfig())
        for number in range(WARM):
            await ask(engine, number)
        before = traced()
        for number in range(WARM, WARM + COUNTED):
            await ask(engine, number)
        return traced() - before

    tracemalloc.start()
    try:
        grown = run(work())
    finally:
        tracemalloc.stop()
    assert grown < 20 * COUNTED, f"{grown} bytes of {COUNTED} requests"
