"""Formats beside each other: which turns there are, what a cap is for a server, headers that say
how random weights are stored, and whether the programs run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from bench import formats
from bench.formats import GIB, Turn, memory_flags, planned
from bench.harness.checkpoint import RELEASED, checkpoint, load_format
from bench.steps import formats as steps
from stretto.models.qwen3_omni.load import Source
from stretto.registry import open_model
from stretto.testing.qwen3_omni import released_formats


def test_turns_go_round_and_caps_come_last() -> None:
    args = argparse.Namespace(weights=["bf16", "int4"], levels=[1, 8], rounds=2, caps=[32.0, 24.0])
    found = planned(args)
    assert [t.weights for t in found] == ["bf16", "int4", "int4", "bf16", "int4", "int4-talker"]
    assert found[-2:] == [Turn("int4", (8,), cap=32.0), Turn("int4-talker", (2,), cap=24.0)]
    assert found[-1].name == "int4-talker in 24 GiB"


def test_a_cap_is_for_the_plan_and_for_the_allocator() -> None:
    flags, environment = memory_flags(24.0, 141 * GIB)
    share = float(flags[1])
    assert flags[0] == "--memory-share"
    assert 23 * GIB < share * 141 * GIB < 24 * GIB
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{flags[1]}"}
    assert memory_flags(0.0, 141 * GIB) == ([], {})


@pytest.mark.parametrize("model", list(RELEASED))
def test_headers_say_how_random_weights_are_stored(model: str) -> None:
    with checkpoint(model) as directory:
        assert load_format(model) == "dummy"
        source = Source.open(directory, "meta", torch.bfloat16, "dummy", False, packed=True)
        assert source.config.formats == released_formats(RELEASED[model])
        assert source.directory is None, "nothing is read"
        weights = open_model(directory).info.weights
        assert bool(weights) == (model != "released")
        size = sum(f.stat().st_size for f in directory.glob("*.safetensors"))
        held = sum(f.stat().st_blocks * 512 for f in directory.glob("*.safetensors"))
        assert held <= 0.01 * size, "a hole"


def test_steps_of_several_formats_in_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "found.json"
    flags = ["--tiny", "--weights", "bf16", "int4", "--batches", "2", "--prompts", "20"]
    assert steps.main([*flags, "--context", "20", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["complete"]
    assert [(one["weights"], one["what"]) for one in found["found"]] == [
        (weights, what)
        for weights in ("bf16", "int4")
        for what in ("thinker step", "prompt", "talker frame")
    ]
    assert "of bf16" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        steps.main([])
    assert steps.main([*flags, "--limit", "-1", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["complete"] is False


def test_a_turn_without_time_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "described", dict)
    out = tmp_path / "found.json"
    flags = ["--model", "tiny", "--device", "cpu", "--limit", "-1", "--out", str(out)]
    assert formats.main(flags) == 0
    found = json.loads(out.read_text())
    assert (found["complete"], found["turns"]) == (False, [])
