"""What a row's logits are changed by: biases of some tokens, and tokens that it must not pick:
those of a mask, as bits by token, and those far less likely than the best. Plain PyTorch;
`kernels/triton/masks.py` has the kernels."""

from __future__ import annotations

import torch


def bias_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Add values[rows[i], j] to logits[i, ids[rows[i], j]], in place, for j below counts[rows[i]]:
    `counts` [rows], `ids` and `values` [rows, most]. A token is there once at most."""
    there = torch.arange(ids.shape[1], device=logits.device) < counts[rows][:, None]
    added = torch.where(there, values[rows], 0.0).to(logits.dtype)
    logits.scatter_add_(1, torch.where(there, ids[rows], 0), added)


def mask_rows(
    logits: torch.Tensor, rows: torch.Tensor, masked: torch.Tensor, bits: torch.Tensor
) -> None:
    """Set logits[i, token] to -inf, in place, where rows[i] is `masked` [rows] and its bit of the
    token is 0. `bits` [rows, words] int32 holds token t in bit t % 32 of word t // 32."""
    size = logits.shape[1]
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bits[rows][:, :, None] >> places) & 1).flatten(1)[:, :size].bool()
    logits.masked_fill_(masked[rows][:, None] & ~allowed, float("-inf"))


def floor_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    min_p: torch.Tensor,
    temperature: torch.Tensor,
    penalty: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    """Set logits[i] to -inf, in place, where a token is less than `min_p` [rows] times as likely as
    the row's best, at its `temperature` [rows] and with its repetition `penalty` [rows] on tokens
    `seen` [rows, vocabulary]. 0: off."""
    scores = logits.float()
    factor = penalty[rows][:, None]
    scores = torch.where(
        seen[rows], torch.where(scores < 0, scores * factor, scores / factor), scores
    )
    least = min_p[rows][:, None]
    floor = (
        scores.amax(-1, keepdim=True) + temperature[rows][:, None] * least.log()
    )  # log 0: nothing is below
    logits.masked_fill_((scores < floor) & (least > 0), float("-inf"))
