"""What a stage that makes samples (`core.py`) needs of its model."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from stretto.types import Span


class FrameFormat(Protocol):
    @property
    def num_quantizers(self) -> int:
        """Codes of a frame."""
        ...

    @property
    def samples_per_frame(self) -> int: ...


class SlotState(Protocol):
    """What a vocoder remembers of the streams in its slots, on its device."""

    # int64: that each has heard
    frames: torch.Tensor

    def reset(self, slot: int) -> None:
        """A new stream takes the slot."""
        ...

    def save(self, slot: int) -> Any:
        """What a stream remembers, to begin others with it."""
        ...

    def load(self, slot: int, saved: Any, frames: int) -> None:
        """Begin a new stream in a slot that remembers `frames` frames."""
        ...


class VocoderModel(Protocol):
    """A model that makes samples of frames, stream by stream."""

    @property
    def config(self) -> FrameFormat: ...

    def state(self, slots: int, max_frames: int) -> SlotState:
        """For `slots` streams, and steps of at most `max_frames`."""
        ...

    def step(
        self, state: Any, codes: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Push `lengths[i]` frames to the stream in slot `slots[i]` (-1: to none, and `lengths[i]`
        is 0); the samples they give. `slots` has no other number twice."""
        ...

    def valid(self, before: int, length: int) -> Span:
        """Which of a step's samples are a stream's that had `before` frames and was given `length`
        more."""
        ...

    def num_samples(self, frames: int) -> int:
        """That a stream has given after `frames`."""
        ...
