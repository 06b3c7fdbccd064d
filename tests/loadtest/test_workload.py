from __future__ import annotations

import base64
import io
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import soundfile

from stretto.errors import Invalid
from stretto.loadtest.sse import wav_file
from stretto.loadtest.workload import Workload, poisson, read_prompts, read_sound


def test_body_of_a_spoken_answer() -> None:
    work = Workload(
        prompts=("One?", "Two?"),
        voice="ethan",
        system="Be brief.",
        max_tokens=7,
        extra={"ignore_eos": True},
    )
    body = work.body(3, "tiny")
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Two?"},
    ]
    assert body["modalities"] == ["text", "audio"]
    assert body["audio"] == {"format": "pcm16", "voice": "ethan"}
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == (
        "tiny",
        7,
        True,
        True,
    )
    assert "temperature" not in body, "what is not said is left to the server"


def test_text_only() -> None:
    body = Workload(speak=False).body(0, "tiny")
    assert body["modalities"] == ["text"]
    assert "audio" not in body


def test_filler_is_long_enough_repeatable_and_never_the_same() -> None:
    work = Workload(prompt_tokens=50)
    texts = [work.messages(i)[0]["content"] for i in range(20)]
    assert all(len(t.split()) == 50 for t in texts)
    assert len({t[:12] for t in texts}) == 20
    assert texts == [work.messages(i)[0]["content"] for i in range(20)]


def test_sound_goes_with_the_prompt() -> None:
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    assert Workload(prompts=("",), sound="AAAA").messages(0)[0]["content"] == [part]
    assert Workload(prompts=("Hm?",), sound="AAAA").messages(0)[0]["content"] == [
        part,
        {"type": "text", "text": "Hm?"},
    ]


def test_prompts_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One?\n\nTwo?\n")
    assert read_prompts(tmp_path / "a.txt") == ("One?", "Two?")
    talk = [{"role": "user", "content": "Three?"}]
    (tmp_path / "b.jsonl").write_text(
        '"One?"\n{"messages": [{"role": "user", "content": "Three?"}]}\n'
    )
    prompts = read_prompts(tmp_path / "b.jsonl")
    assert prompts == ("One?", talk)
    assert Workload(prompts=prompts).messages(1) == talk


@pytest.mark.parametrize("text", ["", "\n", "7\n", "{}\n", "[]\n", "{broken\n"])
def test_bad_prompt_files_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(Invalid, match=r"bad\.jsonl"):
        read_prompts(path)
    with pytest.raises(Invalid, match="missing"):
        read_prompts(tmp_path / "missing")


def test_sound_files(tmp_path: Path) -> None:
    wav = wav_file(16000, b"\x01\x00" * 50)
    (tmp_path / "a.wav").write_bytes(wav)
    assert read_sound(tmp_path / "a.wav") == (base64.b64encode(wav).decode(), "wav")
    (tmp_path / "a.mp3").write_bytes(b"ID3...")
    assert read_sound(tmp_path / "a.mp3")[1] == "mp3"
    samples = np.linspace(-0.5, 0.5, 400).astype(np.float32)
    soundfile.write(tmp_path / "a.flac", np.stack([samples, samples], 1), 8000)
    data, kind = read_sound(tmp_path / "a.flac")
    assert kind == "wav"
    back, rate = soundfile.read(io.BytesIO(base64.b64decode(data)), dtype="float32")
    assert rate == 8000
    assert back == pytest.approx(samples, abs=1e-4)
    (tmp_path / "a.ogg").write_bytes(b"nothing of the kind")
    with pytest.raises(Invalid, match="not a sound file"):
        read_sound(tmp_path / "a.ogg")


def test_arrivals_have_the_asked_rate_and_are_repeatable() -> None:
    arrivals = list(islice(poisson(20.0, seed=1), 4000))
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(4000 / 20.0, rel=0.1)
    spaces = np.diff(arrivals)
    assert spaces.std() == pytest.approx(spaces.mean(), rel=0.1)  # as chance has it
    assert arrivals[:9] == list(islice(poisson(20.0, seed=1), 9))
    assert arrivals[1] != list(islice(poisson(20.0, seed=2), 2))[1]
