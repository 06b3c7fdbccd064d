"""What a vocoder's streams remember between two steps. Made and used by `vocoder.py`; the vocoder's
stage begins streams in it. All of it happens on the stage's thread and stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Part:
    """What the streams of one step remember. Made by `VocoderState.part`, and given back by
    `put`."""

    slots: torch.Tensor  # [streams] int64; -1: padding
    rows: torch.Tensor  # [streams] int64: of the state's frames and tails
    frames: torch.Tensor  # [streams] int64: a copy
    window: torch.Tensor  # of all slots: what a stream has in it lies at 1 + its slot
    tails: torch.Tensor  # [streams, values]: a copy


@dataclass(slots=True)
class VocoderState:
    """What `num_slots` streams remember, in tensors that never move. Made by `Vocoder.state`.

    The attention window is a ring: frame p lies in column p % columns. A step then writes only its
    own frames, where a shifted window would copy all 71 old ones per layer, and no column needs
    clearing, because the mask knows from the frame count which position a column holds. One more
    slot (the first of the window, the last of the rest) is for padding: what a step has beside its
    streams, and the writes of padding frames."""

    # [slots + 1] int64: frames taken so far, which is the next frame's position
    frames: torch.Tensor
    window: torch.Tensor  # [layers, 2 (k, v), 1 + slots, columns, heads, head_dim]
    tails: torch.Tensor  # [slots + 1, values]: all convolution tails side by side
    max_frames: int  # per step; more would overwrite columns that its first frame still reads

    @property
    def num_slots(self) -> int:
        return self.frames.shape[0] - 1

    def part(self, slots: torch.Tensor | None = None) -> Part:
        """Of these slots ([streams] int64, each at most once; -1: padding), or of all. A step costs
        what its streams cost, wherever their slots are. The tails are copied, a tenth of what a
        stream remembers; the window is not."""
        if slots is None:
            slots = torch.arange(self.num_slots, device=self.frames.device)
        rows = slots.remainder(len(self.frames))  # padding: the last one
        frames, tails = self.frames.index_select(0, rows), self.tails.index_select(0, rows)
        return Part(slots, rows, frames, self.window, tails)

    def put(self, part: Part, lengths: torch.Tensor) -> None:
        """After a step that took so many frames of each stream."""
        self.frames.index_add_(0, part.rows, lengths)
        self.tails.index_copy_(0, part.rows, part.tails)

    def save(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a stream remembers, to begin others with it."""
        return self.window[:, :, 1 + slot].clone(), self.tails[slot].clone()

    def load(self, slot: int, saved: tuple[torch.Tensor, torch.Tensor], frames: int) -> None:
        """Begin a new stream in a slot that remembers `frames` frames. In place, without a wait."""
        self.window[:, :, 1 + slot].copy_(saved[0])
        self.tails[slot].copy_(saved[1])
        self.frames[slot].fill_(frames)

    def reset(self, slots: int | torch.Tensor) -> None:
        """Begin a new stream in one slot, or in all slots of a mask [slots] bool. In place, without
        a wait."""
        if isinstance(slots, int):
            self.frames[slots].zero_()
            self.tails[slots].zero_()
        else:
            self.frames[:-1].masked_fill_(slots, 0)
            self.tails[:-1].masked_fill_(slots[:, None], 0)
