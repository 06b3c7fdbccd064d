"""Mel features: equal to the reference extractor, and independent of how the samples arrive."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from stretto.errors import MediaError
from stretto.preprocess.mel import MelStream, log_mel, mel, mel_filters, normalise
from tests.preprocess.samples import FIXED


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(samples) * 0.1).astype(np.float32)


def speechlike(samples: int) -> np.ndarray:
    t = np.arange(samples) / 16_000
    pitch = np.sin(2 * np.pi * 140 * t + 3 * np.sin(2 * np.pi * 3 * t))
    return (
        (0.2 * pitch + 0.05 * np.sin(2 * np.pi * 2200 * t)) * (1 + np.sin(2 * np.pi * 4 * t))
    ).astype(np.float32)


def late_burst(samples: int) -> np.ndarray:
    x = noise(samples) * 1e-3
    x[-samples // 4 :] += 0.9 * np.sin(np.arange(len(x[-samples // 4 :])) * 0.3).astype(np.float32)
    return x


@pytest.fixture(scope="module")
def extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=128)


CLIPS = {
    "shortest": noise(201),
    "one frame and a bit": noise(319),
    "two frames": noise(320),
    "second": noise(16_000),
    "odd length": noise(23_457),
    "speech": speechlike(50_001),
    "silence": np.zeros(8_000, np.float32),
    "late burst": late_burst(40_000),
    "click": np.eye(1, 5_000, 2_500, dtype=np.float32)[0],
    "more than a block": noise(170_000),
}


@pytest.mark.parametrize("name", CLIPS)
def test_equals_the_reference(name: str, extractor: WhisperFeatureExtractor) -> None:
    clip = CLIPS[name]
    theirs = extractor(
        clip,
        sampling_rate=16_000,
        truncation=False,
        padding=True,
        return_attention_mask=True,
        return_tensors="np",
    )
    ours = mel(clip)
    assert ours.dtype == np.float32
    assert ours.shape == (128, len(clip) // 160) == theirs.input_features[0].shape
    assert theirs.attention_mask.sum() == ours.shape[1]
    assert np.abs(ours - theirs.input_features[0]).max() < 1e-4


def test_filters_equal_the_reference() -> None:
    theirs = mel_filter_bank(201, 128, 0.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney")
    assert np.allclose(mel_filters(), theirs, rtol=1e-9, atol=1e-12)


def stream(clip: np.ndarray, cuts: list[int]) -> tuple[np.ndarray, MelStream]:
    s = MelStream()
    frames, at = [], 0
    for piece in np.split(clip, cuts):
        frames.append(s.push(piece))
        at += len(piece)
        final = max(0, (at - 200) // 160 + 1) if at > 200 else 0
        assert s.num_frames == final, "every frame whose samples are known must be out"
    frames.append(s.finish())
    return np.concatenate(frames, axis=1), s


@settings(FIXED, max_examples=60)
@given(st.integers(201, 6_000), st.lists(st.integers(0, 6_000), max_size=12), st.integers(0, 3))
def test_any_split_gives_the_same_bits(samples: int, cuts: list[int], seed: int) -> None:
    clip = noise(samples, seed)
    whole = log_mel(clip)
    pieces, s = stream(clip, sorted(min(c, samples) for c in cuts))
    assert np.array_equal(pieces, whole)
    assert s.maximum == whole.max()
    assert np.array_equal(normalise(pieces, s.maximum), mel(clip))


@pytest.mark.parametrize("size", [1, 159, 320, 512, 1_000])
def test_steady_pushes_give_the_same_bits(size: int) -> None:
    clip = late_burst(12_345) if size > 1 else late_burst(1_234)
    pieces, _ = stream(clip, list(range(size, len(clip), size)))
    assert np.array_equal(pieces, log_mel(clip))


def test_the_stream_forgets_old_samples() -> None:
    s = MelStream()
    for _ in range(50):
        s.push(noise(1_600))
    assert len(pickle.dumps(s)) < 4 * (1_600 + 1_000)


def test_a_louder_end_changes_early_features_only_through_the_maximum() -> None:
    clip = late_burst(32_000)
    s = MelStream()
    early = s.push(clip[:16_000])
    first = normalise(early, s.maximum)
    s.push(clip[16_000:])
    s.finish()
    n = early.shape[1]
    assert not np.array_equal(first, mel(clip)[:, :n])
    assert np.array_equal(normalise(early, s.maximum), mel(clip)[:, :n])


@pytest.mark.parametrize("samples", [0, 1, 200])
def test_too_short(samples: int) -> None:
    with pytest.raises(MediaError, match="too short"):
        mel(noise(samples))
