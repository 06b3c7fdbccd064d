"""`generation_config.json` of a checkpoint gives the defaults of requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import CheckpointError
from stretto.params import Params, RequestOptions
from stretto.registry import open_model, write_tiny


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
    stages = model.stage_params(RequestOptions("speech", replace(defaults, seed=3)))
    code0 = stages["talker"].code0  # type: ignore[attr-defined]
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


def talker_params(model: Any, params: Params) -> Any:
    return model.stage_params(RequestOptions("tts", replace(params, seed=3)))["talker"]


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
    talker: Any = talker_params(model, model.info.defaults)
    drawn = [
        (s.temperature, s.top_k, s.top_p, s.repetition_penalty)
        for s in (talker.code0, talker.residual)
    ]
    assert drawn == [(0.5, 7, 0.8, 1.2), (0.4, 3, 1.0, 1.0)]
    stated = replace(model.info.defaults, speech_temperature=0.3)  # as a request does
    talker = talker_params(model, stated)
    assert talker.code0.temperature == 0.3
    file.write_text(json.dumps({"do_sample": False, "subtalker_dosample": False}))
    model = open_model(tmp_path / "tts")
    talker = talker_params(model, model.info.defaults)
    assert (talker.code0.temperature, talker.residual.temperature) == (0.0, 0.0)
    file.write_text(json.dumps({"subtalker_top_p": 3}))
    with pytest.raises(CheckpointError, match="top_p must be"):
        open_model(tmp_path / "tts")
