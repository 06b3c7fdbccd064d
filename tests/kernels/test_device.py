"""Launches by a device's limits, and what other cards would run, compiled for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stretto.errors import Invalid
from stretto.kernels.triton import device
from stretto.kernels.triton.device import CARDS, fitting, limits, pdl

ROOT = Path(__file__).parents[2]
WEIGHTS = torch.empty(1, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    limits.cache_clear()
    yield
    limits.cache_clear()


@pytest.mark.parametrize(
    ("card", "stages"),
    [("sm_80", 4), ("sm_86", 3), ("sm_89", 3), ("sm_90", 4), ("sm_100", 4), ("sm_120", 3)],
)
def test_a_loop_has_as_many_stages_as_fit(
    card: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest tiles of a prompt's experts: 48 KiB a stage, one of them in registers where the
    matrix units do not read shared memory."""
    monkeypatch.setenv("STRETTO_KERNELS_CARD", card)
    assert fitting(4, WEIGHTS, 128, WEIGHTS, 256, 64) == stages
    assert fitting(2, WEIGHTS, 128, WEIGHTS, 256, 64) == 2
    assert fitting(4, WEIGHTS, 1024, WEIGHTS, 1024, 64) == 2


def test_limits_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRETTO_KERNELS_CARD", raising=False)
    shared = {"shared_memory_per_block": 48 << 10, "shared_memory_per_block_optin": 163 << 10}
    found = SimpleNamespace(major=8, minor=7, **shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    asked = limits(torch.device("cuda", 0))
    assert (asked.capability, asked.shared_bytes) == ((8, 7), 163 << 10)
    assert not asked.dependent_launch
    assert limits(torch.device("cpu")) == CARDS["sm_90"]


def test_an_unknown_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_KERNELS_CARD", "h200")
    with pytest.raises(Invalid, match=r"must be one of sm_80, .*, got 'h200'"):
        limits(torch.device("cpu"))


@pytest.mark.parametrize(("card", "there"), [("sm_89", False), ("sm_90", True), ("sm_120", True)])
def test_kernels_depend_on_the_one_in_front_where_a_device_can(
    card: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_KERNELS_CARD", card)
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    assert pdl(on_gpu) == there  # type: ignore[arg-type]
    assert device.protocol(torch.empty(1)) == {"PDL": False}


@pytest.mark.parametrize(
    ("card", "kernels", "least"),
    [("sm_86", "_gate_up,_down", 8), ("sm_120", "_gate_up,_down", 8), ("sm_100", "_attend", 3)],
)
def test_kernels_compile_for_other_cards(
    card: str, kernels: str, least: int, tmp_path: Path
) -> None:
    """Those that need the most shared memory, or that Triton fails to compile with an H200's
    parameters; `bench kernels --parts cards` compiles all. In a process of its own: this one may
    have chosen Triton's interpreter."""
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    out = tmp_path / "table.json"
    program = [sys.executable, "-m", "bench", "kernels", "--parts", "cards", "--out", str(out)]
    chosen = ["--cards", card, "--stages", "thinker", "--kernels", kernels]
    done = subprocess.run(
        [*program, *chosen], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(out.read_text())[f"{card} thinker"]
    assert len(table) >= least
    assert all(0 < found["shared_bytes"] <= CARDS[card].shared_bytes for found in table)
