"""What the warm-up requests (`stage/warmup.py`) of families that speak have in common. Used when
stages are built."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.models.speech.payloads import CodecFrames
from stretto.params import Params
from stretto.types import Span

WORD = 0
"""A token of text: any will do."""


def params(device: torch.device) -> Params:
    """A short answer. On a GPU three packets, and steps of which two are in flight; on a CPU each
    frame is time that the start takes."""
    frames = 4 if device.type == "cuda" else 2
    return Params(
        max_text_tokens=frames, ignore_eos=True, max_frames=frames, min_frames=frames, seed=0
    )


def packets(groups: int) -> Sequence[CodecFrames]:
    """Frames as a talker sends them, for a vocoder whose talker is elsewhere."""
    spans = Span(0, 1), Span(1, 3)
    return [CodecFrames(span, torch.zeros(len(span), groups, dtype=torch.int32)) for span in spans]
