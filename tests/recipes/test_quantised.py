"""The embedded model, quantised: it answers typed questions as before, and speaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.results import read
from recipes.nano import quantised
from stretto import embedded
from tests.recipes.conftest import RECOGNISER

CHECKPOINT = embedded.find()
pytestmark = [
    pytest.mark.skipif(CHECKPOINT is None, reason="the embedded model's weights are not here"),
    pytest.mark.skipif(
        not (RECOGNISER / "tokenizer.bin").exists(),
        reason="no recogniser: scripts/recogniser.py fetches it",
    ),
]


def test_its_answers_survive_rounding(tmp_path: Path) -> None:
    assert CHECKPOINT is not None
    out = tmp_path / "found.json"
    quantised.run(CHECKPOINT, RECOGNISER, out, ["int4, talker too"], typed=10, spoken=4)
    [(name, found)] = read(out)["formats"].items()
    assert name == "int4, talker too"
    assert found["typed"] >= 0.9
    assert found["ended"] == 4
    assert found["word_error_rate"]["fixed"] < 0.6
    size = sum(f.stat().st_size for f in CHECKPOINT.glob("*.safetensors"))
    assert found["bytes"] < 0.8 * size
    written = out.stat().st_mtime_ns
    quantised.run(CHECKPOINT, RECOGNISER, out, [name], typed=10, spoken=4)
    assert out.stat().st_mtime_ns == written, "what is there is not made again"
