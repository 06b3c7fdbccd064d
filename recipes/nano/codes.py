"""The codes of the whole corpus, as the codec wrote them: 9 bits each, in files small enough to be
carried; and what is said in each frame (`phones.py`).

Written by `codec.py`, read by `talker.py`."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from recipes.nano import corpus, phones
from recipes.nano.audio import HOP, RATE
from recipes.nano.shape import GROUPS

Codes = npt.NDArray[np.uint16]  # [frames, 16]
FRAMES_PER_FILE = 880_000  # 15.8 MB


@dataclass(frozen=True, slots=True, eq=False)
class Spoken:
    """Utterances: their words, and their frames in one table."""

    texts: list[str]
    frames: list[int]
    codes: Codes
    labels: phones.Labels

    @property
    def starts(self) -> list[int]:
        ends = np.cumsum(self.frames)
        return [0, *(int(e) for e in ends[:-1])]

    @property
    def hours(self) -> float:
        return len(self.codes) * HOP / RATE / 3600

    def split(self, apart: Collection[str]) -> tuple[Spoken, Spoken]:
        """(those with these words, the others)."""
        own = frozenset(apart)
        inside = [t in own for t in self.texts]
        return self._where(inside), self._where([not t for t in inside])

    def _where(self, take: list[bool]) -> Spoken:
        kept = [i for i, t in enumerate(take) if t]
        rows = np.repeat(take, self.frames)
        return Spoken(
            [self.texts[i] for i in kept],
            [self.frames[i] for i in kept],
            self.codes[rows],
            self.labels[rows],
        )


def _check(chunks: list[int]) -> int:
    """Changes with the corpus's text, of which only numbers are stored."""
    return zlib.crc32("\n".join(t for c in chunks for t in corpus.chunk_texts(c)).encode())


def write(
    work: Path,
    chunks: list[int],
    frames: list[int],
    table: Codes,
    labels: phones.Labels,
    first_file: int = 0,
) -> None:
    """`frames` of every utterance of these chunks, in order. Files of earlier chunks have lower
    numbers."""
    bits = np.unpackbits(
        np.ascontiguousarray(table, ">u2").view(np.uint8).reshape(len(table), GROUPS, 2), axis=-1
    )[..., 7:]
    packed = np.packbits(bits.reshape(len(table), -1), axis=-1)  # [frames, 18]
    for i, start in enumerate(range(0, len(packed), FRAMES_PER_FILE), start=first_file):
        np.save(work / f"codes-{i}.npy", packed[start : start + FRAMES_PER_FILE])
    counts = np.array(frames, np.uint16)
    index = f"codes-index-{first_file}.npz"
    np.savez_compressed(
        work / index, chunks=np.array(chunks), frames=counts, labels=labels, check=_check(chunks)
    )


def read(work: Path, hours: float | None = None) -> Spoken:
    """All utterances, or the first so many hours."""
    chunks, frames, labels = [], [], []
    for path in sorted(work.glob("codes-index-[0-9].npz")):
        with np.load(path) as file:
            here = [int(c) for c in file["chunks"]]
            if int(file["check"]) != _check(here):
                raise SystemExit("the codes belong to another version of the recipe's text")
            chunks += here
            frames += [int(f) for f in file["frames"]]
            labels.append(file["labels"])
    packed = np.concatenate([np.load(p) for p in sorted(work.glob("codes-[0-9].npy"))])
    texts = [t for c in chunks for t in corpus.chunk_texts(c)]
    assert len(texts) == len(frames)
    assert sum(frames) == len(packed)
    if hours is not None:
        count = int(np.searchsorted(np.cumsum(frames), hours * 3600 * RATE / HOP))
        texts, frames = texts[:count], frames[:count]
        packed = packed[: sum(frames)]
    bits = np.unpackbits(packed, axis=-1).reshape(len(packed), GROUPS, 9)
    table = np.zeros((len(packed), GROUPS), np.uint16)
    for b in range(9):
        table = (table << 1) | bits[..., b]
    return Spoken(texts, frames, table, np.concatenate(labels)[: len(table)])


def trim(work: Path, out: Path, chunks: int) -> None:
    """The first so many chunks, written anew: what a later run can do without need not be
    carried."""
    with np.load(work / "codes-index-0.npz") as file:
        kept = [int(c) for c in file["chunks"]][:chunks]
    out.mkdir(parents=True, exist_ok=True)
    count = sum(len(corpus.chunk_texts(c)) for c in kept)
    spoken = read(work)
    size = sum(spoken.frames[:count])
    write(out, kept, spoken.frames[:count], spoken.codes[:size], spoken.labels[:size])
