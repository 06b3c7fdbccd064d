"""Encodes speech: 16-bit samples in, pieces of an audio file out, while the speech is being made.

An encoder belongs to one answer. `pcm` and `wav` cost nothing; `mp3`, `flac` and `opus` come from
libsndfile, `aac` from FFmpeg where PyAV is installed, and the routes run these on worker threads
(`slow`). A stream cannot have its header corrected at the end: wav and flac say that their length
is open, opus states no length, and mp3 has a constant bit rate, from which readers compute it. A
file that is encoded whole states its length."""

from __future__ import annotations

import asyncio
import io
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import soundfile

from stretto.errors import Invalid

CONTENT_TYPES = {
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
_LIBSNDFILE = {
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "flac": ("FLAC", "PCM_16"),
    "opus": ("OGG", "OPUS"),
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "mp3": {"bitrate_mode": "CONSTANT", "compression_level": 0.5},
    # blocks of 48 ms at 24 kHz; higher levels, the default too, take 171 ms
    "flac": {"compression_level": 0.25},
}
_ADTS_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000)
_AAC_BIT_RATE = 64_000
_OPEN = 0xFFFFFFFF  # a length nobody knows yet
_SET_OGG_PAGE_LATENCY_MS = 0x1302  # of libsndfile's sf_command
# Threads of its own: decoding what clients send takes the default ones, for seconds at a time.
_POOL = ThreadPoolExecutor(4, "codec")
PIECE_UNIT = 6  # bytes: whole 16-bit samples, and whole groups of three bytes for base64
_PAGE_MS = 160.0  # pages of a second, the default, would hold back the first words


class Encoder(Protocol):
    slow: bool

    def feed(self, pcm: bytes) -> bytes: ...

    def finish(self) -> bytes: ...


class Raw:
    slow = False

    def feed(self, pcm: bytes) -> bytes:
        return pcm

    def finish(self) -> bytes:
        return b""


class Wav:
    """A header, then samples. Without a length, the header says that it is open."""

    slow = False

    def __init__(self, rate: int, num_bytes: int | None = None) -> None:
        self._header = wav_header(rate, num_bytes)

    def feed(self, pcm: bytes) -> bytes:
        header = self._header
        self._header = b""
        return header + pcm if header else pcm

    def finish(self) -> bytes:
        return self.feed(b"")


def wav_header(rate: int, num_bytes: int | None) -> bytes:
    riff, data = (_OPEN, _OPEN) if num_bytes is None else (36 + num_bytes, num_bytes)
    head = struct.pack("<4sI8sIHHIIHH", b"RIFF", riff, b"WAVEfmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return head + struct.pack("<4sI", b"data", data)


class _Sink(io.RawIOBase):
    """Where libsndfile writes: keeps what was not taken yet."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._base = 0  # position in the file of the buffer's first byte
        self._at = 0

    def take(self) -> bytes:
        out = bytes(self._buffer)
        self._base += len(out)
        self._buffer.clear()
        return out

    def write(self, data: bytes) -> int:  # type: ignore[override]
        start = self._at - self._base
        if start >= 0:  # what lies before has left: a late correction of the header is lost
            self._buffer[start : start + len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        end = self._base + len(self._buffer)
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: end}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return 0

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True


class Compressed:
    """mp3, flac or opus, by libsndfile."""

    slow = True

    def __init__(self, format: str, rate: int) -> None:
        major, minor = _LIBSNDFILE[format]
        self._empty = True
        self._sink = _Sink()
        self._file = soundfile.SoundFile(
            self._sink, "w", rate, 1, minor, format=major, **_OPTIONS.get(format, {})
        )
        if format == "opus":
            # The one thing the Python package has no name for.
            value = soundfile._ffi.new("double *", _PAGE_MS)
            soundfile._snd.sf_command(self._file._file, _SET_OGG_PAGE_LATENCY_MS, value, 8)

    def feed(self, pcm: bytes) -> bytes:
        self.write(pcm)
        return self._sink.take()

    def finish(self) -> bytes:
        if self._empty:  # libsndfile writes no file at all for no samples
            self._file.write(np.zeros(1, np.int16))
        self._file.close()
        return self._sink.take()

    def write(self, pcm: bytes) -> None:
        """Write without taking the output: what was not taken yet can still be corrected."""
        self._empty = self._empty and not pcm
        self._file.write(np.frombuffer(pcm, "<i2"))


class Aac:
    """AAC by FFmpeg, each packet behind a header of its own (ADTS), so that a stream can be played
    from any of them. Decoders begin with 1,024 samples of silence."""

    slow = True

    def __init__(self, rate: int) -> None:
        import av

        self._frame_of = av.AudioFrame.from_ndarray
        self._rate = rate
        self._num_samples = 0
        self._encoder = av.CodecContext.create("aac", "w")
        self._encoder.sample_rate = rate
        self._encoder.layout = "mono"
        self._encoder.format = "fltp"
        self._encoder.bit_rate = _AAC_BIT_RATE

    def feed(self, pcm: bytes) -> bytes:
        if not pcm:
            return b""
        samples = np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)
        frame = self._frame_of(samples[None], format="fltp", layout="mono")
        frame.sample_rate = self._rate
        frame.pts = self._num_samples
        self._num_samples += len(samples)
        return self._packets(frame)

    def finish(self) -> bytes:
        silence = b"" if self._num_samples else self.feed(bytes(2))  # no packet for no samples
        return silence + self._packets(None)

    def _packets(self, frame: Any) -> bytes:
        packets = map(bytes, self._encoder.encode(frame))
        return b"".join(adts_header(len(data), self._rate) + data for data in packets)


def adts_header(size: int, rate: int) -> bytes:
    """Of a packet of one AAC-LC frame, mono."""
    sync, profile, channels, fullness = 0xFFF1, 1, 1, 0x7FF
    bits = sync << 40 | profile << 38 | _ADTS_RATES.index(rate) << 34 | channels << 30
    return (bits | (size + 7) << 13 | fullness << 2).to_bytes(7, "big")


def streamed(format: str, rate: int) -> Encoder:
    """An encoder for speech that is sent as it is made."""
    makers: dict[str, Callable[[], Encoder]] = {
        "pcm": Raw,
        "pcm16": Raw,
        "wav": lambda: Wav(rate),
        "aac": lambda: Aac(rate),
    }
    return makers[format]() if format in makers else Compressed(format, rate)


def encode(format: str, pcm: bytes, rate: int) -> bytes:
    """A whole file."""
    if format in ("pcm", "pcm16"):
        return pcm
    if format == "wav":
        return wav_header(rate, len(pcm)) + pcm
    if format == "aac":
        aac = Aac(rate)
        return aac.feed(pcm) + aac.finish()
    encoder = Compressed(format, rate)
    encoder.write(pcm)
    return encoder.finish()


async def encode_elsewhere(format: str, pcm: bytes, rate: int) -> bytes:
    """The same without holding up the event loop."""
    return (
        await elsewhere(encode, format, pcm, rate)
        if format in (*_LIBSNDFILE, "aac")
        else encode(format, pcm, rate)
    )


async def elsewhere(work: Callable[..., bytes], *args: object) -> bytes:
    return await asyncio.get_running_loop().run_in_executor(_POOL, work, *args)


async def feed(encoder: Encoder, pcm: bytes) -> bytes:
    return await elsewhere(encoder.feed, pcm) if encoder.slow else encoder.feed(pcm)


async def finish(encoder: Encoder) -> bytes:
    return await elsewhere(encoder.finish) if encoder.slow else encoder.finish()


def check(format: str, param: str) -> None:
    if format not in CONTENT_TYPES:
        known = ", ".join(f for f in CONTENT_TYPES if f != "pcm16")
        raise Invalid(f"{param} {format!r} is not supported; use one of {known}", param)
    if format == "aac" and find_spec("av") is None:  # PyAV, which brings FFmpeg
        raise Invalid(
            f"{param}: aac needs PyAV where the server runs (pip install 'stretto[video]'); "
            f"mp3 and opus need nothing",
            param,
        )


@dataclass(slots=True)
class Pieces:
    """Cuts bytes so that the base64 of each piece, joined as text, is the base64 of the whole: no
    padding within."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> bytes:
        data = self._rest + data
        cut = len(data) - len(data) % PIECE_UNIT
        self._rest = data[cut:]
        return data[:cut]

    def finish(self) -> bytes:
        rest = self._rest
        self._rest = b""
        return rest
