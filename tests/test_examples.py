"""The example programs, run as they stand."""

from __future__ import annotations

import runpy
import sys
import wave
from pathlib import Path

import pytest

from tests.server.conftest import Running

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name))


def test_text(
    real_server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("client_text.py", real_server.url, monkeypatch=monkeypatch)
    assert capsys.readouterr().out.strip()


def test_speech_into_a_file_and_a_spoken_question_from_it(
    real_server: Running,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("client_speech.py", real_server.url, monkeypatch=monkeypatch)
    assert "s of speech in answer.wav" in capsys.readouterr().out
    with wave.open("answer.wav") as file:
        assert (file.getframerate(), file.getnchannels()) == (24_000, 1)
        assert file.getnframes() > 1000
    run("client_spoken_question.py", "answer.wav", real_server.url, monkeypatch=monkeypatch)
    assert "tokens of sound)" in capsys.readouterr().out
