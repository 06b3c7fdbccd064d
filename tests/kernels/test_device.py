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
from stretto.kernels.triton.device import CARDS, fitting, limits, pdl, stages_within

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
    found = SimpleNamespace(major=8, minor=7, multi_processor_count=16, **shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    asked = limits(torch.device("cuda", 0))
    assert (asked.capability, asked.shared_bytes) == ((8, 7), 163 << 10)
    assert asked.multiprocessors == 16
    assert not asked.dependent_launch
    assert not asked.direct
    assert limits(torch.device("cpu")) == CARDS["sm_90"]


def test_an_unknown_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_KERNELS_CARD", "h200")
    with pytest.raises(Invalid, match=r"must be one of sm_80, .*, got 'h200'"):
        limits(torch.device("cpu"))


@pytest.mark.parametrize(("card", "there"), [("sm_89", False), ("sm_90", True), ("sm_120", True)])
def test_kernels_depend_on_the_one_in_front_where_a_device_can(
    card: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card of before, on a Hopper one, whose products go on reading shared memory."""
    monkeypatch.setenv("STRETTO_KERNELS_CARD", card)
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    hopper = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    assert pdl(on_gpu) == there  # type: ignore[arg-type]
    assert limits(on_gpu.device).shared_bytes == CARDS[card].shared_bytes
    assert limits(on_gpu.device).direct
    assert device.protocol(torch.empty(1)) == {"PDL": False}


def test_dependent_launch_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_KERNELS_DEPENDENT_LAUNCH", "off")
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    found = SimpleNamespace(
        major=9, minor=0, shared_memory_per_block_optin=227 << 10, shared_memory_per_block=1,
        multi_processor_count=132,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert not pdl(on_gpu)  # type: ignore[arg-type]
    assert limits(on_gpu.device).shared_bytes == 227 << 10, "and nothing else"
    limits.cache_clear()
    monkeypatch.setenv("STRETTO_KERNELS_DEPENDENT_LAUNCH", "maybe")
    with pytest.raises(Invalid, match="must be on or off, got 'maybe'"):
        limits(torch.device("cpu"))


def test_pipeline_stages_leave_room_for_other_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STRETTO_KERNELS_CARD", "sm_86")
    assert stages_within(4, WEIGHTS, 24 << 10) == 4
    limits.cache_clear()
    assert stages_within(4, WEIGHTS, 24 << 10, 24 << 10) == 3
    assert stages_within(4, WEIGHTS, 24 << 10, 90 << 10) == 2


@pytest.mark.parametrize(
    ("card", "stages", "kernels", "least"),
    [
        ("sm_86", "thinker", "_gate_up,_down", 8),
        ("sm_120", "thinker", "_gate_up,_down", 8),
        ("sm_100", "thinker", "_attend", 3),
        ("sm_86", "thinker fp8 blocks", "_sorted_up,_sorted_down,_widen_rows", 8),
        ("sm_120", "thinker int4", "_sorted_up,_down_one,_up_matrix", 8),
        ("sm_89", "thinker fp8 products", "_product,_narrow", 3),
        ("sm_80", "code2wav", "_attend,_settle", 5),
        ("sm_80", "encoders", "_turn", 1),
    ],
)
def test_kernels_compile_for_other_cards(
    card: str, stages: str, kernels: str, least: int, tmp_path: Path
) -> None:
    """Those that need the most shared memory, that Triton fails to compile with an H200's
    parameters, or that read what a card has no type for; `bench kernels --parts cards` compiles
    all. In a process of its own: this one may have chosen Triton's interpreter."""
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    out = tmp_path / "table.json"
    program = [sys.executable, "-m", "bench", "kernels", "--parts", "cards", "--out", str(out)]
    chosen = ["--cards", card, "--stages", stages, "--kernels", kernels]
    done = subprocess.run(
        [*program, *chosen], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    table = found["variants"][f"{card} {stages}"]
    assert len(table) >= least
    assert {row["kernel"] for row in table} == set(kernels.split(","))
    assert all(row["shared_bytes"] <= CARDS[card].shared_bytes for row in table)
    assert found["cards"][card]["problems"] == 0
