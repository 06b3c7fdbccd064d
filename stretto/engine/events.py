"""What a caller of an engine gives and gets: messages in, typed events out, and its progress while
it loads. `protocol.py` says in which order events come. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "cancelled"]
Modality = Literal["text", "audio"]
Message = Mapping[str, Any]
"""A message in OpenAI's chat format."""
EngineState = Literal["loading", "ready", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was, before all that a request may do to that (penalties, temperature,
    grammars)."""

    id: int
    token: str  # its text, or the name of a special token
    # the bytes that it adds to the text, maybe part of a character; None for special tokens
    text_bytes: bytes | None
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # the likeliest tokens at its place, the likeliest first


@dataclass(frozen=True, slots=True)
class TextDelta:
    ids: tuple[int, ...]
    text: str  # may be empty: an id can be half a character, or a special token
    logprobs: tuple[TokenLogprob, ...] = ()  # of each id, where `Params.logprobs` asks for them


@dataclass(frozen=True, slots=True, eq=False)
class CodeFrames:
    start: int  # frames from 0
    codes: npt.NDArray[np.int32]  # [frames, 16]


@dataclass(frozen=True, slots=True, eq=False)
class AudioChunk:
    start: int  # samples from 0
    samples: npt.NDArray[np.float32]

    def pcm16(self) -> bytes:
        """Little-endian 16-bit samples."""
        return (self.samples * 32767.0).round().clip(-32768, 32767).astype("<i2").tobytes()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    text_tokens: int  # sampled, the end token (or the one that completes a stop string) included
    frames: int
    samples: int
    cached_tokens: int = 0
    audio_prompt_tokens: int = 0
    image_prompt_tokens: int = 0
    # of media: windows of sound, pictures, videos. Others were found in caches
    encoded_pieces: int = 0


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Something that took time: a stage's step, a chunk's hop. Seconds from the request's
    arrival."""

    lane: str  # a stage, or "packets"
    name: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Finished:
    text: FinishReason
    audio: FinishReason | None  # None: nothing was to be spoken
    usage: Usage
    seed: int
    timeline: Sequence[TimelineSpan] = ()
    prompt_ids: tuple[int, ...] = ()
    arrived: float = 0.0  # the request, by `time.monotonic()`: where the timeline begins


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """What a request made that is neither text nor sound: a voice."""

    data: bytes


Event = TextDelta | CodeFrames | AudioChunk | Product | Finished


@dataclass(frozen=True, slots=True)
class Progress:
    """How far loading is, for people who wait."""

    state: EngineState
    # stage -> "loading 43 %", "capturing", "ready"
    stages: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    accepts: bool = False  # requests that come although it is not ready wait until it is
