"""Patches: equal to the reference image processor, and video frames laid out like pairs of
images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from stretto.errors import CheckpointError, MediaError
from stretto.models.qwen3_omni.config import VisionConfig
from stretto.models.qwen3_omni.patches import (
    PatchRule,
    fit,
    fit_video,
    image_patches,
    video_patches,
)
from tests.preprocess.samples import FIXED

RULE = PatchRule(16, 2, 2, 3136, 12_845_056, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 65_536)
ODD_RULE = PatchRule(16, 2, 2, 3136, 90_000, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28), 65_536)
VISION = VisionConfig(64, 4, 4, 96, 16, 2, 2, 3, 64, 64, (1, 2, 3))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 7, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("rule", [RULE, ODD_RULE], ids=["released", "shrinking"])
@pytest.mark.parametrize(
    "size", [(64, 64), (100, 37), (333, 517), (20, 20), (1, 1), (640, 480), (9, 1500)]
)
def test_equals_the_reference(size: tuple[int, int], rule: PatchRule) -> None:
    theirs = Qwen2VLImageProcessorPil(
        patch_size=rule.patch,
        temporal_patch_size=rule.temporal_patch,
        merge_size=rule.merge,
        size={"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels},
        image_mean=list(rule.mean),
        image_std=list(rule.std),
    )
    image = picture(*size)
    out = theirs(images=[image], return_tensors="np")
    ours = image_patches(image, rule)
    assert ours.grid == tuple(out["image_grid_thw"][0])
    assert ours.values.dtype == np.float32
    assert ours.values.shape == out["pixel_values"].shape
    assert np.abs(ours.values - out["pixel_values"]).max() < 1e-6


@settings(FIXED, max_examples=100)
@given(st.integers(1, 5_000), st.integers(1, 5_000))
def test_size_rule_equals_the_reference(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(MediaError, match="narrow"):
            fit(height, width, 32, 3136, 1_000_000)
        return
    h, w = fit(height, width, 32, 3136, 1_000_000)
    assert (h, w) == smart_resize(height, width, 32, 3136, 1_000_000)
    assert h > 0
    assert w > 0


def test_video_pairs_frames() -> None:
    frames = [
        picture(448, 384, seed) for seed in range(4)
    ]  # large enough not to be resized as a video either
    ours = video_patches(frames, 2.0, RULE)
    assert ours.grid == (2, *image_patches(frames[0], RULE).grid[1:])
    assert ours.seconds_per_grid == 1.0
    rows = ours.grid[1] * ours.grid[2]
    cells = ours.values.reshape(2, rows, 3, 2, 256)
    for i, frame in enumerate(frames):
        still = image_patches(frame, RULE).values.reshape(rows, 3, 2, 256)
        assert np.array_equal(cells[i // 2, :, :, i % 2], still[:, :, 0])


def test_odd_video_repeats_its_last_frame() -> None:
    frames = [picture(320, 256, seed) for seed in range(3)]
    assert np.array_equal(
        video_patches(frames, 1.0, RULE).values,
        video_patches([*frames, frames[-1]], 1.0, RULE).values,
    )
    assert video_patches(frames[:1], 1.0, RULE).grid[0] == 1
    assert video_patches(frames, 4.0, RULE).seconds_per_grid == 0.5


def test_video_size_bounds() -> None:
    area = RULE.factor**2
    for frames in (1, 20, 100, 140):  # short videos: the frame's own bounds alone
        assert fit_video(1080, 1920, frames, RULE) == fit(1080, 1920, 32, 128 * area, 768 * area)
    for frames in (200, 400, 700):  # long ones shrink and stay within the budget
        h, w = fit_video(1080, 1920, frames, RULE)
        assert h * w // area * -(-frames // 2) <= 0.9 * 65_536
    h, w = fit_video(1080, 1920, 100_000, RULE)
    assert 100 * area < h * w <= 1.05 * 128 * area
    h, w = fit_video(64, 64, 2, RULE)  # small frames grow
    assert h * w >= 128 * area


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_rate(fps: float) -> None:
    with pytest.raises(MediaError, match="rate"):
        video_patches([picture(64, 64)], fps, RULE)


def test_bad_frames() -> None:
    with pytest.raises(MediaError, match="at least one frame"):
        video_patches([], 2.0, RULE)
    with pytest.raises(MediaError, match="same size"):
        video_patches([picture(64, 64), picture(64, 32)], 2.0, RULE)


def write(directory: Path, **fields: object) -> Path:
    released = {
        "min_pixels": 3136,
        "max_pixels": 12_845_056,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    fields = {k: v for k, v in {**released, **fields}.items() if v is not None}
    (directory / "preprocessor_config.json").write_text(json.dumps(fields))
    return directory


def test_reads_the_checkpoint(tmp_path: Path) -> None:
    assert PatchRule.read(write(tmp_path), VISION, 65_536) == RULE
    size = {"shortest_edge": 3136, "longest_edge": 12_845_056}
    newer = write(tmp_path, min_pixels=None, max_pixels=None, size=size)
    assert PatchRule.read(newer, VISION, 65_536) == RULE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_pixels": None}, "min_pixels"),
        ({"max_pixels": "many"}, "max_pixels"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        ({"patch_size": 14}, "patch_size"),
        ({"min_pixels": 20_000_000}, "bounds"),
    ],
)
def test_bad_checkpoint(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        PatchRule.read(write(tmp_path, **fields), VISION, 65_536)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        PatchRule.read(tmp_path, VISION, 65_536)
