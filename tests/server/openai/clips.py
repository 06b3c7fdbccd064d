"""Clips that voices are made of, and what is read with them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import soundfile

SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Samples that came in other packets may be rounded the other way."""
    return a.shape == b.shape and int(np.abs(a.astype(np.int32) - b).max()) <= 1


def sound(
    seconds: float = 1.2, rate: int = 16000, hz: float = 0.0, loudness: float = 0.2, **how: Any
) -> str:
    """Noise, or a loud tone."""
    wave = loudness * np.random.default_rng(1).standard_normal(int(seconds * rate))
    if hz:
        wave = 0.9 * np.sin(np.arange(len(wave)) * hz * 2 * np.pi / rate)
    out = io.BytesIO()
    soundfile.write(out, wave.astype(np.float32), rate, **{"format": "WAV", **how})
    return base64.b64encode(out.getvalue()).decode()
