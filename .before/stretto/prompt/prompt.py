"""What the prompt side hands to the thinker: token ids with the media already expanded, and the media's features.

Plain numpy: the process that makes these imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class AudioClip:
    """One clip; takes `audio_tokens(frames)` audio pads of the prompt."""

    mel: Array  # [mel bins, frames], normalised with the clip's own maximum


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """One image or video; takes t * (h/merge) * (w/merge) pads of the prompt."""

    values: Array  # [t*h*w, channels * temporal patch * patch * patch], in merge-block order
    grid: tuple[int, int, int]  # t, h, w in patches
    seconds_per_grid: float = 1.0  # video only: seconds between temporal patches


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Media are in the order of their pads in `ids`."""

    ids: tuple[int, ...]
    audios: tuple[AudioClip, ...] = ()
    images: tuple[Patches, ...] = ()
    videos: tuple[Patches, ...] = ()
    audio_in_video: bool = False  # each video is followed (interleaved) by its own sound track, in `audios`

    @property
    def has_media(self) -> bool:
        return bool(self.audios or self.images or self.videos)
