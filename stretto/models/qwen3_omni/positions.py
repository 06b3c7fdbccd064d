"""Rotary positions of a prompt: three axes (time, height, width), float32, no torch.

Text, media markers and audio pads step by one on all axes. An image or video block spreads over its
grid, and what follows continues after the block's largest position. Video time is not rounded. With
the sound track merged into a video, what follows continues after the last piece of the block (which
may be lower than its maximum); decoding always continues after the maximum of the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stretto.errors import Invalid
from stretto.models.qwen3_omni.config import TokenIds
from stretto.preprocess.prompt import Patches

Array = npt.NDArray[np.float32]


def rope_positions(
    ids: Sequence[int],
    tokens: TokenIds,
    merge: int,
    per_second: float,
    images: Sequence[Patches] = (),
    videos: Sequence[Patches] = (),
    audio_in_video: bool = False,
) -> tuple[Array, float]:
    """Positions [3, len(ids)] and the position of the first generated token."""
    flat = np.asarray(ids, dtype=np.int64)
    out = np.empty((3, len(flat)), dtype=np.float32)
    image, video = iter(images), iter(videos)
    at, nxt = 0, 0.0
    vision = np.flatnonzero((flat == tokens.image_pad) | (flat == tokens.video_pad))
    while at < len(flat):
        pads_left = vision[np.searchsorted(vision, at) :]
        stop = int(pads_left[0]) if len(pads_left) else len(flat)
        merged = audio_in_video and stop < len(flat) and _opens_merged(flat, stop, tokens)
        if merged:  # the block starts right after its two markers, with audio or video
            while flat[stop - 1] == tokens.audio_pad:
                stop -= 1
        out[:, at:stop] = nxt + np.arange(stop - at, dtype=np.float32)
        nxt += stop - at
        if stop == len(flat):
            break
        if merged:
            block, nxt = _merged(flat[stop:], tokens, next(video), nxt, merge, per_second)
        else:
            patches = next(image) if flat[stop] == tokens.image_pad else next(video)
            block = _grid(patches, nxt, merge, per_second)
            nxt = float(block.max()) + 1
        if stop + block.shape[1] > len(flat):
            raise Invalid(f"the prompt ends inside a media block of {block.shape[1]} tokens")
        at = stop + block.shape[1]
        out[:, stop:at] = block
    return out, float(out.max(initial=-1.0)) + 1


def _opens_merged(flat: npt.NDArray[np.int64], pad: int, tokens: TokenIds) -> bool:
    """Is the vision pad at `pad` the first of a block in which video and its sound are merged?"""
    start = pad
    while start and flat[start - 1] == tokens.audio_pad:
        start -= 1
    return bool(
        start >= 2
        and flat[start - 1] == tokens.audio_start
        and flat[start - 2] == tokens.vision_start
    )


def _grid(patches: Patches, start: float, merge: int, per_second: float) -> Array:
    t, h, w = patches.grid
    seconds = np.float32(patches.seconds_per_grid)
    time = (np.arange(t, dtype=np.float32) * seconds * np.float32(per_second)).astype(np.float32)
    axes = np.meshgrid(time, np.arange(h // merge), np.arange(w // merge), indexing="ij")
    return np.stack([a.reshape(-1) for a in axes]).astype(np.float32) + np.float32(start)


def _merged(
    rest: npt.NDArray[np.int64],
    tokens: TokenIds,
    patches: Patches,
    start: float,
    merge: int,
    per_second: float,
) -> tuple[Array, float]:
    """Video and sound interleaved by time, as far as pads go; also returns where the following text
    continues."""
    pads = np.flatnonzero((rest != tokens.video_pad) & (rest != tokens.audio_pad))
    size = int(pads[0]) if len(pads) else len(rest)
    video = _grid(patches, start, merge, per_second)
    sound = np.repeat(
        (start + np.arange(size - video.shape[1], dtype=np.float32))[None], 3, 0
    ).astype(np.float32)
    is_video = rest[:size] == tokens.video_pad
    if int(is_video.sum()) != video.shape[1]:
        raise Invalid(
            f"a video of {video.shape[1]} tokens has {int(is_video.sum())} pads in the prompt"
        )
    block = np.empty((3, size), dtype=np.float32)
    block[:, is_video], block[:, ~is_video] = video, sound
    tail = 1  # tokens after the interleaving ran out of one of the two form one piece
    if video.shape[1] and sound.shape[1]:
        last_video = int(np.flatnonzero(is_video)[-1])
        last_sound = int(np.flatnonzero(~is_video)[-1])
        tail = max(1, size - 1 - min(last_video, last_sound))
    else:
        tail = size
    return block, float(block[:, size - tail :].max()) + 1
