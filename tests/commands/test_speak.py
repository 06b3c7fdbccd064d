"""`stretto speak`: what it refuses before it loads a model, and its default sampling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from stretto.api import Answer
from stretto.cli import main, parser
from stretto.commands import speak
from stretto.engine.events import AudioChunk, Event, Finished, FinishReason, Usage
from stretto.params import Params


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--out", "x.mp3"), "x.mp3: can be .wav or .flac"),
        (("--out", "x.wav", "--clip", "nowhere.wav"), "--clip nowhere.wav: there is no such file"),
        (("--out", "x.wav", "--max-audio-frames", "0"), "max_frames is out of range"),
        (("--out", "x.wav", "--speed", "9"), "speed is out of range: 9.0"),
        (("--out", "x.wav"), "no-model: there is no such directory"),
    ],
)
def test_speak_refuses_before_it_loads(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["speak", str(tmp_path / "no-model"), "--text", "hi", *words]) == 2
    assert says in capsys.readouterr().err


def test_speak_reads_with_the_checkpoints_own_sampling() -> None:
    args = parser().parse_args(
        ["speak", "M", "--out", "a.wav", "--speed", "1.5", "--max-audio-frames", "5"]
    )
    made = speak.parameters(args, Params(speech_temperature=0.3))
    assert (made.speech_temperature, made.speed, made.max_frames) == (0.3, 1.5, 5)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_speech_that_was_cut_says_so(
    reason: FinishReason, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def events() -> AsyncIterator[Event]:
        yield AudioChunk(0, np.zeros(1920, np.float32))
        yield Finished("stop", reason, Usage(1, 0, 1, 1920), 0)

    answer = asyncio.run(Answer.of(events(), 24_000))
    assert speak.finish(tmp_path / "a.wav", answer) == 0
    assert ("met a limit" in capsys.readouterr().err) == (reason == "length")
