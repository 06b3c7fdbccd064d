"""The answer of an OpenAI-compatible server as typed pieces: server-sent events in, words and sound
out. No I/O.

Two ways of streaming speech are understood: OpenAI's (`delta.audio.data`, raw 16-bit samples at 24
kHz) and the one where a chunk says `modality: "audio"` and carries the sound, often a small WAV
file, in `delta.content`."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import StrettoError

PCM_RATE = 24000
WAV_START = "UklGR"  # base64 of "RIFF"
WAV_HEAD = 512  # of its characters, in which the header of a streamed WAV file is


class RequestFailed(StrettoError):
    """A request that brought no whole answer. `reason` is a short kind to count by: "timeout",
    "http 429" ..."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Words:
    text: str


@dataclass(frozen=True, slots=True)
class Sound:
    """A packet of speech as it came: base64 of 16-bit mono samples, or of a WAV file."""

    encoded: str

    def seconds(self) -> float:
        """How long it sounds, by its length and a WAV file's header: a benchmark need not decode
        the samples."""
        num_bytes = len(self.encoded) * 3 // 4 - self.encoded[-2:].count("=")
        if not self.encoded.startswith(WAV_START):
            return num_bytes // 2 / PCM_RATE
        place = find_samples(decode(self.encoded[:WAV_HEAD]), num_bytes)
        if place is None:
            rate, pcm = self.pcm()
            return len(pcm) // 2 / rate
        rate, start, stop = place
        return (stop - start) // 2 / rate

    def pcm(self) -> tuple[int, bytes]:
        """(rate, little-endian 16-bit mono samples)."""
        raw = decode(self.encoded)
        return read_wav(raw) if raw.startswith(b"RIFF") else (PCM_RATE, raw)


@dataclass(frozen=True, slots=True)
class Used:
    """The usage that the server reports."""

    usage: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamEnd:
    reason: str


Piece = Words | Sound | Used | StreamEnd


@dataclass(slots=True)
class EventSplitter:
    """Cuts a stream of bytes into the data of its server-sent events."""

    rest: bytes = b""
    data: list[bytes] = field(default_factory=list)

    def feed(self, chunk: bytes) -> list[bytes]:
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self.data.append(line[5:].removeprefix(b" "))
            elif not line and self.data:
                events.append(b"\n".join(self.data))
                self.data = []
        return events


def read_event(data: bytes) -> list[Piece]:
    """The pieces in one event; raises `RequestFailed` for an error in mid-stream."""
    try:
        event = msgspec.json.decode(data)  # quick: a benchmark reads tens of megabytes a second
    except msgspec.DecodeError as e:
        raise RequestFailed(
            "bad event", f"the server sent an event that is not JSON: {e}"
        ) from None
    if not isinstance(event, dict):
        raise RequestFailed("bad event", "the server sent an event that is not an object")
    if event.get("error"):
        raise RequestFailed("error in stream", error_message(event, "the answer failed"))
    pieces: list[Piece] = []
    for choice in _objects(event.get("choices")):
        pieces += _read_delta(_object(choice.get("delta")), event.get("modality") == "audio")
        if choice.get("finish_reason"):
            pieces.append(StreamEnd(str(choice["finish_reason"])))
    if usage := _object(event.get("usage")):
        pieces.append(Used(usage))
    return pieces


def _read_delta(delta: Mapping[str, Any], content_is_sound: bool) -> list[Piece]:
    pieces: list[Piece] = []
    audio = _object(delta.get("audio"))
    if content := delta.get("content"):
        pieces.append(Sound(content) if content_is_sound else Words(content))
    if transcript := audio.get("transcript"):
        pieces.append(Words(transcript))
    if data := audio.get("data"):
        pieces.append(Sound(data))
    return pieces


def _object(value: Any) -> Mapping[str, Any]:
    """A field that may be missing or null."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestFailed("bad event", f"the server sent {value!r:.60} where an object belongs")
    return value


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [_object(one) for one in value] if isinstance(value, list) else []


def error_message(body: Any, otherwise: str) -> str:
    """The words of an error in OpenAI's shape, or in one of the shapes others use."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    return str(error) if error else otherwise


def decode(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as e:
        raise RequestFailed("bad event", f"a packet of sound is not base64: {e}") from None


def read_wav(raw: bytes) -> tuple[int, bytes]:
    """(rate, samples) of a 16-bit mono WAV file, whose lengths may be open because it was
    streamed."""
    place = find_samples(raw, len(raw))
    if place is None:
        raise RequestFailed("bad event", "a WAV file without samples")
    rate, start, stop = place
    return rate, raw[start:stop]


def find_samples(raw: bytes, length: int) -> tuple[int, int, int] | None:
    """(rate, start, stop) of the samples in a 16-bit mono WAV file of so many bytes that begins
    with `raw`. None: they do not begin there."""
    rate, at = 0, 12
    while at + 8 <= len(raw):
        name, size = raw[at : at + 4], struct.unpack_from("<I", raw, at + 4)[0]
        if name == b"fmt " and at + 24 <= len(raw):
            kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", raw, at + 8)
            if (kind, channels, bits) not in ((1, 1, 16), (0xFFFE, 1, 16)):
                raise RequestFailed(
                    "bad event", f"sound with {channels} channels of {bits} bits: want one of 16"
                )
        elif name == b"data" and rate:
            return rate, at + 8, min(at + 8 + size, length)
        at += 8 + size + size % 2
    return None


def wav_file(rate: int, pcm: bytes) -> bytes:
    """A WAV file of 16-bit mono samples."""
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    head = b"RIFF" + struct.pack("<I", 36 + len(pcm)) + b"WAVEfmt " + struct.pack("<I", 16) + form
    return head + b"data" + struct.pack("<I", len(pcm)) + pcm


def save_answer(folder: Path, number: int, rate: int, pcm: bytes) -> tuple[int, Path]:
    """Write speech to `folder/answer-N.wav`, with the first N from `number` on that is free: an
    earlier conversation's answers stay. Gives N and the file."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        path = folder / f"answer-{number}.wav"
        try:
            with path.open("xb") as file:
                file.write(wav_file(rate, pcm))
            return number, path
        except FileExistsError:
            number += 1
