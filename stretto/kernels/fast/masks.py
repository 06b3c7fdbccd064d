"""`stretto.kernels.masks.mask_rows` as one kernel: rows without a mask leave at once, so a step in which no row has one
pays for the launch alone. Called by lanes on the stage's stream, inside captured graphs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


def mask_rows(logits: torch.Tensor, rows: torch.Tensor, masked: torch.Tensor, bits: torch.Tensor) -> None:
    """See `stretto.kernels.masks.mask_rows`."""
    batch, size = logits.shape
    grid = (batch, triton.cdiv(size, BLOCK))
    _mask[grid](
        logits, logits.stride(0), rows, masked.view(torch.uint8), bits, bits.stride(0), SIZE=size, BLOCK=BLOCK
    )  # fmt: skip


@triton.jit
def _mask(logits, stride, rows, masked, bits, words, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0)
    row = tl.load(rows + at)
    if tl.load(masked + row) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < SIZE
        word = tl.load(bits + row * words + token // 32, inside, other=-1)
        forbidden = ((word >> (token % 32)) & 1) == 0
        tl.store(
            logits + at.to(tl.int64) * stride + token,
            tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty),
            inside & forbidden,
        )
