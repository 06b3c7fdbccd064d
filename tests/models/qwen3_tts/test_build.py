"""Qwen3-TTS's kernels are compiled ahead as Qwen3-Omni's are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stretto.config.engine import HostSettings
from stretto.models import building
from stretto.models import compile_ahead as shared
from stretto.models.compile_ahead import CompileJob, CompileProcesses, Room, tasks_of
from stretto.models.qwen3_tts.build import BUILD, WORDS, small_stage
from stretto.models.qwen3_tts.config import TtsConfig
from stretto.stage.runner import prefill_graphs
from tests.models.qwen3_tts.conftest import Checkpoint
from tests.models.qwen3_tts.hosted import Hosted

COMPILE_AHEAD = BUILD.compile_ahead
assert COMPILE_AHEAD is not None
SETTINGS = HostSettings(device="cuda:0", max_rows=8, blocks={"talker": 47})


def compile_job(model: Path) -> CompileJob:
    return CompileJob(
        COMPILE_AHEAD.adapter,
        str(model),
        "cpu",
        "float32",
        4,
        64,
        16,
        18,
        tuple(tasks_of("talker", [1, 2, 4], [16])),
    )


def test_small_models_are_as_wide(tts: Checkpoint) -> None:
    job = compile_job(tts("custom_voice"))
    adapter: Any = small_stage(job).adapter
    config = TtsConfig.read(job.model)
    assert len(adapter.model.model.layers) == min(2, config.talker.decoder.num_layers)
    assert adapter.model.text_table.shape == (WORDS, config.talker.decoder.hidden_size)
    assert (
        adapter.model.code_predictor.model.config.hidden_size == config.talker.predictor.hidden_size
    )


def test_a_process_runs_all_its_tasks(tts: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    real = shared.decode_step

    def spy(adapter: Any, rows: torch.Tensor, *args: Any) -> torch.Tensor:
        decoded.append(len(rows))
        return real(adapter, rows, *args)

    monkeypatch.setattr(shared, "decode_step", spy)
    shared.run(compile_job(tts("custom_voice")))
    assert set(decoded) == {1, 2, 4}


def test_a_host_compiles_once(
    tts: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs: list[CompileJob] = []

    def command(module: str, text: str) -> list[str]:
        assert module == "stretto.models.compile_ahead"
        jobs.append(msgspec.json.decode(text, type=CompileJob))
        return [sys.executable, "-c", "pass"]

    monkeypatch.setattr(shared, "python", command)
    monkeypatch.setattr(shared, "has_kernels", lambda *compile_job: True)
    monkeypatch.setattr(shared, "surroundings", lambda device: {"gpu": "none"})
    monkeypatch.setattr(shared, "directory", lambda: tmp_path)
    monkeypatch.setattr(shared.os, "sched_getaffinity", lambda pid: set(range(8)))
    config = TtsConfig.read(tts("base"))

    def begin(*stages: str) -> CompileProcesses | None:
        room, blocks = Room(100 << 30, 1 << 30), SETTINGS.blocks
        return shared.start(
            COMPILE_AHEAD, "dir", config, stages, SETTINGS, blocks, torch.bfloat16, room
        )

    assert begin("enroller", "code2wav") is None, "these have no such kernels"
    first = begin("enroller", "code2wav", "talker")
    assert first is not None
    tasks = [t for job in jobs for t in job.tasks]
    assert sorted(n for t in tasks if t.kind == "decode" for n in t.sizes) == [1, 2, 4, 8]
    assert sorted(n for t in tasks if t.kind == "prompts" for n in t.sizes) == list(
        prefill_graphs.SIZES
    )
    assert {job.blocks for job in jobs} == {16}
    first.finish()
    assert begin("enroller", "code2wav", "talker") is None


def test_a_cpu_has_no_part_in_this(tts: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(building, "start", never)
    host = Hosted(tts("base"), ("talker", "enroller", "code2wav"))
    assert tuple(host.host.stages) == ("talker", "enroller", "code2wav")
