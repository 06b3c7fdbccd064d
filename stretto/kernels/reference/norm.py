"""RMS normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension in float32, cast back, then scale: the rounding order of the
    reference model. In float32 that is what the library's own function does, in one call."""
    if x.dtype == torch.float32 and not x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)
