"""Samples: rates, resampling, loudness, silence at both ends. Called by the teacher, the codec and
the score."""

from __future__ import annotations

from functools import cache
from math import gcd

import numpy as np
import numpy.typing as npt

RATE = 24000
HOP = 1920  # samples per frame
LEAD, TAIL = int(0.04 * RATE), int(0.12 * RATE)  # silence kept before and after speech
Floats = npt.NDArray[np.float32]


@cache
def _filter(up: int, down: int) -> Floats:
    """A windowed sinc that passes what both rates can hold, as `up` phases."""
    widest, zeros = max(up, down), 24
    half = zeros * widest
    t = np.arange(-half, half + 1) / widest
    taps = np.sinc(t * 0.96) * 0.96 * np.kaiser(2 * half + 1, 9.0) * (up / widest)
    taps = np.append(taps, np.zeros(-len(taps) % up))
    return taps.reshape(-1, up).T.astype(np.float32)  # phase p holds the taps p, p + up, ...


def resample(samples: Floats, to: int, rate: int) -> Floats:
    """The same sound at another rate."""
    if to == rate:
        return samples
    up, down = to // gcd(to, rate), rate // gcd(to, rate)
    phases = _filter(up, down)
    delay = 24 * max(up, down)
    count = len(samples) * up // down
    places = (
        np.arange(count) * down + delay
    )  # in the signal with up - 1 zeros between samples, filter delay included
    result = np.zeros(count, np.float32)
    padded = np.pad(samples, (0, phases.shape[1] + 1))
    for p in range(up):
        at = places % up == p
        result[at] = np.convolve(padded, phases[p])[places[at] // up]
    return result


def tidy(samples: Floats) -> tuple[npt.NDArray[np.int16], int]:
    """One loudness, and little silence at both ends; how many samples the start lost."""
    peak = max(float(np.abs(samples).max()), 1.0)
    loud = np.flatnonzero(np.abs(samples) > 0.015 * peak)
    first = max(0, int(loud[0]) - LEAD)
    cut = samples[first : loud[-1] + TAIL]
    cut = np.pad(cut, (0, max(0, loud[-1] + TAIL - len(samples))))
    return np.clip(cut / peak * 0.8 * 32767, -32768, 32767).astype(np.int16), first


def frames(samples: int) -> int:
    """Frames that hold so many samples."""
    return -(-samples // HOP)
