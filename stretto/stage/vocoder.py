"""What a stage that makes samples needs of its model: see `codec.py`."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from stretto.types import Span


class VocoderConfig(Protocol):
    @property
    def num_quantizers(self) -> int:
        """Codes of a frame."""
        ...

    @property
    def samples_per_frame(self) -> int: ...


class Vocoder(Protocol):
    """A model that makes samples of frames, stream by stream."""

    @property
    def config(self) -> VocoderConfig: ...

    def state(self, slots: int, max_frames: int) -> Any: ...

    def step(self, state: Any, codes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Push `lengths` frames to each slot; the samples they give."""
        ...

    def valid(self, before: int, length: int) -> Span:
        """Which of a step's samples are a stream's, that had so many frames before and was given so many."""
        ...

    def num_samples(self, frames: int) -> int:
        """That so many frames have given."""
        ...
