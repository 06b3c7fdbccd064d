"""The tuner of whole steps, on a tiny model: what a step asks for, what its output is compared
with, what is saved."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from stretto.kernels.triton.descent import MOST_ERROR

tune_steps = pytest.importorskip("bench.kernels.in_step")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little as possible: the interpreter takes its time."""
    monkeypatch.setattr(tune_steps, "CHECKED", 1)
    monkeypatch.setattr("stretto.models.tune_steps.WARM", 0)
    monkeypatch.setattr(tune_steps, "SHALLOW", 1)


def test_a_whole_descent(brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, report = tmp_path / "out.json", tmp_path / "report.json"
    # Anything that runs is better: times mean nothing here.
    monkeypatch.setattr("stretto.kernels.triton.descent.LEAST_GAIN", -math.inf)
    options = (
        "--tiny --layers 1 --jobs 0 --context 20 --replays 1 --per-kernel 2 --kernels decode,pick "
        "--limit 1e9"
    )
    found = tune_steps.tuned([*options.split(), "--tuned", str(out), "--out", str(report)])
    assert {name.split("/")[0] for name in found.changes} == {"decode"}, "picks have no candidates"
    assert json.loads(out.read_text()) == found.changes
    told = json.loads(report.read_text())
    assert told["changes"] == found.changes
    assert [r["current"] for r in told["rows"]] == [True, False]
    limit = (
        MOST_ERROR if torch.cuda.is_available() else 1e-4
    )  # float32: another cut changes next to nothing
    assert all(r["error"] < limit for r in told["rows"])
    assert told["env"]["commit"] is not None


@torch.inference_mode()
def test_the_output_is_what_is_compared(brief: None) -> None:
    step = tune_steps.WholeStep(
        tune_steps.What("thinker", 1, context=20, layers=1, tiny=True), replays=1
    )
    asked = step.questions({})
    assert {"vector", "decode", "up_vector", "down_vector", "pick_text"} <= {
        a.kernel for a in asked.values()
    }
    assert step.error({}) == 0.0
    with step.on_stream():
        step.model.model.fused.layers[0].o.mul_(1.5)  # as a kernel would that adds up wrongly
    assert step.error({}) > MOST_ERROR
    with pytest.raises(tune_steps.TrialFailed):
        step.error(
            {name: a.found | {"BLOCK": 48} for name, a in asked.items() if a.kernel == "decode"}
        )


@pytest.mark.parametrize("stage", ["thinker", "talker"])
@pytest.mark.parametrize("batch", [1, 8, 128])
def test_the_released_model_with_fewer_layers_and_its_candidates(stage: str, batch: int) -> None:
    what = tune_steps.What(stage, batch, layers=5)
    config = what.config()
    assert config.thinker.text.num_layers == config.talker.text.num_layers == 5
    assert config.thinker.text.moe.num_experts == 128
    candidates = tune_steps.Candidates(batch, tiny=False, most=12)
    heads = {"thinker": (32, 4), "talker": (16, 2)}[stage]
    current = {"BLOCK": 64, "SPLITS": 2, "warps": 4, "soon": 0}
    some = candidates(tune_steps.tuning.TuningQuestion("decode", (batch, *heads), current, current))
    assert len(some) == 11
    assert current not in some
    assert {c["soon"] for c in some} == {0, 1}
