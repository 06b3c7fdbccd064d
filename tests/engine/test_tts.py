"""Texts read in sentences by a model that declares so, through the engine: as each sentence alone,
joined; one request to everybody else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto import embedded
from stretto.config.engine import EngineConfig, PoolSettings
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk, CodeFrames, Event, Finished
from stretto.engine.passages import Seam
from stretto.errors import Busy, Invalid
from stretto.preprocess.text_chunks import Passages, divide, passages
from stretto.testing.qwen3_omni import write_tiny
from tests.engine.common import run

SPOKEN = 30
RULES = Passages.by_sentence(SPOKEN, "en")
TEXT = "Dr. Ash saw 2 cats. They ran away! It was a good day for all of them and so they slept."
PARTS = [part for p in passages(TEXT, RULES) for part in divide(p, SPOKEN, "en")]
FRAMES = 4
"""Of each sentence: the checkpoint's own limit, so that reading goes on."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentences")
    declared = {"sentence": SPOKEN, "normalise": "en"}
    write_tiny(folder, changes={embedded.DECLARATION: declared})
    file = folder / "generation_config.json"
    limited = {**json.loads(file.read_text()), "talker_max_new_tokens": FRAMES + 1}
    file.write_text(json.dumps(limited))
    return folder


async def events_of(engine: PipelineEngine, text: Any, **changed: Any) -> list[Event]:
    params = replace(engine.info.defaults, greedy_speech=True, seed=3, want_codes=True, **changed)
    return [e async for e in engine.speak(text, params=params)]


def codes(events: list[Event]) -> list[list[int]]:
    return [c for e in events if isinstance(e, CodeFrames) for c in e.codes.tolist()]


def chunks(events: list[Event]) -> list[np.ndarray]:
    return [e.samples for e in events if isinstance(e, AudioChunk)]


def end(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


async def written(size: int) -> AsyncIterator[str]:
    for at in range(0, len(TEXT), size):
        yield TEXT[at : at + size]
        await asyncio.sleep(0)


def test_a_text_is_read_as_its_sentences(reader: Path) -> None:
    async def main() -> None:
        config = EngineConfig(prompts=PoolSettings(), max_requests=1)
        async with PipelineEngine.open(reader, config) as engine:
            assert engine.info.passages == RULES
            whole = await events_of(engine, TEXT)
            alone = [await events_of(engine, part) for part in PARTS]
            assert len(PARTS) == 4
            assert codes(whole) == [c for events in alone for c in codes(events)]
            seam = Seam(engine.info.sample_rate)
            joined: list[AudioChunk | None] = []
            for i, events in enumerate(alone):
                joined += [seam.join()] if i else []
                joined += [seam.push(samples) for samples in chunks(events)]
            expected = np.concatenate([c.samples for c in (*joined, seam.finish()) if c])
            np.testing.assert_allclose(np.concatenate(chunks(whole)), expected, atol=1e-5)
            used = [end(events).usage for events in alone]
            assert end(whole).usage.prompt_tokens == sum(u.prompt_tokens for u in used)
            assert end(whole).usage.frames == sum(u.frames for u in used)
            assert end(whole).usage.samples == len(expected)
            await while_it_is_written(engine, whole)
            await within_limits(engine, whole)
            await of_nothing(engine)
            await to_its_end(engine)

    run(main())


async def while_it_is_written(engine: PipelineEngine, whole: list[Event]) -> None:
    for size in (1, 11):
        live = await events_of(engine, written(size))
        assert codes(live) == codes(whole)
        np.testing.assert_allclose(
            np.concatenate(chunks(live)), np.concatenate(chunks(whole)), atol=1e-5
        )


async def within_limits(engine: PipelineEngine, whole: list[Event]) -> None:
    """A limit of the caller's is that of the whole text."""
    some = await events_of(engine, TEXT, max_frames=FRAMES - 1)
    assert codes(some) == codes(whole)[: FRAMES - 1]
    assert end(some).audio == "length"


async def of_nothing(engine: PipelineEngine) -> None:
    for text in ("你好", written_nothing()):
        with pytest.raises(Invalid, match="nothing"):
            await events_of(engine, text)
    assert engine.metrics()["stretto_engine_running"] == 0


async def written_nothing() -> AsyncIterator[str]:
    yield " "


async def to_its_end(engine: PipelineEngine) -> None:
    """All of a text is one request among the engine's; a server that stops waits for its end."""
    params = replace(engine.info.defaults, greedy_speech=True)
    drained: asyncio.Task[None] | None = None
    found: list[Event] = []
    async with aclosing(engine.speak(TEXT, params=params)) as events:  # type: ignore[type-var]
        async for event in events:
            found.append(event)
            if drained is None:
                assert engine.metrics()["stretto_engine_running"] == 1
                with pytest.raises(Busy, match="running already"):
                    await events_of(engine, "More.")
                drained = asyncio.create_task(engine.drain(60.0))
                await asyncio.sleep(0)
    assert end(found).usage.frames == len(PARTS) * FRAMES
    assert drained is not None
    await drained
    with pytest.raises(Busy, match="shutting down"):
        await events_of(engine, TEXT)
