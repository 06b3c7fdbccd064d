"""Whisper log-mel features in numpy: whole clips, and sample by sample as speech arrives.

Called by the prompt builder (whole clips) and by live sessions (one `MelStream` per utterance, on
the thread that owns the session). Both run the same arithmetic frame by frame, in float64 and
without BLAS, so a frame's bits do not depend on how the samples were split or how many frames were
computed at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from stretto.errors import MediaError
from stretto.preprocess.prompt import Array

SAMPLE_RATE = 16_000
WINDOW = 400  # samples under one frame's window
HOP = 160  # samples between frames: 100 frames a second
PAD = WINDOW // 2  # frame t is centred on sample 160 t and reads samples [160 t - 200, 160 t + 200)
NUM_BINS = 128
FLOOR = 1e-10  # power below which everything is silence
RANGE = 8.0  # decades kept below a clip's loudest cell
_BLOCK = 128  # frames per FFT call: the scratch memory, 400 kB, stays in a core's cache

_Float64 = npt.NDArray[np.float64]


@dataclass(slots=True)
class MelStream:
    """The log mel of one clip, from samples pushed in any pieces.

    Frames come out unclamped, because the clamp needs the loudest cell of the whole clip: keep
    them, and `normalise` with `maximum`, again if it grew. Frame t is final once 160 t + 200
    samples are known; `finish` reflects the end of the clip and returns what is left, floor(samples
    / 160) frames in all."""

    num_bins: int = NUM_BINS
    num_samples: int = 0
    num_frames: int = 0
    maximum: float = float("-inf")  # loudest unclamped cell returned so far
    _tail: Array = field(
        default_factory=lambda: np.empty(0, np.float32)
    )  # samples that later frames still read
    _start: int = 0  # padded position of _tail[0]; padded position p holds sample p - PAD

    def push(self, samples: npt.ArrayLike) -> Array:
        """Add mono samples at 16 kHz; return the frames [bins, n] that became final."""
        new = np.asarray(samples, np.float32).reshape(-1)
        opened = self.num_samples > PAD
        self.num_samples += len(new)
        self._tail = np.concatenate((self._tail, new))
        if self.num_samples <= PAD:  # too few to reflect the start of the clip
            return np.empty((self.num_bins, 0), np.float32)
        if not opened:
            self._tail = np.concatenate((self._tail[PAD:0:-1], self._tail))
        return self._take(max(0, (self.num_samples - PAD) // HOP + 1))

    def finish(self) -> Array:
        """No more samples: return the last frames [bins, n]."""
        if self.num_samples <= PAD:
            raise MediaError(
                f"audio is too short: {self.num_samples} samples at 16 kHz, at least {PAD + 1} "
                f"({1000 * (PAD + 1) / SAMPLE_RATE:.1f} ms) are needed"
            )
        self._tail = np.concatenate((self._tail, self._tail[-2 : -PAD - 2 : -1]))
        return self._take(self.num_samples // HOP)

    def _take(self, stop: int) -> Array:
        """Compute frames [num_frames, stop) and forget the samples no later frame reads."""
        count = stop - self.num_frames
        if count <= 0:
            return np.empty((self.num_bins, 0), np.float32)
        first = self.num_frames * HOP - self._start
        used = self._tail[first : first + (count - 1) * HOP + WINDOW]
        frames = np.lib.stride_tricks.sliding_window_view(used, WINDOW)[::HOP]
        blocks = [_log_mel(frames[i : i + _BLOCK], self.num_bins) for i in range(0, count, _BLOCK)]
        log_mel = np.ascontiguousarray(np.concatenate(blocks).T)
        self.num_frames = stop
        self.maximum = max(self.maximum, float(log_mel.max()))
        # One spare hop-and-window stays behind the next frame, for `finish` to reflect.
        keep = max(self._start, stop * HOP - WINDOW)
        self._tail = self._tail[keep - self._start :].copy()
        self._start = keep
        return log_mel


def log_mel(samples: npt.ArrayLike, num_bins: int = NUM_BINS) -> Array:
    """Unclamped log10 mel [bins, frames] of a whole clip."""
    stream = MelStream(num_bins)
    head = stream.push(samples)
    return np.concatenate((head, stream.finish()), axis=1)


def normalise(log_mel: Array, maximum: float) -> Array:
    """What the encoder sees: clamped to 8 decades below the clip's loudest cell, and scaled."""
    floor = np.float32(maximum) - np.float32(RANGE)
    return (np.maximum(log_mel, floor) + np.float32(4.0)) / np.float32(4.0)


def mel(samples: npt.ArrayLike, num_bins: int = NUM_BINS) -> Array:
    """Features [bins, frames] of a whole mono clip at 16 kHz, of more than 200 samples."""
    features = log_mel(samples, num_bins)
    return normalise(features, float(features.max()))


def _log_mel(frames: npt.NDArray[np.float32], num_bins: int) -> Array:
    """[n, window] samples -> [n, bins], row by row: an FFT per row, then elementwise sums in a
    fixed order."""
    spectrum = np.fft.rfft(frames.astype(np.float64) * _window(), axis=1)
    power = spectrum.real**2 + spectrum.imag**2
    taps, weights = _sparse_filters(num_bins)
    total = np.zeros((len(frames), num_bins))
    for tap, weight in zip(taps, weights, strict=True):
        total += power[:, tap] * weight
    return np.log10(np.maximum(total, FLOOR)).astype(np.float32)


@lru_cache(maxsize=1)
def _window() -> _Float64:
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(WINDOW) / WINDOW)


@lru_cache(maxsize=4)
def _sparse_filters(num_bins: int) -> tuple[npt.NDArray[np.int64], _Float64]:
    """The filters as their few non-zero taps: FFT bins and weights, both [taps, bins]."""
    filters = mel_filters(num_bins)
    width = int((filters > 0).sum(axis=0).max())
    first = np.argmax(filters > 0, axis=0)
    taps = np.minimum(first + np.arange(width)[:, None], len(filters) - 1)
    weights = np.take_along_axis(filters, taps, axis=0)
    # A tap cut off at the last FFT bin repeats it; the repeats must not count.
    weights[np.arange(width)[:, None] + first > len(filters) - 1] = 0.0
    return taps, weights


def mel_filters(num_bins: int = NUM_BINS) -> _Float64:
    """Slaney's triangles from 0 to 8000 Hz over the FFT bins, each of unit area: [WINDOW / 2 + 1,
    bins]."""
    frequency = np.linspace(0.0, SAMPLE_RATE / 2, WINDOW // 2 + 1)
    edges = _slaney_hz(np.linspace(0.0, _slaney_mel(SAMPLE_RATE / 2), num_bins + 2))
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequency[:, None] - low) / (centre - low)
    falling = (high - frequency[:, None]) / (high - centre)
    triangles: _Float64 = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (high - low))
    return triangles


# Slaney's scale: linear (3 mels per 200 Hz) up to 1 kHz = 15 mels, then 27 mels per factor of 6.4.
_KNEE_HZ, _KNEE_MEL, _HZ_PER_MEL, _LOG_STEP = 1000.0, 15.0, 200.0 / 3.0, np.log(6.4) / 27.0


def _slaney_mel(hz: float) -> float:
    return (
        float(_KNEE_MEL + np.log(hz / _KNEE_HZ) / _LOG_STEP) if hz >= _KNEE_HZ else hz / _HZ_PER_MEL
    )


def _slaney_hz(mels: _Float64) -> _Float64:
    linear = mels * _HZ_PER_MEL
    curved = _KNEE_HZ * np.exp(_LOG_STEP * (mels - _KNEE_MEL))
    return np.where(mels >= _KNEE_MEL, curved, linear)
