"""What the owner of a real checkpoint meets first: its name, its own settings, its card."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from stretto import hardware as device
from stretto.cli import main, parser
from stretto.commands import speak
from stretto.config import engine_flags as sizing
from stretto.config.engine import EngineConfig, HostSettings
from stretto.config.engine_flags import fit_card, rows_for
from stretto.config.server import ServerConfig
from stretto.errors import CheckpointError, StrettoError
from stretto.family import Wanted
from stretto.hub import find_model
from stretto.params import Params
from stretto.registry import open_model, write_tiny
from tests.server.conftest import Running, serve
from tests.server.scripted_engine import ScriptedEngine

GIB = 1 << 30


# ---- names


@pytest.fixture
def cache(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache as a download leaves it, with the tiny checkpoint as org/tiny; there is no
    network."""
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_dir, snapshot)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_name_is_found_in_the_cache(cache: Path) -> None:
    assert find_model("org/tiny") == cache
    assert open_model(cache).info.name == "org/tiny"  # and not the digest that its folder is called
    assert find_model(cache) == cache


def test_a_name_that_is_nowhere_says_what_to_run(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["generate", "Qwen/Qwen3-Omni-30B-A3B-Instruct", "--text", "hi", "--device", "cpu"])
        == 1
    )
    told = capsys.readouterr().err
    assert "hf download Qwen/Qwen3-Omni-30B-A3B-Instruct" in told
    assert "Traceback" not in told


def test_serve_by_name_without_a_network(tmp_path: Path) -> None:
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "stretto", "serve", "Qwen/Qwen3-Omni-30B-A3B-Instruct"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    assert "run: hf download Qwen/Qwen3-Omni-30B-A3B-Instruct --local-dir" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_is_not_here_is_downloaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, local_files_only: bool = False, allow_patterns: Any = ()) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        assert "*.safetensors" in allow_patterns
        return str(cache)

    said: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("org/other", said.append) == cache
    assert said == ["org/other is not in the Hugging Face cache: downloading it"]


def test_a_broken_download_goes_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next(cache.glob("*.safetensors")).unlink()
    asked: list[str] = []

    def download(name: str, local_files_only: bool = False, **_: object) -> str:
        if local_files_only:
            return str(cache)
        asked.append(name)
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(StrettoError, match="hf download org/tiny"):
        find_model("org/tiny")
    assert asked == ["org/tiny"]


# ---- what the checkpoint says of answers


@pytest.fixture
def changed(tiny_dir: Path, tmp_path: Path) -> tuple[Path, Path]:
    path = tmp_path / "changed"
    path.mkdir()
    for file in tiny_dir.iterdir():
        (path / file.name).symlink_to(file)
    (path / "generation_config.json").unlink()
    return path, path / "generation_config.json"


def test_the_checkpoints_own_sampling_is_the_default(changed: tuple[Path, Path]) -> None:
    directory, file = changed
    assert open_model(directory).info.defaults == Params()  # without a file
    file.write_text(json.dumps({
        "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 2048,
        "eos_token_id": [1],
        "talker_temperature": 0.5, "talker_top_k": 7, "talker_top_p": 0.8,
        "talker_repetition_penalty": 1.2,
        "talker_max_new_tokens": 100,
    }))  # fmt: skip
    model = open_model(directory)
    defaults = model.info.defaults
    text = (defaults.temperature, defaults.top_p, defaults.top_k, defaults.max_text_tokens)
    assert text == (0.6, 0.95, 20, 2048)
    assert defaults.max_frames == 99
    told = model.stage_params(Wanted("speech", defaults, 3))
    code0 = told["talker"].code0  # type: ignore[attr-defined]
    assert (code0.temperature, code0.top_k, code0.top_p, code0.repetition_penalty) == (
        0.5,
        7,
        0.8,
        1.2,
    )


def test_a_checkpoint_that_does_not_draw(changed: tuple[Path, Path]) -> None:
    directory, file = changed
    file.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "talker_do_sample": False}))
    defaults = open_model(directory).info.defaults
    assert (defaults.temperature, defaults.speech_temperature) == (0.0, 0.0)
    file.write_text(json.dumps({"top_p": "high"}))
    with pytest.raises(CheckpointError, match="top_p must be a number"):
        open_model(directory)


def test_a_model_that_reads_has_its_own_sampling_too(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tts", 0, "qwen3-tts")
    file = tmp_path / "tts" / "generation_config.json"
    assert open_model(tmp_path / "tts").info.defaults == replace(
        Params(), max_frames=8191
    )  # the rest is as ours
    file.write_text(json.dumps({
        "do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.8, "repetition_penalty": 1.2,
        "max_new_tokens": 100, "subtalker_temperature": 0.4, "subtalker_top_k": 3,
    }))  # fmt: skip
    model = open_model(tmp_path / "tts")
    assert model.info.defaults.max_frames == 99
    talker: Any = model.stage_params(Wanted("reading", model.info.defaults, 3))["talker"]
    drawn = [
        (s.temperature, s.top_k, s.top_p, s.repetition_penalty)
        for s in (talker.code0, talker.residual)
    ]
    assert drawn == [(0.5, 7, 0.8, 1.2), (0.4, 3, 1.0, 1.0)]
    stated = replace(model.info.defaults, speech_temperature=0.3)  # as a request does
    talker = model.stage_params(Wanted("reading", stated, 3))["talker"]
    assert talker.code0.temperature == 0.3
    file.write_text(json.dumps({"do_sample": False, "subtalker_dosample": False}))
    model = open_model(tmp_path / "tts")
    talker = model.stage_params(Wanted("reading", model.info.defaults, 3))["talker"]
    assert (talker.code0.temperature, talker.residual.temperature) == (0.0, 0.0)
    file.write_text(json.dumps({"subtalker_top_p": 3}))
    with pytest.raises(CheckpointError, match="top_p must be"):
        open_model(tmp_path / "tts")


def test_speak_reads_with_the_checkpoints_own_sampling() -> None:
    args = parser().parse_args(["speak", "M", "--out", "a.wav", "--max-audio-frames", "5"])
    made = speak.parameters(args, Params(speech_temperature=0.3))
    assert (made.speech_temperature, made.max_frames) == (0.3, 5)


def test_requests_say_how_speech_is_drawn_and_models_say_their_defaults() -> None:
    engine = ScriptedEngine(defaults=Params(temperature=0.6, speech_top_k=9))
    with serve(engine) as running:
        check_fields(running, engine)


def check_fields(running: Running, engine: ScriptedEngine) -> None:
    ask = {
        "messages": [{"role": "user", "content": "hi"}],
        "speech_temperature": 0.3,
        "max_tokens": 5,
    }
    assert running.ask("/v1/chat/completions", ask).status == 200
    p = engine.calls[-1]["params"]
    assert (p.temperature, p.speech_temperature, p.speech_top_k, p.max_text_tokens) == (
        0.6,
        0.3,
        9,
        5,
    )
    read = {"input": "hi", "voice": "ethan", "speech_top_p": 0.7, "response_format": "wav"}
    assert running.ask("/v1/audio/speech", read).status == 200
    assert (engine.calls[-1]["params"].speech_top_p, engine.calls[-1]["params"].speech_top_k) == (
        0.7,
        9,
    )
    defaults = running.ask("/v1/models").json["data"][0]["defaults"]
    assert (defaults["temperature"], defaults["speech_top_k"], defaults["max_tokens"]) == (
        0.6,
        9,
        1024,
    )


# ---- the card


@pytest.mark.parametrize(("spare", "rows"), [(74, 128), (43, 64), (13, 32), (5, 16), (-3, 16)])
def test_rows_follow_from_the_memory_beside_the_weights(spare: int, rows: int) -> None:
    assert rows_for(spare * GIB) == rows


def test_defaults_follow_from_the_card_unless_they_are_stated(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, server = EngineConfig(host=HostSettings(device="cuda")), ServerConfig()
    monkeypatch.setattr(sizing, "card_memory", lambda device: 140 * GIB)
    sized, front = fit_card(engine, server, tiny_dir, {"device"})
    assert (sized.host.max_rows, front.max_concurrent, front.max_live) == (128, 256, 128)
    assert sized.max_requests == front.engine_requests >= 256 + 128
    stated = replace(engine, host=replace(engine.host, max_rows=40))
    sized, front = fit_card(
        stated,
        replace(server, max_concurrent=7, max_live=9),
        tiny_dir,
        {"max_rows", "max_concurrent", "max_live"},
    )
    assert (sized.host.max_rows, front.max_concurrent, front.max_live) == (40, 7, 9)


def test_a_machine_without_a_card_has_no_card_memory() -> None:
    assert device.card_memory("cpu") is None
    assert device.card_memory("cuda:99") is None
