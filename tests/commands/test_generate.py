"""`stretto generate`: its inputs, and what it refuses before it loads a model."""

from __future__ import annotations

import io
import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from stretto.cli import main
from tests.commands.processes import STRETTO, check_error, run_stretto
from tests.preprocess.samples import video_file


def test_generate_hears_sees_and_reads_from_a_pipe(
    tiny_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    soundfile.write(tmp_path / "a b.wav", np.zeros(16000, np.float32), 16000)
    Image.new("RGB", (64, 64)).save(tmp_path / "p.png")
    (tmp_path / "v.mp4").write_bytes(video_file(num_frames=4))
    monkeypatch.setattr("sys.stdin", io.StringIO("What is this?\n"))
    words = [
        "generate",
        str(tiny_dir),
        "--audio",
        str(tmp_path / "a b.wav"),
        "--image",
        str(tmp_path / "p.png"),
    ]
    words += ["--video", str(tmp_path / "v.mp4")]
    words += [
        "--system",
        "Be brief.",
        "--text",
        "-",
        "--max-tokens",
        "3",
        "--text-only",
        "--device",
        "cpu",
    ]
    assert main([*words, "--json", str(tmp_path / "o.json")]) == 0
    report = json.loads((tmp_path / "o.json").read_text())
    assert len(report["text_ids"]) <= 3
    config = json.loads((tiny_dir / "config.json").read_text())["thinker_config"]
    assert config["audio_token_id"] in report["prompt_ids"]
    assert config["image_token_id"] in report["prompt_ids"]
    assert config["video_token_id"] in report["prompt_ids"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--audio", "nowhere.wav"], "--audio nowhere.wav: there is no such file"),
        ([], "nothing to answer"),
        (["--messages", "m.json", "--text", "hi"], "leave out --text"),
        (["--text", "hi", "--max-tokens", "0"], "max_text_tokens is out of range"),
    ],
)
def test_generate_says_what_it_misses(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "no-model", *words]) == 2
    assert says in capsys.readouterr().err


SMALL = ["--max-text-tokens", "4", "--max-frames", "4", "--device", "cpu"]


def test_unknown_flags_show_their_own_commands_usage(tiny_dir: Path) -> None:
    done = run_stretto("generate", tiny_dir, "--text", "hi", "--tempreature", "1")
    check_error(done, "usage: stretto generate", 2)
    assert "did you mean --temperature?" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--text", "hi", "--out", "x.mp3"), "x.mp3: can be .wav or .flac"),
        (("--messages", "nowhere.json"), "nowhere.json"),
        (("--batch", "nowhere.jsonl", "--out-dir", "d"), "nowhere.jsonl"),
        (("--text", "hi", "--text-only", "--out", "b.wav"), "--text-only makes no speech"),
    ],
)
def test_generate_refuses_before_it_loads(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # There is no such model: had it been looked for first, the words would be others.
    assert main(["generate", str(tmp_path / "no-model"), *words]) == 2
    assert says in capsys.readouterr().err


def test_generate_into_head(tiny_dir: Path) -> None:
    words = ["generate", str(tiny_dir), "--text", "hi", "--text-only", *SMALL]
    with subprocess.Popen(
        [*STRETTO, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        stderr = process.stderr.read()
        assert process.wait() == 128 + signal.SIGPIPE
    assert "Traceback" not in stderr
    assert "BrokenPipe" not in stderr
