"""Pictures for the vision encoder, and what the reference makes of them."""

from __future__ import annotations

from typing import Any

import torch

from stretto.layers.targets import targets
from stretto.models.qwen3_omni.config import VisionConfig
from stretto.models.qwen3_omni.vision_encoder import Grid, VisionEncoder, VisionRows

PREFIX = "thinker.visual."


EXACT = {"rtol": 0.0, "atol": 1e-5}  # of rows around 1; seen: 3e-6


PATCH = 3 * 2 * 16 * 16


def adopt(tower: Any, config: VisionConfig) -> VisionEncoder:
    """Ours, with the reference's weights."""
    ours = VisionEncoder(config).to(tower.device)
    theirs = {PREFIX + name: value for name, value in tower.state_dict().items()}
    places = targets(ours, PREFIX)
    assert places.keys() == theirs.keys()
    for name, place in places.items():
        place.copy_(theirs[name])
    return ours


def reference(tower: Any, patches: torch.Tensor, grids: list[Grid]) -> VisionRows:
    with torch.no_grad():
        out = tower(patches.to(tower.device), grid_thw=torch.tensor(grids, device=tower.device))
    return VisionRows(out.pooler_output, tuple(out.deepstack_features))


def random_patches(grids: list[Grid], seed: int = 0) -> torch.Tensor:
    return torch.randn(
        sum(t * h * w for t, h, w in grids), PATCH, generator=torch.Generator().manual_seed(seed)
    )


def assert_rows(ours: VisionRows, theirs: VisionRows) -> None:
    for a, b in zip((ours.main, *ours.deep), (theirs.main, *theirs.deep), strict=True):
        torch.testing.assert_close(a, b, **EXACT)
