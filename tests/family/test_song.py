"""The package's own kinds of stage serve any model: batches, chunked prompts, preemption and prefix
cache included."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from stretto import registry
from stretto.config.engine import EngineConfig, HostSettings
from stretto.config.placement import Placement
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk, Event, Finished, TextDelta
from stretto.params import Params
from stretto.preprocess.template import Tokenizer
from tests.family.song import expected

COUNT = 19
WORDS = "The rain in the garden is quiet this morning, and all the birds are quiet too. "


@pytest.mark.parametrize("placement", ["one", "processes"])
def test_sums_stay_sums(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Placement
) -> None:
    monkeypatch.setitem(registry.FAMILIES, "toy_song", "tests.family.song:open_song")
    shutil.copy(tiny_dir / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toy_song"}))
    tokenizer = Tokenizer.open(tmp_path)
    # Blocks for half of what six requests need at once: some are preempted. Prompts take several
    # steps.
    host = HostSettings(
        block_size=4, blocks={"poet": 32}, max_rows=4, max_context=96, prefill_chunk=8
    )
    questions = [WORDS * 2 + str(i) for i in range(6)]

    async def ask(engine: PipelineEngine, question: str) -> Finished:
        params, said = Params(max_text_tokens=COUNT), [{"role": "user", "content": question}]
        events: list[Event] = [e async for e in engine.generate(said, params=params)]
        ids = tokenizer.encode(question)
        tokens, samples = expected(ids, COUNT)
        assert [i for e in events if isinstance(e, TextDelta) for i in e.ids] == tokens
        heard = np.concatenate([e.samples for e in events if isinstance(e, AudioChunk)])
        np.testing.assert_array_equal(heard, samples)
        end = events[-1]
        assert isinstance(end, Finished)
        assert (end.text, end.audio, end.usage.frames) == ("length", "stop", COUNT)
        return end

    async def work() -> None:
        config = EngineConfig(placement=placement, host=host)
        async with PipelineEngine.open(tmp_path, config) as engine:
            await asyncio.gather(*(ask(engine, q) for q in questions))
            again = await ask(engine, questions[-1])
            assert again.usage.cached_tokens > 0, "its beginning was in the prefix cache"

    asyncio.run(work())
