"""What quantised weights stand for."""

from __future__ import annotations

import torch


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return weight.float() * scale[..., None]
