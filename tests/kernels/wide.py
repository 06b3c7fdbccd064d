"""What quantised weights stand for."""

from __future__ import annotations

import torch

from stretto.kernels.reference.packed import PackedWeight, widen
from stretto.layers.targets import Float8Rows


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return weight.float() * scale[..., None]


def wide_value(t: object, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(t, Float8Rows):
        return dequantize(t.weight, t.scale).to(dtype)
    assert isinstance(t, PackedWeight | torch.Tensor)
    return widen(t, dtype)
