"""What an engine looks like from outside: requests in, typed events out. Imports no torch.

The server, the command line and the sync wrapper know nothing but this. `Engine` is a protocol; the pipeline
implements it over hosts, and tests may implement it over anything that keeps the same promises:

- `generate` and `speak` raise `Invalid` or `Busy` when called or from the iterator's first step (decoding media takes
  time and happens there), before any other event. The iterator yields events in order and ends after exactly one
  `Finished`, or raises a `StrettoError`.
- Text arrives as deltas whose texts concatenate to the answer; ids are as sampled, up to the end token or the one that
  completes a stop string, which is included.
- Audio chunks tile the stream: each starts where the last ended, in samples from 0.
- Closing the iterator cancels the request in all stages at once: `aclose`, or cancellation of the task that waits in
  it. A caller that may be cancelled elsewhere closes it on the way out (`contextlib.aclosing`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from stretto.errors import Invalid
from stretto.prompt.jobs import Conversation, Outlined
from stretto.prompt.spool import Spool
from stretto.types import RequestId

Modality = Literal["text", "audio"]
FinishReason = Literal["stop", "length", "cancelled"]
EngineState = Literal["loading", "ready", "draining", "dead"]
Message = Mapping[str, Any]
"""A message in OpenAI's chat format."""


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """How many frames (80 ms each) an audio packet carries: the first, then growing by `ramp` up to `each`. Packets
    after the first are smaller where a listener would otherwise have to wait for them (see `stage/pace.py`), and may
    be joined where the vocoder is behind."""

    # Eight frames cost the vocoder little more than one, and the host an eighth of the work.
    first: int = 1
    each: int = 8
    ramp: int | None = 2  # None: from `first` to `each` at once

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.each:
            raise Invalid(
                f"packets must grow from at least 1 frame: first={self.first}, each={self.each}", "first_frames"
            )
        if self.ramp is not None and self.ramp < 2:
            raise Invalid(f"ramp must be at least 2, or none, got {self.ramp}", "ramp")


@dataclass(frozen=True, slots=True)
class Params:
    """How a request is answered. Defaults are the released model's."""

    temperature: float = 0.0  # of the text; 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: a fresh one, reported in `Finished`
    greedy_speech: bool = False  # speech without chance (the default samples, as the model was made to)
    max_text_tokens: int = 1024
    max_frames: int = 4095
    stop: tuple[str, ...] = ()  # the answer ends before the first of these strings
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False  # the text runs to `max_text_tokens`
    min_text_tokens: int = 0  # come before the end token, or the token that completes a stop string, may
    min_frames: int = 0
    packets: ChunkSizes = field(default_factory=ChunkSizes)
    want_codes: bool = False  # also yield `CodeFrames`
    priority: int = 0  # lower goes first

    def __post_init__(self) -> None:
        checks = {
            "temperature": 0.0 <= self.temperature <= 2.0,
            "top_p": 0.0 < self.top_p <= 1.0,
            "top_k": self.top_k >= 0,
            "repetition_penalty": 0.0 < self.repetition_penalty <= 10.0,
            "max_text_tokens": self.max_text_tokens >= 1,
            "max_frames": self.max_frames >= 1,
            "min_text_tokens": 0 <= self.min_text_tokens <= self.max_text_tokens,
            "min_frames": 0 <= self.min_frames <= self.max_frames,
            "stop": len(self.stop) <= 16 and all(0 < len(s) <= 256 for s in self.stop),
            "logit_bias": len(self.logit_bias) <= 1024 and all(-100 <= b <= 100 for b in self.logit_bias.values()),
        }
        for name, fine in checks.items():
            if not fine:
                raise Invalid(f"{name} is out of range: {getattr(self, name)!r}", name)


@dataclass(frozen=True, slots=True)
class TextDelta:
    ids: tuple[int, ...]
    text: str  # may be empty: an id can be half a character, or a special token


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


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Something that took time: a stage's step, a chunk's hop. Seconds from the request's arrival."""

    lane: str  # "thinker", "talker", "code2wav", "thinker>talker", "packets", ...
    name: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Finished:
    text: FinishReason
    audio: FinishReason | None  # None: nothing was to be spoken
    usage: Usage
    seed: int
    timeline: tuple[TimelineSpan, ...] = ()
    prompt_ids: tuple[int, ...] = ()


Event = TextDelta | CodeFrames | AudioChunk | Finished


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str
    voices: tuple[str, ...]
    default_voice: str
    sample_rate: int
    max_positions: int
    input_modalities: tuple[str, ...] = ("text", "audio", "image", "video")
    output_modalities: tuple[Modality, ...] = ("text", "audio")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far loading is, for people who wait."""

    state: EngineState
    stages: Mapping[str, str] = field(default_factory=dict)  # stage -> "loading 43 %", "capturing", "ready"
    error: str | None = None


class Engine(Protocol):
    @property
    def info(self) -> ModelInfo: ...

    @property
    def progress(self) -> Progress: ...

    def generate(
        self,
        messages: Sequence[Message] | Conversation,
        *,
        modalities: Sequence[Modality] = ("text", "audio"),
        voice: str | None = None,
        params: Params | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        request_id: RequestId | None = None,
        owner: str = "",
    ) -> AsyncIterator[Event]:
        """Answer a conversation. A prompt is only found in caches if it was the same `owner`'s before."""
        ...

    def speak(
        self,
        text: str,
        *,
        voice: str | None = None,
        params: Params | None = None,
        request_id: RequestId | None = None,
        owner: str = "",
        sender: str = "",
    ) -> AsyncIterator[Event]:
        """Read a text aloud: the talker is given the text instead of an answer of the thinker's. `sender`: who takes
        turns with whom where prompts are built, as in `Conversation`."""
        ...

    async def outline(self, body: Spool, long: tuple[str, ...], most: int, sender: str = "") -> tuple[Outlined, Spool]:
        """Cut a JSON object that is too large for the event loop into its short fields and the `long` ones, in
        another process. The caller closes the file that comes back."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Plain counters and gauges by name, for /metrics; labels are part of the name in Prometheus form."""
        ...

    async def drain(self, timeout: float) -> None:
        """Take no new request, let the running ones finish for at most `timeout` seconds."""
        ...

    async def close(self) -> None: ...
