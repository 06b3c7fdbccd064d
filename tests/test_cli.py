"""The command line as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from stretto.cli import main, parser
from stretto.models.qwen3_tts.config import TtsConfig
from stretto.registry import open_model


def test_generate_writes_what_it_says(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = {n: tmp_path / n for n in ("a.wav", "s.npy", "c.npy", "o.json", "t.json")}
    code = main(
        ["generate", str(tiny_dir), "--text", "Hello!", "--greedy", "--max-text-tokens", "6",
        "--max-frames", "9",
         "--out", str(out["a.wav"]), "--samples", str(out["s.npy"]), "--codes", str(out["c.npy"]),
         "--json", str(out["o.json"]), "--trace", str(out["t.json"]), "--device", "cpu"]
    )  # fmt: skip
    assert code == 0
    report = json.loads(out["o.json"].read_text())
    samples, codes = np.load(out["s.npy"]), np.load(out["c.npy"])
    assert codes.shape == (report["frames"], 16)
    assert len(samples) == report["samples"] == 1920 * report["frames"] - 555
    wave, rate = soundfile.read(out["a.wav"], dtype="float32")
    assert rate == 24000
    np.testing.assert_allclose(wave, samples, atol=1e-4)
    assert report["text"] in capsys.readouterr().out
    lanes = {
        e["args"]["name"]
        for e in json.loads(out["t.json"].read_text())["traceEvents"]
        if e["ph"] == "M"
    }
    assert lanes >= {"thinker", "talker", "code2wav"}


def test_generate_answers_a_file_of_conversations(tiny_dir: Path, tmp_path: Path) -> None:
    lines = [json.dumps([{"role": "user", "content": f"Question {i}"}]) for i in range(3)] + [
        "not json"
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    code = main(
        ["generate", str(tiny_dir), "--batch", str(tmp_path / "in.jsonl"), "--out-dir",
        str(tmp_path / "out"),
         "--text-only", "--max-text-tokens", "4", "--device", "cpu"]
    )  # fmt: skip
    assert code == 1  # the last line failed, the others are there
    texts = [json.loads((tmp_path / "out" / f"{i}.json").read_text())["text"] for i in range(3)]
    assert all(texts)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generate", "/nowhere", "--text", "hi"], "/nowhere: there is no such directory"),
        (["generate", "TINY", "--text", "hi", "--voice", "nobody"], "nobody"),
        (["generate", "TINY", "--messages", "/nowhere.json"], "nowhere.json"),
        (["generate", "TINY", "--text", "hi", "--placement", "moon"], "placement"),
        (
            [
                "generate",
                "TINY",
                "--text",
                "hi",
                "--expert-weights",
                "float8",
                "--dtype",
                "float16",
            ],
            "float8",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(args: list[str], says: str, tiny_dir: Path, capsys) -> None:
    code = main([str(tiny_dir) if a == "TINY" else a for a in args] + ["--device", "cpu"])
    assert code in (1, 2)
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


def test_tiny_and_help(tmp_path: Path) -> None:
    assert main(["tiny", str(tmp_path / "t"), "--seed", "5"]) == 0
    assert (tmp_path / "t" / "config.json").exists()
    shown = subprocess.run(
        [sys.executable, "-m", "stretto", "--help"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0


def test_speak_reads_standard_input_while_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as a live text in the engine: here the file that comes of it is looked at."""
    folder, out = tmp_path / "tts", tmp_path / "a.wav"
    assert main(["tiny", str(folder), "--family", "qwen3-tts"]) == 0
    theirs, ours = os.pipe()
    with os.fdopen(theirs) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        os.write(ours, b"Hello, how are ")
        os.write(ours, "you täday?".encode())
        os.close(ours)
        command = [
            "speak",
            str(folder),
            "--out",
            str(out),
            "--device",
            "cpu",
            "--greedy",
            "--max-frames",
            "3",
        ]
        assert main([*command, "--voice", "vivian"]) == 0
    assert soundfile.info(out).frames in (2 * 1920, 3 * 1920)
    assert main([*command, "--text", "Hello", "--voice", "nobody"]) == 2


def test_tiny_checkpoints_of_families(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", str(tmp_path / "x"), "--family", "unheard-of"]) == 2
    assert "qwen3-tts-base" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("qwen3-tts", "custom_voice", "1b7"),
        ("qwen3-tts-design", "voice_design", "1b7"),
        ("qwen3-tts-base", "base", "1b7"),
        ("qwen3-tts-0.6b", "custom_voice", "0b6"),
        ("qwen3-tts-0.6b-base", "base", "0b6"),
    ],
)
def test_tiny_checkpoints_of_all_kinds_and_sizes(
    tmp_path: Path, name: str, kind: str, size: str
) -> None:
    assert main(["tiny", str(tmp_path / "t"), "--family", name]) == 0
    config = TtsConfig.read(tmp_path / "t")
    assert (config.kind, config.size) == (kind, size)
    assert open_model(tmp_path / "t").info.instructions == (
        name in ("qwen3-tts", "qwen3-tts-design")
    )


def test_one_name_for_one_thing() -> None:
    args = {
        "serve": ["serve", "--api-key", "k"],
        "talk": ["talk", "--api-key", "k", "--max-tokens", "3"],
        "bench": ["bench", "URL", "--api-key", "k", "--max-tokens", "3"],
        "generate": ["generate", "M", "--text", "hi", "--max-tokens", "3"],
    }
    for job, words in args.items():
        parsed = vars(parser().parse_args(words))
        assert parsed.get("api_key", "k") in ("k", ["k"]), job
        assert parsed.get("max_tokens", 3) == 3, job


def test_tiny_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    assert main(["tiny", str(tmp_path)]) == 2
    assert (tmp_path / "config.json").read_text() == "mine"
    assert main(["tiny", str(tmp_path / "config.json")]) == 2
    assert main(["tiny", str(tmp_path / "config.json" / "below")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["tiny", str(tmp_path / "empty")]) == 0
