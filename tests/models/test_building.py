"""What all families' hosts do alike before they load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.models import building
from stretto.models.building import FamilyBuild, HostBuilder


@pytest.mark.parametrize("fused", [True, False])
def test_a_card_without_the_fused_kernels_is_named(
    fused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building.fast, "apply", lambda dtype, device: fused)
    monkeypatch.setattr(building, "room_for_pools", lambda *args: 1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    context: Any = SimpleNamespace(
        device=torch.device("cuda"),
        settings=SimpleNamespace(
            memory_share=1.0, max_context=64, block_size=16, blocks={}, max_rows=1
        ),
        loading_later=(),
        model="somewhere",
        fit=lambda plans: 0,
    )
    source: Any = SimpleNamespace(config=None, dtype=torch.bfloat16)
    family: FamilyBuild[Any] = FamilyBuild(open=lambda context: source, stages={})
    HostBuilder(family, [], context).plan(source, [])
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [text.startswith("an old card: several times slower") for text in warnings] == (
        [] if fused else [True]
    )
