"""The audio formats of a realtime session: bytes of a client's format become samples for the model
(`AudioDecoder`), the model's samples become bytes (`AudioEncoder`).

A session has one `AudioDecoder`, a response one `AudioEncoder`; both keep the resampler's state, so
that pieces may be cut anywhere. An `AudioDecoder` may be used in a thread, by one at a time. G.711
(telephones: 8 bits a sample, μ-law or A-law) is a look-up in tables that are made once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import soxr

from stretto.engine.session import INPUT_RATE
from stretto.errors import Invalid

Law = Literal["mu", "a"]
FormatName = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
RATES: dict[str, int] = {"audio/pcm": 24_000, "audio/pcmu": 8_000, "audio/pcma": 8_000}
LAWS: dict[str, Law] = {"audio/pcmu": "mu", "audio/pcma": "a"}
QUALITY = "LQ"  # holds back 6 ms; better ones hold back 19 and 30
PIECE = 1 << 18  # bytes that are converted in one go: a thread must let the event loop in between
Float = npt.NDArray[np.float32]
Int16 = npt.NDArray[np.int16]
_BIAS, _MU_CLIP = 0x84, 8158


@dataclass(slots=True)
class AudioDecoder:
    """From bytes of a client's format to mono samples at `INPUT_RATE`. After `flush` exactly as
    many have come out as went in, by the ratio of the rates, rounded."""

    format: FormatName
    _stream: Any = field(init=False)
    _odd: bytes = b""  # half a sample, or none

    def __post_init__(self) -> None:
        self._stream = _resampler(RATES[self.format], INPUT_RATE)

    def feed(self, data: bytes) -> Float:
        parts = [self._feed(data[i : i + PIECE]) for i in range(0, len(data), PIECE)]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.float32), *parts])

    def _feed(self, data: bytes) -> Float:
        if self.format == "audio/pcm":
            data = self._odd + data
            whole = len(data) & ~1
            self._odd = data[whole:]
            samples: npt.NDArray[np.int16] = np.frombuffer(data[:whole], "<i2")
        else:
            samples = decode_g711(data, LAWS[self.format])
        return self._resample(samples.astype(np.float32) / np.float32(32768.0))

    def flush(self) -> Float:
        """The samples that the resampler still holds; the next sound starts afresh."""
        rest = self._resample(np.zeros(0, np.float32), last=True)
        self._stream.clear()
        self._odd = b""
        return rest

    def _resample(self, samples: Float, last: bool = False) -> Float:
        out: Float = self._stream.resample_chunk(samples, last=last)
        return out


@dataclass(slots=True)
class AudioEncoder:
    """From the model's samples to bytes of a client's format."""

    format: FormatName
    rate: int  # of the model's samples
    _stream: Any = field(init=False)

    def __post_init__(self) -> None:
        format_rate = RATES[self.format]
        self._stream = None if self.rate == format_rate else _resampler(self.rate, format_rate)

    def feed(self, samples: Float) -> bytes:
        return self._pack(samples if self._stream is None else self._stream.resample_chunk(samples))

    def flush(self) -> bytes:
        if self._stream is None:
            return b""
        return self._pack(self._stream.resample_chunk(np.zeros(0, np.float32), last=True))

    def _pack(self, samples: Float) -> bytes:
        pcm = (samples * 32767.0).round().clip(-32768, 32767).astype("<i2")
        return pcm.tobytes() if self.format == "audio/pcm" else encode_g711(pcm, LAWS[self.format])


def decode_whole(data: bytes, format: FormatName) -> Float:
    """Decode a whole sound at once."""
    sound = AudioDecoder(format)
    return np.concatenate([sound.feed(data), sound.flush()])


def seconds_of(data: bytes, format: FormatName) -> float:
    return len(data) / (RATES[format] * (2 if format == "audio/pcm" else 1))


def check_rate(format: str, rate: int | None, param: str) -> None:
    if rate is not None and rate != RATES[format]:
        raise Invalid(f"{param}: {format} has {RATES[format]} samples a second, not {rate}", param)


def _resampler(source: int, target: int) -> Any:
    return soxr.ResampleStream(source, target, 1, dtype="float32", quality=QUALITY)


# ---- G.711 (ITU-T)


def decode_g711(data: bytes, law: Law) -> Int16:
    return _g711_samples(law)[np.frombuffer(data, np.uint8)]


def encode_g711(samples: Int16, law: Law) -> bytes:
    return _g711_codes(law)[samples.view(np.uint16)].tobytes()


@cache
def _g711_samples(law: Law) -> Int16:
    code = np.arange(256)
    if law == "mu":
        code = ~code & 0xFF
        size = ((((code & 0xF) << 3) + _BIAS) << ((code >> 4) & 7)) - _BIAS
        return np.where(code & 0x80, -size, size).astype(np.int16)
    code ^= 0x55
    exponent = (code >> 4) & 7
    mantissa = (code & 0xF) << 4
    size = np.where(exponent == 0, mantissa + 8, (mantissa + 0x108) << np.maximum(exponent - 1, 0))
    return np.where(code & 0x80, size, -size).astype(np.int16)


@cache
def _g711_codes(law: Law) -> npt.NDArray[np.uint8]:
    """Codes by a sample's bits, read as an unsigned number."""
    x = np.arange(65536).astype(np.uint16).view(np.int16).astype(np.int64)
    if law == "mu":
        size = np.minimum(np.abs(x >> 2), _MU_CLIP) + (
            _BIAS >> 2
        )  # fourteen bits, as the standard has them
        exponent = np.floor(np.log2(size)).astype(np.int64) - 5
        mantissa = (size >> (exponent + 1)) & 0xF
        code: npt.NDArray[np.int64] = (
            ~(np.where(x < 0, 0x80, 0) | (exponent << 4) | mantissa) & 0xFF
        )
        return code.astype(np.uint8)
    size = np.where(x < 0, ~x, x) >> 3  # thirteen bits
    exponent = np.maximum(np.floor(np.log2(np.maximum(size, 1))).astype(np.int64) - 4, 0)
    mantissa = np.where(exponent == 0, size >> 1, size >> exponent) & 0xF
    code = (np.where(x < 0, 0, 0x80) | (exponent << 4) | mantissa) ^ 0x55
    return code.astype(np.uint8)
