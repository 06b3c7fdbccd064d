"""Texts read aloud by a model without a thinker, through the engine: in one host and over links,
alone and beside others, all at once and while they are written."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from stretto.config.engine import EngineConfig
from stretto.config.placement import Placement
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk, CodeFrames, Finished
from stretto.errors import Invalid
from stretto.params import Params, SpeechStyle
from stretto.preprocess.pool.jobs import Conversation
from stretto.testing.qwen3_tts import write_tiny
from tests.engine.common import run

TEXT = (
    "The rain in the garden is quiet this morning, isn't it? 12 people said: yes.\nOthers did not."
)
PARAMS = Params(greedy_speech=True, max_frames=6, min_frames=6, want_codes=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tts") / "base"
    write_tiny(folder, 0, "base")
    return folder


def clip() -> Conversation:
    out = io.BytesIO()
    soundfile.write(
        out,
        0.1 * np.random.default_rng(0).standard_normal(24000),
        24000,
        format="WAV",
        subtype="FLOAT",
    )
    sound = {"data": base64.b64encode(out.getvalue()).decode(), "format": "wav"}
    content = [
        {"type": "input_audio", "input_audio": sound},
        {"type": "text", "text": "hello there"},
    ]
    return Conversation.of(json.dumps([{"role": "user", "content": content}]).encode())


async def heard(
    engine: PipelineEngine, text: Any, style: SpeechStyle, **more: Any
) -> tuple[list[list[int]], np.ndarray]:
    codes, samples = [], []
    async for event in engine.speak(text, style=style, params=PARAMS, **more):
        if isinstance(event, CodeFrames):
            codes += event.codes.tolist()
        elif isinstance(event, AudioChunk):
            samples.append(event.samples)
        else:
            assert isinstance(event, Finished)
            if isinstance(text, str):
                assert event.usage.prompt_tokens == 3 + len(
                    engine.builder.tokenizer.encode(text)
                ), "and its role"
    return codes, np.concatenate(samples)


async def written(*sizes: int) -> AsyncIterator[str]:
    at = 0
    for size in sizes:
        yield TEXT[at : at + size]
        at += size
        await asyncio.sleep(0)
    yield TEXT[at:]


async def answers(folder: Path, config: EngineConfig) -> list[Any]:
    async with PipelineEngine.open(folder, config) as engine:
        voice = await engine.enrol(clip())
        style = SpeechStyle(language="english", voice=voice)
        alone = await heard(engine, TEXT, style)
        others = await asyncio.gather(
            heard(engine, TEXT, style),
            heard(engine, written(5, 1, 1, 20), style),
            heard(engine, written(*[1] * len(TEXT)), style),
            heard(engine, TEXT, SpeechStyle(voice=voice)),
        )
        for codes, wave in others[:3]:
            assert codes == alone[0]
            np.testing.assert_allclose(wave, alone[1], rtol=0, atol=1e-5)
        assert others[3][0] != alone[0]
        with pytest.raises(Invalid, match="nothing to say"):
            await heard(engine, written_nothing(), style)
        with pytest.raises(Invalid, match="does not offer"):
            async for _ in engine.generate([{"role": "user", "content": "Hello"}]):
                pass
        for wrong, param in (
            (SpeechStyle("Slowly."), "instructions"),
            (SpeechStyle(voice=b"?"), "voice"),
        ):
            with pytest.raises(Invalid) as found:
                await heard(engine, TEXT, wrong)
            assert found.value.param == param
        return [voice, alone]


async def written_nothing() -> AsyncIterator[str]:
    yield " "


def test_one_host_equals_processes_equals_sockets(base: Path) -> None:
    placed: list[tuple[Placement, str]] = [
        ("one", "shm"),
        ("processes", "shm"),
        ("processes", "tcp"),
    ]
    first, *others = [run(answers(base, EngineConfig(placement=p, connector=c))) for p, c in placed]
    for voice, (codes, wave) in others:
        assert voice == first[0]
        assert codes == first[1][0]
        np.testing.assert_allclose(wave, first[1][1], rtol=0, atol=1e-5)
