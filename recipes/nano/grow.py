"""Training rows of the talker on the device, with room for more: speech that the teacher makes
meanwhile.

A CUDA graph reads tensors that never move, so room is taken at the start and filled as chunks
appear: encoded by the trained encoder, laid out, written behind what is there. Called by
`talker.py` between steps, on its thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.nano import codec, codes, corpus, layout, phones
from recipes.nano.audio import RATE
from recipes.nano.report import say
from recipes.nano.shape import GROUPS

WIDTH = 256
FIRST_FILE = 5  # number of the first file of codes that a run adds


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Rows, codes and labels on the device."""

    table: Tensor  # [frames, 16]
    labels: Tensor  # [frames, 3]
    text: Tensor
    mark: Tensor
    before: Tensor
    frame: Tensor
    end: Tensor
    segments: Tensor
    positions: Tensor
    low: Tensor
    high: Tensor
    size: Tensor  # [2]: rows and frames that are filled, as floats that a graph can read

    @classmethod
    def room(cls, rows: int, frames: int, device: torch.device, width: int = WIDTH) -> Data:
        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=device)

        short, long = torch.int16, torch.int32
        kinds = (short, short, long, long, torch.bool, short, short, short, short)
        table = torch.zeros(frames, GROUPS, dtype=short, device=device)
        labels = torch.full((frames, 3), phones.UNKNOWN, dtype=torch.uint8, device=device)
        return cls(
            table, labels, *map(zeros, kinds), torch.zeros(2, dtype=torch.float64, device=device)
        )

    @classmethod
    def place(
        cls, batch: layout.Batch, table: codes.Codes, labels: phones.Labels, device: torch.device
    ) -> Data:
        """Just this much."""
        data = cls.room(len(batch.text), len(table), device, batch.text.shape[1])
        data.add(batch, table, labels)
        return data

    def __len__(self) -> int:
        return int(self.size[0])

    def add(self, batch: layout.Batch, table: codes.Codes, labels: phones.Labels) -> bool:
        """Behind what is there; the batch counts its frames from 0. False if there is no room."""
        rows, frames = (int(n) for n in self.size.tolist())
        more, longer = rows + len(batch.text), frames + len(table)
        if more > len(self.text) or longer > len(self.table):
            return False
        self.table[frames:longer] = torch.from_numpy(table.astype(np.int16)).to(self.table.device)
        self.labels[frames:longer] = torch.from_numpy(labels).to(self.table.device)
        for f in fields(layout.Batch):
            given = getattr(batch, f.name)
            if f.name in ("before", "frame"):
                given = np.where(given >= 0, given + frames, layout.NONE)
            held = getattr(self, f.name)
            held[rows:more] = torch.from_numpy(given).to(held.device, held.dtype)
        self.size.copy_(torch.tensor([more, longer], dtype=torch.float64))
        return True


Rows = Callable[[codes.Spoken], layout.Batch]
"""Lays out the utterances of a chunk."""


@dataclass(slots=True, eq=False)
class Growing:
    """Takes in what appears in a folder of speech."""

    work: Path
    audio: Path
    data: Data
    rows: Rows
    device: torch.device
    pause: float = 1.0  # seconds between looks
    encoder: codec.Codec = field(init=False)
    have: set[int] = field(default_factory=set)
    added: list[tuple[int, codes.Spoken]] = field(default_factory=list)
    looked: float = 0.0
    full: bool = False

    def __post_init__(self) -> None:
        self.encoder = codec.load_encoder(self.work, self.device)

    @property
    def hours(self) -> float:
        return sum(s.hours for _, s in self.added)

    def look(self) -> None:
        """Take in new chunks, now and then. What goes wrong here must not end the training."""
        if self.full or time.monotonic() - self.looked < self.pause:
            return
        for chunk in corpus.made(self.audio):
            if chunk not in self.have:
                self.have.add(chunk)
                try:
                    self.full = not self._take(chunk)
                except (OSError, ValueError, KeyError, RuntimeError) as e:
                    say("talker", f"chunk {chunk} was not taken in: {e!r}")
        self.looked = time.monotonic()

    def _take(self, chunk: int) -> bool:
        spoken = corpus.load(self.audio, chunk)
        table, counts = codec.encode_chunk(self.encoder, spoken, self.device)
        said = codes.Spoken(
            corpus.chunk_texts(chunk), counts, table, corpus.load_labels(self.audio, chunk)
        )
        if not self.data.add(self.rows(said), said.codes, said.labels):
            return False
        self.added.append((chunk, said))
        return True

    def save(self) -> None:
        """The codes of what was added, for later runs."""
        if not self.added:
            return
        said = [s for _, s in self.added]
        table, labels = (
            np.concatenate([getattr(s, name) for s in said]) for name in ("codes", "labels")
        )
        counts = [n for s in said for n in s.frames]
        codes.write(self.work, [c for c, _ in self.added], counts, table, labels, FIRST_FILE)
        say(
            "talker",
            f"{self.hours:.1f} h of further speech, {len(table) * 1920 / RATE / 3600:.1f} h of "
            f"codes written",
        )
