"""What all families' hosts do alike before they load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.models import building
from stretto.models.qwen3_omni.host import StageBuilder as Omni
from stretto.models.qwen3_tts.host import StageBuilder as Tts


@pytest.mark.parametrize("family", [Omni, Tts])
@pytest.mark.parametrize("fused", [True, False])
def test_a_card_without_the_fused_kernels_is_named(
    family: Any, fused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building.fast, "apply", lambda dtype, device: fused)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    context = SimpleNamespace(
        device=torch.device("cuda"),
        settings=None,
        beside=(),
        model="somewhere",
        fit=lambda plans: 0,
    )
    source = SimpleNamespace(config=None, dtype=torch.bfloat16)
    family([], context)._plan(source, [], lambda *told: {}, lambda *told: [], lambda *told: None)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [text.startswith("an old card: the plain path") for text in said] == (
        [] if fused else [True]
    )
