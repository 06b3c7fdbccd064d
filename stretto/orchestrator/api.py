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
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from stretto.control.request import PLAIN, Manner, Params
from stretto.family import ModelInfo
from stretto.prompt.jobs import Conversation, Outlined, Windows
from stretto.prompt.spool import Spool
from stretto.types import RequestId

if TYPE_CHECKING:
    from stretto.orchestrator.session import Session

Modality = Literal["text", "audio"]
FinishReason = Literal["stop", "length", "cancelled"]
EngineState = Literal["loading", "ready", "draining", "dead"]
Message = Mapping[str, Any]
"""A message in OpenAI's chat format."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was, before all that a request may do to that (penalties, temperature, grammars)."""

    id: int
    token: str  # what it says, or what a special token is called
    said: bytes | None  # what it adds to the text, which may be part of a character; None for special tokens
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # the likeliest in its place, the likeliest first


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
    encoded_pieces: int = 0  # of media: windows of sound, pictures, videos. Others were found in caches


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Something that took time: a stage's step, a chunk's hop. Seconds from the request's arrival."""

    lane: str  # a stage, or "packets"
    name: str
    start: float
    stop: float

    @property
    def in_nanoseconds(self) -> tuple[str, str, int, int]:
        """As traces have it."""
        return self.lane, self.name, int(1e9 * self.start), int(1e9 * self.stop)


@dataclass(frozen=True, slots=True)
class Finished:
    text: FinishReason
    audio: FinishReason | None  # None: nothing was to be spoken
    usage: Usage
    seed: int
    timeline: tuple[TimelineSpan, ...] = ()
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """What a request made that is neither text nor sound: a voice."""

    data: bytes


Event = TextDelta | CodeFrames | AudioChunk | Product | Finished


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
        session: str | None = None,
        owner: str = "",
    ) -> AsyncIterator[Event]:
        """Answer a conversation. A prompt is only found in caches if it was the same `owner`'s before. Requests of one
        `session` go to the same pipeline, as long as it is up."""
        ...

    def speak(
        self,
        text: str | AsyncIterator[str],
        *,
        voice: str | None = None,
        manner: Manner = PLAIN,
        params: Params | None = None,
        request_id: RequestId | None = None,
        owner: str = "",
        sender: str = "",
    ) -> AsyncIterator[Event]:
        """Read a text aloud, instead of an answer that the model writes; some models can while it is being written.
        `sender`: who takes turns with whom where prompts are built, as in `Conversation`."""
        ...

    async def enrol(self, clip: Conversation, *, owner: str = "") -> bytes:
        """Make a voice of a clip, for `Manner.voice`: of one message with a sound and, for a closer likeness, what is
        said in it. The voice is this model's alone."""
        ...

    def session(self, *, owner: str = "") -> Session:
        """A conversation that goes on, whose sound comes in while it is spoken."""
        ...

    async def outline(self, body: Spool, long: tuple[str, ...], most: int, sender: str = "") -> tuple[Outlined, Spool]:
        """Cut a JSON object that is too large for the event loop into its short fields and the `long` ones, in
        another process. The caller closes the file that comes back."""
        ...

    async def cut(self, sound: Spool, seconds: float, sender: str = "") -> tuple[Windows, Spool]:
        """Decode a sound file, in another process, and cut it into windows of at most so long. The caller closes the
        file that comes back."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Plain counters and gauges by name, for /metrics; labels are part of the name in Prometheus form."""
        ...

    async def drain(self, timeout: float) -> None:
        """Take no new request, let the running ones finish for at most `timeout` seconds."""
        ...

    async def close(self) -> None: ...
