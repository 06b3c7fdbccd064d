"""`stretto tune` on a tiny model, with a clock that each launch moves on by what its parameters are
made out to cost: what is found, kept, and loaded."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.cli import main, parser
from stretto.commands import tune
from stretto.errors import Invalid
from stretto.kernels import triton as kernels
from stretto.testing import qwen3_tts
from stretto.testing.qwen3_omni import write_tiny
from tests.conftest import EVEN

tuning = pytest.importorskip("stretto.kernels.triton.tuning")
attention = pytest.importorskip("stretto.kernels.triton.attention")
candidates = pytest.importorskip("stretto.kernels.triton.candidates")
tune_steps = pytest.importorskip("stretto.models.tune_steps")


@dataclasses.dataclass
class VirtualTime:
    """Milliseconds that launches of attention take: the fewer warps, the better, but not one."""

    now: float = 0.0

    def mark(self) -> float:
        return self.now

    def between(self, start: float, stop: float) -> float:
        return 1.0 + stop - start

    def launched(self, c: dict[str, int]) -> dict[str, int]:
        self.now += {1: 9.0, 2: 1.0}.get(c["warps"], 4.0)
        return c


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[VirtualTime]:
    watch = VirtualTime()
    config = attention.config
    monkeypatch.setattr(attention, "config", lambda *a: watch.launched(config(*a)))
    monkeypatch.setattr(tune_steps, "WARM", 0)
    monkeypatch.setattr(kernels, "able", lambda device: True)
    monkeypatch.setenv("STRETTO_KERNELS", "force")
    monkeypatch.setenv("STRETTO_TUNING", str(tmp_path / "own.json"))
    for cached in (kernels.dtypes, tuning._table):
        cached.cache_clear()
    yield watch
    monkeypatch.undo()
    for cached in (kernels.dtypes, tuning._table):
        cached.cache_clear()


def search(model: Path, watch: VirtualTime, *flags: str, said: list[str]) -> Any:
    args = parser().parse_args(["tune", str(model), "--device", "cpu", "--layers", "1", *flags])
    tune.check(args)
    found = tune.search_for(args, model, watch, said.append)
    found.replays, found.clock = 1, lambda: 0.0
    return found


def test_faster_parameters_are_stored_and_loaded(watch: VirtualTime, tmp_path: Path) -> None:
    model, said = tmp_path / "model", list[str]()
    write_tiny(model, changes=EVEN)
    flags = ["--stages", "thinker", "--rows", "2", "--context", "20", "--kernels", "decode"]
    found = search(model, watch, *flags, said=said).run()
    ((name, changed),) = found.items()
    assert name.startswith("decode/2x")
    assert changed["warps"] == 2
    assert json.loads((tmp_path / "own.json").read_text()) == found
    key = tuple(map(int, name.partition("/")[2].split("x")))
    assert tuning.config("decode", key, {"warps": 4})["warps"] == 2
    assert said[-1] == f"1 kernels are faster now; {tmp_path / 'own.json'} has them"
    assert any("decode/2x" in line and "warps" in line for line in said)


def test_speech_is_tuned_too_and_slower_parameters_are_not_stored(
    watch: VirtualTime, tmp_path: Path
) -> None:
    model, said = tmp_path / "model", list[str]()
    qwen3_tts.write_tiny(model)
    flags = ["--rows", "1", "--context", "20", "--kernels", "nothing"]
    assert search(model, watch, *flags, said=said).run() == {}
    assert not (tmp_path / "own.json").exists()
    assert said[-1].startswith("nothing was found faster")


def test_what_is_asked_for_is_checked(watch: VirtualTime, tmp_path: Path) -> None:
    write_tiny(tmp_path, changes=EVEN)
    with pytest.raises(Invalid, match="ears have no such kernels; there are thinker, talker"):
        search(tmp_path, watch, "--stages", "ears", said=[])
    with pytest.raises(Invalid, match="--rows must be from 1 to 128"):
        search(tmp_path, watch, "--rows", "129", said=[])
    with pytest.raises(Invalid, match="--limit must be 1 or more"):
        search(tmp_path, watch, "--limit", "nan", said=[])


def test_without_a_card_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", "anything"]) == 1
    assert "there is no CUDA device here" in capsys.readouterr().err


def asked(kernel: str, key: tuple[int, ...], found: dict[str, int]) -> Any:
    return tuning.TuningQuestion(kernel, key, found, found)


def test_candidates_divide_the_shape() -> None:
    current = {"BN": 16, "BK": 128, "warps": 4, "stages": 2, "swap": 0}
    some = candidates.candidates(asked("up_matrix", (16, 48, 384), current))
    assert {"BN": 8} not in [{k: c[k] for k in ("BN",)} for c in some if c["BN"] > 16]
    assert {c["BN"] for c in some} == {8, 16}, "48 has no 32"
    assert {c["BK"] for c in some} == {64, 128}, "384 has no 256"
    assert {c["stages"] for c in some} == {2, 4}, "a loop has two at least"
    assert {c["swap"] for c in some} == {0, 1}
    masked = candidates.candidates(asked("route", (16, 129, 2048), {"BN": 32, "BK": 128}))
    assert {c["BN"] for c in masked} == {16, 32, 64}
    split = {"SPLITS": 4, "BN": 16, "BK": 64}
    wide = candidates.candidates(asked("split", (64, 8192, 2048), split))
    assert min(c["BN"] for c in wide) == 16, "a counter for each tile"
    assert candidates.candidates(asked("pick_text", (1000,), {"block": 4096})) == []


def test_a_file_is_named_after_card_compiler_and_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("STRETTO_TUNING", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "version", lambda package: "3.6.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 5090")
    said = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 16 2025\n"
    (tmp_path / "version").write_text(said)
    assert tuning.driver(tmp_path / "version") == "570.86.15"
    assert tuning.driver(tmp_path / "nothing") == "none"
    monkeypatch.setattr(tuning, "driver", lambda: "570.86.15")
    tuning.card.cache_clear()
    name = "nvidia-geforce-rtx-5090-triton-3.6.0-driver-570.86.15.json"
    assert tuning.own_file() == tmp_path / "stretto" / "tuning" / name
    monkeypatch.undo()
    tuning.card.cache_clear()


def test_a_broken_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text("[1]")
    monkeypatch.setenv("STRETTO_TUNING", str(own))
    tuning._table.cache_clear()
    with pytest.raises(Invalid, match=r"own.json: is not a file of launch parameters"):
        tuning.config("vector", (1, 1), {})
    monkeypatch.undo()
    tuning._table.cache_clear()


def test_the_command_is_there() -> None:
    args = parser().parse_args(["tune", "model"])
    assert isinstance(args, argparse.Namespace)
    assert args.rows == [1, 8, 32, 128]
