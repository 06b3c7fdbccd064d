"""Sound that a detector takes for speech: harmonics of a voice, shaped by vowels that change with
each syllable."""

from __future__ import annotations

import base64

import numpy as np
import soxr

from stretto.server.realtime.vad import Float

VOWELS = np.array(
    [(730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410)]
)
SYLLABLE_S = 0.18


def speech(seconds: float, rate: int = 16_000, seed: int = 0) -> Float:
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * rate)) / rate
    pitch = 120 * (1 + 0.15 * np.sin(2 * np.pi * 0.7 * t) + 0.05 * np.sin(2 * np.pi * 2.3 * t))
    phase = np.cumsum(pitch) / rate
    at = t / SYLLABLE_S
    index = at.astype(int)
    within = at - index
    chosen = VOWELS[rng.integers(0, len(VOWELS), index.max() + 2)]
    formants = chosen[index] * (1 - within)[:, None] + chosen[index + 1] * within[:, None]
    out = np.zeros(len(t))
    for h in range(1, 40):
        f = h * pitch
        shape = sum(
            g / (1 + ((f - formants[:, k]) / w) ** 2)
            for k, (g, w) in enumerate(((1, 80), (0.5, 100), (0.25, 140)))
        )
        out += shape / np.sqrt(h) * np.sin(2 * np.pi * h * phase) * (f < rate / 2)
    out = out * (0.25 + 0.75 * np.sin(np.pi * within) ** 2) + 0.01 * rng.standard_normal(len(t))
    return (0.3 * out / np.abs(out).max()).astype(np.float32)


def silence(seconds: float, rate: int = 16_000) -> Float:
    return np.zeros(int(seconds * rate), np.float32)


def pcm(*parts: Float, rate: int = 24_000) -> bytes:
    """16-bit samples at the clients' rate of sound at 16 kHz."""
    return (
        (soxr.resample(np.concatenate(parts), 16_000, rate) * 32767).round().astype("<i2").tobytes()
    )


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
