"""A prompt as it travels: ids and sizes as one small typed part, the media's features as raw bytes
behind it.

Made by whoever built the prompt (the engine's thread or a prompt worker), passed on by the
orchestrator, read by the host of the stage that encodes media. Plain numpy and msgspec; imports no
torch."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from stretto.errors import WireError
from stretto.preprocess.pool.memfile import MemFileSlice
from stretto.preprocess.prompt import DIGEST_BYTES, AudioClip, Patches, Piece, Prompt
from stretto.types import Wire

Bytes = bytes | bytearray | memoryview
MAX_PATCHES = 64  # of a picture, for each token of the prompt: more than any model merges into one


class PieceMeta(Wire, frozen=True):
    """Float32 features, and where they lie among those that are along."""

    shape: tuple[int, ...]
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    offset: int | None  # None: they are not along; who needs them asks for them


class PatchMeta(Wire, frozen=True):
    grid: tuple[int, int, int]
    seconds: float
    values: PieceMeta


class PromptMeta(Wire, frozen=True):
    ids: tuple[int, ...]
    audios: tuple[tuple[PieceMeta, ...], ...] = ()
    images: tuple[PatchMeta, ...] = ()
    videos: tuple[PatchMeta, ...] = ()
    audio_in_video: bool = False

    def without_features(self) -> PromptMeta:
        """What tells the positions and the media apart, for a host that encodes nothing."""

        def bare(p: PieceMeta) -> PieceMeta:
            return PieceMeta(p.shape, p.digest, None)

        return PromptMeta(
            self.ids,
            tuple(tuple(map(bare, clip)) for clip in self.audios),
            tuple(PatchMeta(p.grid, p.seconds, bare(p.values)) for p in self.images),
            tuple(PatchMeta(p.grid, p.seconds, bare(p.values)) for p in self.videos),
            self.audio_in_video,
        )

    def pieces(self) -> list[PieceMeta]:
        return [
            *(p for clip in self.audios for p in clip),
            *(p.values for p in (*self.images, *self.videos)),
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A prompt that is ready to be sent."""

    meta: PromptMeta
    features: Bytes | MemFileSlice

    @property
    def ids(self) -> tuple[int, ...]:
        return self.meta.ids

    def without_features(self) -> Packed:
        return Packed(self.meta.without_features(), b"")

    def check(self) -> None:
        """Refuses places outside of the features: they may come from another process."""
        for p in self.meta.pieces():
            _check_place(p, len(self.features))


def pack(prompt: Prompt, known: Container[bytes] = ()) -> Packed:
    """Features whose digests are `known` stay behind."""
    meta, arrays = lay_out(prompt, known)
    return Packed(meta, b"".join(a.tobytes() for a in arrays))


def lay_out(
    prompt: Prompt, known: Container[bytes] = ()
) -> tuple[PromptMeta, list[npt.NDArray[np.float32]]]:
    """Where each piece lies in the features, and the arrays in that order."""
    arrays: list[npt.NDArray[np.float32]] = []
    size = 0

    def put(p: Piece) -> PieceMeta:
        nonlocal size
        if p.values is None or p.digest in known:
            return PieceMeta(p.shape, p.digest, None)
        meta = PieceMeta(p.shape, p.digest, size)
        arrays.append(np.ascontiguousarray(p.values))
        size += p.values.nbytes
        return meta

    meta = PromptMeta(
        prompt.ids,
        tuple(tuple(map(put, clip.pieces)) for clip in prompt.audios),
        tuple(PatchMeta(p.grid, p.seconds_per_grid, put(p.piece)) for p in prompt.images),
        tuple(PatchMeta(p.grid, p.seconds_per_grid, put(p.piece)) for p in prompt.videos),
        prompt.audio_in_video,
    )
    return meta, arrays


def known_media(meta: PromptMeta) -> Prompt:
    """A prompt's media by what is known of them, without any features."""

    def known(p: PieceMeta) -> Piece:
        return Piece(p.shape, p.digest, None)

    def patches(p: PatchMeta) -> Patches:
        return Patches(known(p.values), p.grid, p.seconds)

    audios = tuple(AudioClip(tuple(map(known, clip))) for clip in meta.audios)
    return Prompt(
        meta.ids, audios, tuple(map(patches, meta.images)), tuple(map(patches, meta.videos))
    )


def unpack_pieces(metas: Sequence[PieceMeta], features: Bytes) -> list[Piece]:
    """The arrays are views of `features`, unless these are read-only: torch wants memory that it
    may write to."""
    memory = bytearray(features) if memoryview(features).readonly else features

    def get(p: PieceMeta) -> Piece:
        count = _check_place(p, len(memory))
        values = None
        if p.offset is not None:
            values = np.frombuffer(memory, np.float32, count, p.offset).reshape(p.shape)
        return Piece(p.shape, p.digest, values)

    return [get(p) for p in metas]


def unpack_prompt(meta: PromptMeta, features: Bytes) -> Prompt:
    pieces = iter(unpack_pieces(meta.pieces(), features))

    def patches(p: PatchMeta) -> Patches:
        # A grid is laid out before it is compared with the prompt, so it must not be out of all
        # proportion to it.
        if min(p.grid) < 1 or math.prod(p.grid) > MAX_PATCHES * len(meta.ids):
            raise WireError(f"a grid of {p.grid} for a prompt of {len(meta.ids)} tokens")
        return Patches(next(pieces), p.grid, p.seconds)

    return Prompt(
        meta.ids,
        tuple(AudioClip(tuple(islice(pieces, len(clip)))) for clip in meta.audios),
        tuple(map(patches, meta.images)),
        tuple(map(patches, meta.videos)),
        meta.audio_in_video,
    )


def _check_place(p: PieceMeta, size: int) -> int:
    """The number of values of a piece that lies within `size` bytes."""
    if min(p.shape, default=0) < 0:
        raise WireError(f"features {p.shape} have a negative size")
    count = math.prod(p.shape)
    if p.offset is not None and (p.offset < 0 or p.offset % 4 or p.offset + 4 * count > size):
        raise WireError(f"features {p.shape} at {p.offset} are not within a blob of {size} bytes")
    return count
