"""A prompt as it travels: ids and sizes as one small typed part, the media's features as raw bytes behind it.

Made by whoever built the prompt (the engine's thread or a prompt worker), passed on by the orchestrator, read by the
host of the stage that encodes media. Plain numpy and msgspec; imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

from stretto.errors import WireError
from stretto.prompt.prompt import AudioClip, Patches, Prompt

Bytes = bytes | bytearray | memoryview
_NONE = np.empty((0, 0), np.float32)
MAX_PATCHES = 64  # of a picture, for each token of the prompt: more than any model merges into one


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ArrayMeta(Part, frozen=True):
    """A float32 array in the features."""

    shape: tuple[int, ...]
    offset: int


class PatchMeta(Part, frozen=True):
    grid: tuple[int, int, int]
    seconds: float
    values: ArrayMeta | None  # None: the host needs the grid alone


class PromptMeta(Part, frozen=True):
    ids: tuple[int, ...]
    audios: tuple[ArrayMeta | None, ...] = ()
    images: tuple[PatchMeta, ...] = ()
    videos: tuple[PatchMeta, ...] = ()
    audio_in_video: bool = False

    def without_features(self) -> PromptMeta:
        """What tells the positions, for a host that encodes nothing."""
        return PromptMeta(
            self.ids,
            (None,) * len(self.audios),
            tuple(PatchMeta(p.grid, p.seconds, None) for p in self.images),
            tuple(PatchMeta(p.grid, p.seconds, None) for p in self.videos),
            self.audio_in_video,
        )

    def arrays(self) -> list[ArrayMeta]:
        parts = [*self.audios, *(p.values for p in (*self.images, *self.videos))]
        return [a for a in parts if a is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A prompt that is ready to be sent."""

    meta: PromptMeta
    media: bytes  # digest of all media, see `media_digest`
    features: Bytes

    @property
    def ids(self) -> tuple[int, ...]:
        return self.meta.ids

    def without_features(self) -> Packed:
        return Packed(self.meta.without_features(), self.media, b"")

    def check(self) -> None:
        """Refuses places outside of the features: they may come from another process."""
        for a in self.meta.arrays():
            _check_place(a, len(self.features))


def pack(prompt: Prompt) -> Packed:
    meta, features = pack_prompt(prompt, features=True)
    return Packed(meta, media_digest(prompt), features)


def pack_prompt(prompt: Prompt, features: bool) -> tuple[PromptMeta, bytes]:
    """A prompt as a message part and a blob; without `features` only what tells the positions."""
    meta, arrays = lay_out(prompt)
    if not features:
        return meta.without_features(), b""
    return meta, b"".join(a.tobytes() for a in arrays)


def lay_out(prompt: Prompt) -> tuple[PromptMeta, list[npt.NDArray[np.float32]]]:
    """Where each array lies in the features, and the arrays in that order."""
    arrays: list[npt.NDArray[np.float32]] = []
    size = 0

    def put(a: npt.NDArray[np.float32]) -> ArrayMeta:
        nonlocal size
        meta = ArrayMeta(a.shape, size)
        arrays.append(np.ascontiguousarray(a))
        size += a.nbytes
        return meta

    meta = PromptMeta(
        prompt.ids,
        tuple(put(a.mel) for a in prompt.audios),
        tuple(PatchMeta(p.grid, p.seconds_per_grid, put(p.values)) for p in prompt.images),
        tuple(PatchMeta(p.grid, p.seconds_per_grid, put(p.values)) for p in prompt.videos),
        prompt.audio_in_video,
    )
    return meta, arrays


def media_digest(prompt: Prompt) -> bytes:
    """What the ids of a prompt do not tell: a digest of all its media together (coarse, and never wrong)."""
    if not prompt.has_media:
        return b""
    digest = blake2b(digest_size=16)
    for clip in prompt.audios:
        digest.update(np.ascontiguousarray(clip.mel).data)
    for p in (*prompt.images, *prompt.videos):
        digest.update(repr((p.grid, p.seconds_per_grid)).encode())
        digest.update(np.ascontiguousarray(p.values).data)
    return digest.digest()


def unpack_prompt(meta: PromptMeta, features: Bytes) -> Prompt:
    """The arrays are views of `features`, unless these are read-only: torch wants memory that it may write to."""
    memory = bytearray(features) if memoryview(features).readonly else features

    def get(a: ArrayMeta | None) -> npt.NDArray[np.float32]:
        if a is None:
            return _NONE
        count = _check_place(a, len(memory))
        return np.frombuffer(memory, np.float32, count, a.offset).reshape(a.shape)

    def patches(p: PatchMeta) -> Patches:
        # A grid is laid out before it is compared with the prompt, so it must not be out of all proportion to it.
        if min(p.grid) < 1 or math.prod(p.grid) > MAX_PATCHES * len(meta.ids):
            raise WireError(f"a grid of {p.grid} for a prompt of {len(meta.ids)} tokens")
        return Patches(get(p.values), p.grid, p.seconds)

    return Prompt(
        meta.ids,
        tuple(AudioClip(get(a)) for a in meta.audios),
        tuple(map(patches, meta.images)),
        tuple(map(patches, meta.videos)),
        meta.audio_in_video,
    )


def _check_place(a: ArrayMeta, size: int) -> int:
    """The number of values of an array that lies within `size` bytes."""
    count = 1
    for n in a.shape:
        if n < 0:
            raise WireError(f"array {a.shape} has a negative size")
        count *= n
    if a.offset < 0 or a.offset % 4 or a.offset + 4 * count > size:
        raise WireError(f"array {a.shape} at {a.offset} is not within a blob of {size} bytes")
    return count
