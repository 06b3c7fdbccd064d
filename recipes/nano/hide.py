"""What the talker does not get to see of its own past in training, so that it reads the text
instead.

With all codes of the past in view, a small model continues what it hears and hardly looks at the
text: it learns its training sentences by heart. So codes are hidden, for single frames, for spans
and for whole rows of the batch; others are replaced by codes from elsewhere. What is left in view
tells where in the sentence it is, not what comes next. Called by `talker.py`; shapes are static,
for a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.nano.shape import CODES

NOISE = 0.05  # share of input codes replaced by chance
BLOCK = 8  # frames of a span
ELSEWHERE = 0.04  # share of spans that are of another place in the corpus
NOTHING_FIRST, NOTHING_LAST = (
    0.1,
    0.5,
)  # share of rows where nothing is hidden, at the start and at the end of training
ALL = 0.1  # share of rows where everything is


def hidden(rows: int, width: int, done: Tensor, device: torch.device) -> Tensor:
    """[rows, width]: the codes of the previous frame are not to be seen here. `done`: how far
    training is, 0 to 1."""
    kind, rate = torch.rand(rows, 1, device=device), torch.rand(rows, 1, device=device)
    nothing = NOTHING_FIRST + (NOTHING_LAST - NOTHING_FIRST) * done
    rate = torch.where(kind < nothing, 0.0, torch.where(kind > 1 - ALL, 1.0, rate))
    single = torch.rand(rows, width, device=device)
    in_spans = torch.rand(rows, 1, device=device) < 0.5
    return torch.where(in_spans, spans(rows, width, device), single) < rate


def spans(rows: int, width: int, device: torch.device) -> Tensor:
    """Random numbers that are the same over a span. [rows, width]"""
    count = -(-width // BLOCK)
    return (
        torch.rand(rows, count, 1, device=device).expand(-1, -1, BLOCK).reshape(rows, -1)[:, :width]
    )


def elsewhere(before: Tensor, frames: Tensor) -> Tensor:
    """Numbers of previous frames [rows, width], some spans of them moved to another place of the
    table."""
    rows, width = before.shape
    moved = spans(rows, width, before.device) < ELSEWHERE
    count = frames.long()
    by = (torch.rand(rows, 1, device=before.device, dtype=torch.float64) * frames).long()
    return torch.where(moved & (before >= 0), (before + by) % count, before)


def noisy(codes: Tensor) -> Tensor:
    """Some codes replaced by chance."""
    any_ = torch.randint_like(codes, 0, CODES)
    return torch.where(torch.rand_like(codes, dtype=torch.float32) < NOISE, any_, codes)
