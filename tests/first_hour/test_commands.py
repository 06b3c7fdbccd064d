"""Flags of `generate`, `talk` and `bench` that people try first."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from stretto.cli import main, parser
from stretto.loadtest.http import ListedModel
from stretto.loadtest.player import Packet
from stretto.loadtest.report import overview, rates, table
from stretto.loadtest.runner import Closed, Goal, Level, Sample
from stretto.loadtest.sse import Words
from stretto.talk.sound import NoSound
from stretto.talk.typed import Talk
from tests.preprocess.samples import video_file

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("name", ["README.md", "docs/serve.md"])
def test_commands_of_the_documents_are_understood(name: str) -> None:
    text = (ROOT / name).read_text()
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.M | re.S))
    typed = re.findall(r"^(?:\.venv/bin/)?stretto ([^#<\n]*)", blocks, re.M)
    assert len(typed) >= 3
    for words in typed:
        _, unknown = parser().parse_known_args(shlex.split(words))
        assert not unknown, words


def test_the_readme_names_the_build_of_torch_that_is_installed() -> None:
    (default,) = re.findall(
        r"TORCH:=?-?(torch==[\d.]+)", (ROOT / "scripts" / "setup.sh").read_text()
    )
    assert f"(default `{default}`" in (ROOT / "README.md").read_text()


def test_talk_understands_exit_and_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "answer-1.wav").write_bytes(b"mine")
    lines = iter(["hello", "exit", "never asked"])
    out, asked = io.StringIO(), []

    def ask(body):
        asked.append(body)
        return iter([Words("Hi.")])

    talk = Talk(
        ask, ListedModel("m"), out, lambda prompt: next(lines), NoSound("none"), save=tmp_path
    )
    assert talk.run() == 0
    assert len(asked) == 1
    talk.keep(24000, b"\0\0" * 2400)
    assert (tmp_path / "answer-1.wav").read_bytes() == b"mine"
    assert (tmp_path / "answer-2.wav").exists()


def test_bench_counts_good_answers() -> None:
    good = Sample(0, 0.0, [0.1, 0.2, 0.3], [Packet(0.2, 1.0), Packet(0.9, 1.0)], 1.0, text_tokens=5)
    late = Sample(1, 0.0, [0.1], [Packet(1.5, 1.0)], 2.0)
    torn = Sample(2, 0.0, [0.1], [Packet(0.2, 0.1), Packet(2.0, 1.0)], 2.5)
    failed = Sample(3, 0.0, error="busy", message="later")
    level = Level(Closed(4), [good, late, torn, failed], 2.0)
    goal = Goal(first=1.0, wait=0.1)
    assert [goal.met(s) for s in level.samples] == [True, False, False, False]
    assert good.token_seconds == pytest.approx(0.05)
    speed = rates(level, goal)
    assert (speed["good_share"], speed["good_requests_per_s"]) == (0.25, 0.5)
    shown = table(level, (0.0,), goal)
    assert "goodput: 25 % of 4 requests, 0.50 a second" in shown
    assert "text tokens/s" in shown
    assert "per text token" in shown
    assert "25 %" in overview([level], goal)
