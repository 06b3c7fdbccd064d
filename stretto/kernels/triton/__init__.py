"""Triton kernels for the sizes of the real model, in bfloat16 on a CUDA device (Ampere, or later).

Each has its plain PyTorch reference in the package above; which of the two runs is decided by
`usable`, per call. This module imports no triton, so that a machine without it never misses it."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from stretto.errors import Invalid
from stretto.kernels.triton.device import limits

MAX_ROWS = 128
"""Rows of a decode step that the fused kernels take."""


@cache
def dtypes() -> tuple[torch.dtype, ...]:
    """Types that kernels are used for. STRETTO_KERNELS: "off" for none, "force" for float32 too (to
    compare with an oracle; slower than the plain way)."""
    mode = os.environ.get("STRETTO_KERNELS", "on").lower()
    if mode == "off" or importlib.util.find_spec("triton") is None:
        return ()
    return (torch.bfloat16, torch.float32) if mode == "force" else (torch.bfloat16,)


CAPABILITY = (8, 0)
"""Of a device, at least: from there on the matrix units take bfloat16. `device.py` knows what else
launches depend on."""


@cache
def able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def apply(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype in dtypes() and able(device)


NARROW = (8, 9)
"""Compute capability from which the matrix units multiply float8 with float8."""


@cache
def narrow_products(device: torch.device) -> bool:
    """Whether prompts' rows become float8 where weights are. STRETTO_KERNELS_FLOAT8: "products" for
    that; else rows stay wide, and products are exact."""
    mode = os.environ.get("STRETTO_KERNELS_FLOAT8", "weights").lower()
    if mode not in ("weights", "products"):
        raise Invalid(f"STRETTO_KERNELS_FLOAT8 must be weights or products, got {mode!r}")
    return mode == "products" and limits(device).capability >= NARROW


def usable(x: torch.Tensor) -> bool:
    return apply(x.dtype, x.device)
