"""`stretto speak`: what it refuses before it loads a model, and its default sampling."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.cli import main, parser
from stretto.commands import speak
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
