"""Images and video frames as the vision encoder's patches: size rule, normalisation, patch order.

Called by the prompt builder with media that are already decoded. Pure functions over PIL images and
numpy; the rule is read once from the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from stretto._validation import read_json_file
from stretto.errors import CheckpointError, MediaError
from stretto.models.qwen3_omni.config import VisionConfig
from stretto.preprocess.prompt import Array, Patches

MAX_ASPECT = 200  # longer side over shorter side
VIDEO_TOKENS = (
    128,
    768,
)  # a video frame is resized to cost between so many tokens, an image's bounds are larger
VIDEO_SHARE = 0.9  # of the video budget is for pixels


@dataclass(frozen=True, slots=True)
class PatchRule:
    """How pixels become patches. A token stands for merge x merge patches of temporal_patch
    frames."""

    patch: int
    temporal_patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    max_video_tokens: (
        int  # long videos get smaller frames, so that one video takes at most 90% of this
    )

    @property
    def factor(self) -> int:
        """Sides of a resized image are multiples of this."""
        return self.patch * self.merge

    @classmethod
    def read(cls, directory: str | Path, vision: VisionConfig, max_video_tokens: int) -> PatchRule:
        path = Path(directory) / "preprocessor_config.json"
        raw = read_json_file(path)
        raw_size = raw.get("size")
        size = raw_size if isinstance(raw_size, dict) else {}
        rule = cls(
            patch=vision.patch_size,
            temporal_patch=vision.temporal_patch,
            merge=vision.merge,
            min_pixels=_positive(
                raw.get("min_pixels", size.get("shortest_edge")), path, "min_pixels"
            ),
            max_pixels=_positive(
                raw.get("max_pixels", size.get("longest_edge")), path, "max_pixels"
            ),
            mean=_triple(raw.get("image_mean"), path, "image_mean"),
            std=_triple(raw.get("image_std"), path, "image_std"),
            max_video_tokens=max_video_tokens,
        )
        raw_sizes = {
            "patch_size": rule.patch,
            "temporal_patch_size": rule.temporal_patch,
            "merge_size": rule.merge,
        }
        for name, value in raw_sizes.items():
            if raw.get(name, value) != value:
                raise CheckpointError(
                    f"{path}: {name} is {raw[name]!r}, but config.json says {value}"
                )
        if rule.min_pixels > rule.max_pixels or min(rule.std) <= 0 or vision.channels != 3:
            raise CheckpointError(
                f"{path}: the pixel bounds, image_std or the number of channels make no sense"
            )
        return rule


def _positive(value: object, path: Path, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path}: {name} must be a positive integer, got {value!r}")
    return value


def _triple(value: object, path: Path, name: str) -> tuple[float, float, float]:
    if (
        not isinstance(value, list)
        or len(value) != 3
        or not all(isinstance(v, int | float) for v in value)
    ):
        raise CheckpointError(f"{path}: {name} must be three numbers, got {value!r}")
    return float(value[0]), float(value[1]), float(value[2])


def fit(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size to resize to: sides are multiples of `factor`, the area is within the bounds, the
    aspect near."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise MediaError(
            f"an image of {width}x{height} is too narrow: sides may differ by a factor of "
            f"{MAX_ASPECT}"
        )
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        h = max(factor, math.floor(height / shrink / factor) * factor)
        w = max(factor, math.floor(width / shrink / factor) * factor)
    elif h * w < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        h, w = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return h, w


def fit_video(height: int, width: int, num_frames: int, rule: PatchRule) -> tuple[int, int]:
    """Like `fit` for the frames of a video, which share one budget."""
    area = rule.factor**2
    low, high = VIDEO_TOKENS[0] * area, VIDEO_TOKENS[1] * area
    share = int(VIDEO_SHARE * rule.max_video_tokens * area) * rule.temporal_patch // num_frames
    return fit(height, width, rule.factor, low, max(min(high, share), int(1.05 * low)))


def image_patches(image: Image.Image, rule: PatchRule) -> Patches:
    """Patches of one RGB image; its only frame fills the whole temporal patch."""
    h, w = fit(image.height, image.width, rule.factor, rule.min_pixels, rule.max_pixels)
    frame = _resized(image, h, w)
    values = _cut(np.stack([frame] * rule.temporal_patch), rule)
    return Patches.of(values, (1, h // rule.patch, w // rule.patch))


def video_patches(
    frames: Sequence[Image.Image], fps: float, rule: PatchRule, *, fitted: bool = False
) -> Patches:
    """Patches of RGB frames of one size, `fps` a second; the last frame repeats to fill its
    temporal patch.

    `fitted` frames already have the size `fit_video` gave."""
    if not frames:
        raise MediaError("a video needs at least one frame")
    if not (math.isfinite(fps) and fps > 0):
        raise MediaError(f"the frame rate must be positive, got {fps}")
    width, height = frames[0].size
    if any(f.size != (width, height) for f in frames):
        raise MediaError("all frames of a video must have the same size")
    h, w = (height, width) if fitted else fit_video(height, width, len(frames), rule)
    grid = (-(-len(frames) // rule.temporal_patch), h // rule.patch, w // rule.patch)
    rows = grid[1] * grid[2]
    values = np.empty((grid[0] * rows, 3 * rule.temporal_patch * rule.patch**2), np.float32)
    for t in range(grid[0]):
        group = [
            min(t * rule.temporal_patch + i, len(frames) - 1) for i in range(rule.temporal_patch)
        ]
        values[t * rows : (t + 1) * rows] = _cut(
            np.stack([_resized(frames[i], h, w) for i in group]), rule
        )
    return Patches.of(values, grid, rule.temporal_patch / fps)


def _resized(image: Image.Image, h: int, w: int) -> npt.NDArray[np.uint8]:
    assert image.mode == "RGB", f"images must arrive as RGB, got {image.mode}"
    # a copy if that is its size already
    return np.asarray(image.resize((w, h), Image.Resampling.BICUBIC))


def _cut(frames: npt.NDArray[np.uint8], rule: PatchRule) -> Array:
    """One temporal patch of frames [T, H, W, 3] -> [patches, 3*T*p*p], merge block by merge block,
    row-major."""
    T, H, W, C = frames.shape
    p, m = rule.patch, rule.merge
    levels = np.arange(256) / 255.0
    # [256, 3]
    shades = ((levels[:, None] - np.array(rule.mean)) / np.array(rule.std)).astype(np.float32)
    grid = frames.reshape(T, H // (p * m), m, p, W // (p * m), m, p, C)
    # block row, block column, row, column, C, T, p, p
    ordered = grid.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    values = np.empty(ordered.shape, np.float32)
    for c in range(C):
        values[:, :, :, :, c] = shades[ordered[:, :, :, :, c], c]
    return values.reshape(H * W // p**2, C * T * p * p)
