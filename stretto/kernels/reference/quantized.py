"""Weights in 8 bits: float8 (e4m3) numbers with one float32 scale per output row.

A row's scale is its largest magnitude / 448, the largest number of the format, so that no row loses
range to another. A quantised linear map is *defined* as `(x @ q.T) * scale`: the scale comes after
the sum over the inputs, as the kernels do it, and not into the weights first. Imported by the
layers, the loader and the plain kernels."""

from __future__ import annotations

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_SCALE = torch.finfo(
    torch.float32
).tiny  # below it a scale would have no precision left, and 0 divides nothing
PART = 1 << 24  # elements widened to float32 at a time


def quantize(weight: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
    """weight [..., outputs, inputs] -> float8 into `out` (same shape), rounded to nearest, and
    `scale` [..., outputs].

    Each number keeps to within 1/16 of itself, or 2^-10 of its scale if that is more. A row that
    holds an infinity or NaN gets a scale that does too: see `finite`. Works through a few rows at a
    time: needs little memory besides."""
    rows = max(1, PART // weight.shape[-1])
    flat = weight.flatten(0, -2), out.view(-1, out.shape[-1]), scale.view(-1)
    for wide, narrow, s in zip(*(torch.split(t, rows) for t in flat), strict=True):
        values = wide.float()
        largest = values.abs().amax(-1)
        # Times a constant: division by one is done differently on a GPU, and a checkpoint should be
        # one model anywhere.
        s.copy_(torch.where(largest == 0, 1.0, (largest * (1 / LARGEST)).clamp_min(LEAST_SCALE)))
        narrow.copy_(values / s[:, None])


def finite(scales: torch.Tensor) -> bool:
    """Whether all weights were: infinities and NaN do not survive in float8, but in their rows'
    scales. Waits."""
    return bool(scales.isfinite().all())


def scaled(product: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x @ q.T times the rows' scales, in float32, rounded to the product's own type; as it is if
    there are none."""
    return product if scale is None else (product.float() * scale).to(product.dtype)
