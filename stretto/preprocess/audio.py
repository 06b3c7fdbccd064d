"""Decodes untrusted sound to mono samples at 16 kHz, within the limits of `media.py`.

Called by the reader of messages and by the prompt worker's jobs. libsndfile reads the usual
formats; PyAV (`video.py`) reads the others."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import soundfile

from stretto.errors import MediaError
from stretto.preprocess.media import Budget, Mixer, check_bytes, decoding
from stretto.preprocess.mel import SAMPLE_RATE
from stretto.preprocess.prompt import Array
from stretto.preprocess.video import decode_sound

# of raw 16-bit samples; the first is what `pcm16` means when no rate is stated
PCM_RATES = (24_000, 16_000)
_BLOCK = 1 << 16  # values decoded at once
_UNKNOWN = 1 << 40  # libsndfile gives a length beyond this when the header states none


def decode_audio(data: bytes, budget: Budget) -> Array:
    """Mono samples at 16 kHz of a wav, flac, ogg or mp3 file, or of whatever else PyAV knows."""
    check_bytes(len(data), budget.limits)
    if _for_soundfile(data):
        return _read_sound(data, budget)
    return decode_sound(data, budget)


def decode_pcm16(data: bytes, budget: Budget, rate: int = PCM_RATES[0]) -> Array:
    """Mono samples at 16 kHz of raw little-endian 16-bit mono samples."""
    check_bytes(len(data), budget.limits)
    if rate not in PCM_RATES:
        raise MediaError(f"pcm16 must be at {' or '.join(map(str, PCM_RATES))} Hz, got {rate}")
    if len(data) % 2:
        raise MediaError(f"pcm16 needs two bytes a sample, got {len(data)} bytes")
    return mix(np.frombuffer(data, "<i2"), rate, budget)


def to_pcm(samples: Array) -> npt.NDArray[np.int16]:
    """Samples of 16 bits."""
    return (samples * 32767.0).round().clip(-32768, 32767).astype("<i2")


def cut_sound(whole: npt.NDArray[np.int16], seconds: float) -> list[npt.NDArray[np.int16]]:
    """Windows of at most `seconds`, each ended at the quietest place of its last fifth."""
    most = int(seconds * SAMPLE_RATE)
    step = SAMPLE_RATE // 10
    parts = []
    at = 0
    while len(whole) - at > most:
        tail = at + most - most // 5
        last_fifth = whole[tail : at + most][: most // 5 // step * step]
        frames = last_fifth.reshape(-1, step).astype(np.float32)
        quiet = int(np.square(frames).mean(1).argmin())
        stop = tail + quiet * step + step // 2
        parts.append(whole[at:stop])
        at = stop
    if len(parts) and len(whole) - at < SAMPLE_RATE // 10:  # too short to be heard
        parts[-1] = whole[at - len(parts[-1]) :]
    else:
        parts.append(whole[at:])
    return parts


def mix(samples: npt.NDArray[np.generic], rate: int, budget: Budget) -> Array:
    """Mono samples at 16 kHz of an array [samples] or [samples, channels], of floats or 16-bit
    integers."""
    if samples.ndim not in (1, 2):
        raise MediaError(f"audio must be an array of one or two dimensions, got {samples.ndim}")
    if samples.dtype == np.int16:
        scale = 1.0 / 32768.0
    elif np.issubdtype(samples.dtype, np.floating):
        scale = 1.0
    else:
        raise MediaError(
            f"audio must be an array of floats or 16-bit integers, got {samples.dtype}"
        )
    columns = samples.reshape(len(samples), -1)
    mixer = Mixer(rate, columns.shape[1], budget)
    mixer.check(len(columns))
    for i in range(0, len(columns), _BLOCK):
        mixer.add(columns[i : i + _BLOCK].astype(np.float32) * np.float32(scale))
    return mixer.finish()


def _for_soundfile(data: bytes) -> bool:
    """Whether libsndfile is to read it, by its first bytes. (It would also try a dozen rarer
    parsers, which nobody needs here.)"""
    if data[:4] in (b"RIFF", b"RF64"):
        return data[8:12] == b"WAVE"
    mp3 = data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2)
    return data[:4] in (b"fLaC", b"OggS") or mp3


def _read_sound(data: bytes, budget: Budget) -> Array:
    with decoding("audio"), soundfile.SoundFile(io.BytesIO(data)) as f:
        mixer = Mixer(f.samplerate, f.channels, budget)
        if f.frames < _UNKNOWN:
            mixer.check(f.frames)
        size = max(1, _BLOCK // f.channels)
        while len(block := f.read(size, dtype="float32", always_2d=True)):
            mixer.add(block)
        return mixer.finish()
