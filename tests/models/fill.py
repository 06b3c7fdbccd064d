"""Weights that go to a GPU."""

from __future__ import annotations

import pytest
import torch

from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.random_weights import fill_dummy
from stretto.models.weights import build
from tests.models.sizes import estimate


def fill_on_gpu(
    config: OmniConfig, factor: float = 1.0, extra: int = 0
) -> tuple[Thinker, int, int]:
    """A thinker of random weights, its size and the most memory that it took meanwhile. Skips the
    test unless there is room for `factor` times its size and `extra` bytes."""
    size = estimate({"thinker": lambda: Thinker(config)}, torch.bfloat16)["thinker"]
    if torch.cuda.mem_get_info()[0] < factor * size + extra:
        pytest.skip("needs a larger device")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    module = build(lambda: Thinker(config), "cuda", torch.bfloat16)
    fill_dummy(module, 0)
    torch.cuda.synchronize()
    return module, size, torch.cuda.max_memory_allocated() - before
