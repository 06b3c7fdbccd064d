"""Tokens that a row must not pick, as bits by token. Plain PyTorch; `fast/masks.py` is the kernel."""

from __future__ import annotations

import torch


def mask_rows(logits: torch.Tensor, rows: torch.Tensor, masked: torch.Tensor, bits: torch.Tensor) -> None:
    """Set logits[i, token] to -inf, in place, where rows[i] is `masked` [rows] and its bit of the token is 0. `bits`
    [rows, words] int32 holds token t in bit t % 32 of word t // 32."""
    size = logits.shape[1]
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bits[rows][:, :, None] >> places) & 1).flatten(1)[:, :size].bool()
    logits.masked_fill_(masked[rows][:, None] & ~allowed, float("-inf"))
