"""Launch parameters of products for widths that nobody has tuned. Called by `linear.py`, on any
thread; pure."""

from __future__ import annotations

import torch

from stretto.kernels.triton.device import limits


def vector_defaults(inputs: int, glu: bool) -> dict[str, int]:
    """One row."""
    chunk = next(c for c in (4096, 2048, 1024, 512, 256, 128, 64, 32, 16) if inputs % c == 0)
    # 16 KiB of weights per program, asked for at once
    return {
        "BN": max(2, 8192 // chunk // (2 if glu else 1)),
        "BK": chunk,
        "warps": 4 if chunk >= 2048 else 2,
    }


def matrix_defaults(tile: int, inputs: int) -> dict[str, int]:
    """A tile of rows, K whole."""
    sides, chunk = 8, 128 if tile <= 32 else 64
    while inputs % (sides * chunk):
        sides, chunk = (sides // 2, chunk) if sides > 1 else (sides, chunk // 2)
    return {"BN": 16, "BK": chunk, "S": sides, "warps": 8}


def split_defaults(tile: int, weights: int, x: torch.Tensor) -> dict[str, int]:
    """K in parts, from 64 rows on, where the other way reads the rows too often: about as many
    programs as multiprocessors, or as there are tiles of outputs."""
    if tile < 64 or x.shape[1] % 512:
        return {"SPLITS": 0}
    programs = 1 << (limits(x.device).multiprocessors.bit_length() - 1)
    splits = min(4, max(1, 1 << max(0, (64 * programs // weights).bit_length() - 1)))
    return {
        "SPLITS": splits,
        "BN": 64,
        "BK": 64,
        "warps": 4,
        "stages": 5 if x.element_size() == 2 else 2,
    }
