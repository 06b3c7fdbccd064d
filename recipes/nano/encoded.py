"""The audio encoder's rows of clips, made once and kept in files: for training that leaves the
encoder as it is. Written by `transcribe.encode`, read through `listen.Clips`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

FOLDER = "encoded"


@dataclass(eq=False)
class Encoded:
    """The encoder's rows of clips, in some versions of each: a file of each chunk."""

    folder: Path
    room: int
    parts: list[Tensor] = field(default_factory=list)  # rows of chunks, one after the other
    size: int = 0

    def __post_init__(self) -> None:
        self.starts, self.counts = (torch.zeros(self.room, 0, dtype=torch.long) for _ in range(2))

    def path(self, number: int) -> Path:
        return self.folder / f"{number:04d}.safetensors"

    def add(self, number: int, first: int, last: int) -> None:
        """The rows of a chunk whose clips have these places."""
        found = load_file(self.path(number))
        if not self.size:
            shape_ = (self.room, found["starts"].shape[1])
            self.starts, self.counts = (torch.zeros(shape_, dtype=torch.long) for _ in range(2))
        self.starts[first:last] = found["starts"][: last - first] + self.size
        self.counts[first:last] = found["counts"][: last - first]
        self.parts.append(found["rows"])
        self.size += len(found["rows"])

    def draw(self, pick: Tensor) -> tuple[Tensor, Tensor]:
        """Any version of each clip."""
        if len(self.parts) > 1:
            self.parts = [torch.cat(self.parts)]
        take = torch.randint(0, self.starts.shape[1], pick.shape)
        counts = self.counts[pick, take]
        at = torch.arange(int(counts.max()))
        inside = (at < counts[:, None])[..., None]
        where = (self.starts[pick, take][:, None] + at).clamp_max(self.size - 1)
        return self.parts[0][where].float() * inside, counts
