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
from stretto.preprocess.template import Tokenizer
from stretto.preprocess.text_chunks import Coming, Writing, passages
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
    engine: PipelineEngine, text: Any, manner: SpeechStyle, **more: Any
) -> tuple[list[list[int]], np.ndarray]:
    codes, samples = [], []
    async for event in engine.speak(text, manner=manner, params=PARAMS, **more):
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
        manner = SpeechStyle(language="english", voice=voice)
        alone = await heard(engine, TEXT, manner)
        others = await asyncio.gather(
            heard(engine, TEXT, manner),
            heard(engine, written(5, 1, 1, 20), manner),
            heard(engine, written(*[1] * len(TEXT)), manner),
            heard(engine, TEXT, SpeechStyle(voice=voice)),
        )
        for codes, wave in others[:3]:
            assert codes == alone[0]
            np.testing.assert_allclose(wave, alone[1], rtol=0, atol=1e-5)
        assert others[3][0] != alone[0]
        with pytest.raises(Invalid, match="nothing to say"):
            await heard(engine, written_nothing(), manner)
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


def test_tokens_of_a_text_do_not_depend_on_how_it_is_written(base: Path) -> None:
    tokenizer = Tokenizer.open(base)
    for text in (
        TEXT,
        "a",
        "  two  spaces ",
        "Tëst  ñ! 3.14 don't\n\n\nstop",
        "\n\nafter breaks",
        "e\u0301 e\u0301",
    ):
        wanted = tokenizer.encode(text.lstrip("\r\n"))
        for size in (1, 2, 3, 7, 100):
            writing = Writing(tokenizer.encode)
            got = [t for i in range(0, len(text), size) for t in writing.push(text[i : i + size])]
            assert got + writing.finish() == wanted, (text, size)


async def in_pieces(text: str, size: int, turns: int = 0) -> AsyncIterator[str]:
    for i in range(0, len(text), size):
        for _ in range(turns):
            await asyncio.sleep(0)
        yield text[i : i + size]


LONG = """ One two. Three "four!" Five, six: 3.14 and so on… (Really?) Yes - or no; abcdefghijklmnopqrstuvwxyz.
你好。今天天气很好！」再见，and the end.

"""  # noqa: E501


@pytest.mark.parametrize("most", [6, 12, 24, 50, 1000])
def test_a_text_that_comes_is_cut_into_the_same_passages(most: int) -> None:
    async def cut(size: int) -> list[str]:
        found = Coming(in_pieces(LONG, size), most).passages()
        return ["".join([piece async for piece in pieces()]) async for pieces in found]

    async def nothing() -> list[str]:
        found = Coming(in_pieces("", 1), most).passages()
        return ["".join([piece async for piece in pieces()]) async for pieces in found]

    for size in (1, 2, 3, 7, 40, len(LONG)):
        assert run(cut(size)) == passages(LONG, most)
    assert run(nothing()) == [""]


def test_who_leaves_a_passage_in_its_middle_loses_nothing() -> None:
    """Its reader is cancelled at any moment, as when a request ends early, or begins again, as when
    it was refused."""

    async def cut(leave: int) -> list[str]:
        heard: list[str] = []
        async for pieces in Coming(in_pieces(LONG, 3, turns=2), 24).passages():
            task = asyncio.ensure_future(anext(pieces()))
            for _ in range(leave):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            heard.append("".join([piece async for piece in pieces()]))
        return heard

    async def skip() -> int:
        return len([pieces async for pieces in Coming(in_pieces(LONG, 3), 24).passages()])

    for leave in range(8):
        assert run(cut(leave)) == passages(LONG, 24)
    assert run(skip()) == len(passages(LONG, 24))


def test_passages_end_where_sentences_do() -> None:
    assert passages("One two. Three four! Five", 12) == ["One two.", "Three four!", "Five"]
    assert passages("It is 3.14 now. And then", 16) == ["It is 3.14 now.", "And then"]
    assert passages("你好。今天天气很好！再见", 12) == ["你好。今天天气很好！", "再见"]
    assert passages("A b c d e f, g h i and so on", 12) == ["A b c d e f,", "g h i and so", "on"]
    assert passages("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert passages("  ", 4) == []
    text = "word " * 1000
    assert " ".join(passages(text, 99)) == text.strip()
    assert max(map(len, passages(text, 99))) <= 99
