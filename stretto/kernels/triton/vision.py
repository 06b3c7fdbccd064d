"""Rotary positions of the vision encoder, in one kernel where plain PyTorch takes some twenty per
block.

Called by the encoder on the thinker stage's thread, on the current stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _turn(
    qkv, cos, sin, HEADS: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr
):
    patch = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, WIDE), tl.arange(0, HALVES)
    inside = d < HALF
    mine = (head < 2 * HEADS)[:, None] & inside[None, :]  # the heads of q, then those of k
    low = qkv + patch * (3 * HEADS * 2 * HALF) + head[:, None] * (2 * HALF) + d[None, :]
    a = tl.load(low, mask=mine, other=0.0).to(tl.float32)
    b = tl.load(low + HALF, mask=mine, other=0.0).to(tl.float32)
    c = tl.load(cos + patch * HALF + d, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + patch * HALF + d, mask=inside, other=0.0)[None, :]
    tl.store(low, (a * c - b * s).to(qkv.dtype.element_ty), mask=mine)
    tl.store(low + HALF, (b * c + a * s).to(qkv.dtype.element_ty), mask=mine)


def rotate_qk(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn q and k of [patches, 3, heads, head dim] in place; cos and sin [patches, 1, head dim /
    2], float32."""
    patches, _, heads, dim = qkv.shape
    wide, halves = triton.next_power_of_2(2 * heads), triton.next_power_of_2(dim // 2)
    warps = max(1, min(8, wide * halves // 256))
    _turn[(patches,)](
        qkv, cos, sin, HEADS=heads, WIDE=wide, HALF=dim // 2, HALVES=halves, num_warps=warps
    )
