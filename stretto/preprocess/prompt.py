"""What the prompt side hands to the stages: token ids with the media already expanded, and the
media's features.

Features come in pieces: what an encoder can take at once, and what prefix caches tell rows apart
by. A picture or a video is one; a clip has one for each window of the audio encoder, so that a clip
that grows keeps the pieces it had. Plain numpy: the process that makes these imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Features, or only what they are known by: whoever needs them then asks for them."""

    shape: tuple[int, ...]
    digest: bytes
    values: Array | None

    @classmethod
    def of(cls, values: Array, *properties: object) -> Piece:
        """Equal features, with equal `properties`, have the same digest."""
        digest = blake2b(repr((values.shape, *properties)).encode(), digest_size=DIGEST_BYTES)
        digest.update(np.ascontiguousarray(values).data)
        return cls(values.shape, digest.digest(), values)

    @property
    def array(self) -> Array:
        assert self.values is not None, "features that are elsewhere"
        return self.values


@dataclass(frozen=True, slots=True, eq=False)
class AudioClip:
    """One clip; takes `audio_tokens(frames)` audio pads of the prompt. All pieces but the last are
    whole windows, each of mel [bins, frames], normalised with the clip's own maximum."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, mel: Array, window: int | None = None) -> AudioClip:
        """A whole clip, cut every `window` frames."""
        step = window or max(1, mel.shape[1])
        return cls(tuple(Piece.of(mel[:, at : at + step]) for at in range(0, mel.shape[1], step)))

    @property
    def num_frames(self) -> int:
        return sum(p.shape[1] for p in self.pieces)

    @property
    def mel(self) -> Array:
        return np.concatenate([p.array for p in self.pieces], 1)


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """One image or video; takes t * (h/merge) * (w/merge) pads of the prompt."""

    piece: Piece  # [t*h*w, channels * temporal patch * patch * patch], in merge-block order
    grid: tuple[int, int, int]  # t, h, w in patches
    seconds_per_grid: float = 1.0  # video only: seconds between temporal patches

    @classmethod
    def of(
        cls, values: Array, grid: tuple[int, int, int], seconds_per_grid: float = 1.0
    ) -> Patches:
        return cls(Piece.of(values, grid, seconds_per_grid), grid, seconds_per_grid)

    @property
    def values(self) -> Array:
        return self.piece.array


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Media are in the order of their pads in `ids`."""

    ids: tuple[int, ...]
    audios: tuple[AudioClip, ...] = ()
    images: tuple[Patches, ...] = ()
    videos: tuple[Patches, ...] = ()
    # each video is followed (interleaved) by its own sound track, in `audios`
    audio_in_video: bool = False

    @property
    def has_media(self) -> bool:
        return bool(self.audios or self.images or self.videos)

    def pieces(self) -> Iterator[Piece]:
        for clip in self.audios:
            yield from clip.pieces
        for patches in (*self.images, *self.videos):
            yield patches.piece
