"""Sound on its way in and out: what clients send becomes samples the model hears, what it says
becomes their format.

One `SoundIn` and, for each response, one `SoundOut` per session; both keep the resampler's state,
so that pieces may be cut anywhere. `SoundIn` may be used in a thread, by one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import soxr

from stretto.engine.session import INPUT_RATE
from stretto.errors import Invalid
from stretto.server.realtime import g711

FormatName = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
RATES: dict[str, int] = {"audio/pcm": 24_000, "audio/pcmu": 8_000, "audio/pcma": 8_000}
LAWS: dict[str, g711.Law] = {"audio/pcmu": "mu", "audio/pcma": "a"}
QUALITY = "LQ"  # holds back 6 ms; better ones hold back 19 and 30
PIECE = 1 << 18  # bytes that are converted in one go: a thread must let the event loop in between
Float = npt.NDArray[np.float32]


@dataclass(slots=True)
class SoundIn:
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
            samples = g711.decode(data, LAWS[self.format])
        return self._resample(samples.astype(np.float32) / np.float32(32768.0))

    def flush(self) -> Float:
        """What the resampler still holds; the next sound is a new beginning."""
        rest = self._resample(np.zeros(0, np.float32), last=True)
        self._stream.clear()
        self._odd = b""
        return rest

    def _resample(self, samples: Float, last: bool = False) -> Float:
        out: Float = self._stream.resample_chunk(samples, last=last)
        return out


@dataclass(slots=True)
class SoundOut:
    """From the model's samples to bytes of a client's format."""

    format: FormatName
    rate: int  # of the model's samples
    _stream: Any = field(init=False)

    def __post_init__(self) -> None:
        wanted = RATES[self.format]
        self._stream = None if self.rate == wanted else _resampler(self.rate, wanted)

    def feed(self, samples: Float) -> bytes:
        return self._pack(samples if self._stream is None else self._stream.resample_chunk(samples))

    def flush(self) -> bytes:
        if self._stream is None:
            return b""
        return self._pack(self._stream.resample_chunk(np.zeros(0, np.float32), last=True))

    def _pack(self, samples: Float) -> bytes:
        pcm = (samples * 32767.0).round().clip(-32768, 32767).astype("<i2")
        return pcm.tobytes() if self.format == "audio/pcm" else g711.encode(pcm, LAWS[self.format])


def convert(data: bytes, format: FormatName) -> Float:
    """All of a sound at once."""
    sound = SoundIn(format)
    return np.concatenate([sound.feed(data), sound.flush()])


def seconds_of(data: bytes, format: FormatName) -> float:
    return len(data) / (RATES[format] * (2 if format == "audio/pcm" else 1))


def check_rate(format: str, rate: int | None, param: str) -> None:
    if rate is not None and rate != RATES[format]:
        raise Invalid(f"{param}: {format} has {RATES[format]} samples a second, not {rate}", param)


def _resampler(source: int, target: int) -> Any:
    return soxr.ResampleStream(source, target, 1, dtype="float32", quality=QUALITY)
