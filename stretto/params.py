"""What a request asks for beside its prompt: how its outputs are drawn and cut (`Params`), how a
text is spoken (`SpeechStyle`), and all of it in one record (`RequestOptions`). Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stretto.errors import Bug, Invalid
from stretto.types import RequestId

MAX_GRAMMAR = 1 << 17
"""Letters."""
MAX_LOGPROBS = 20
"""How many of the likeliest tokens of a place a request may ask for."""


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """How many frames (80 ms each) an audio packet carries: the first, then growing by `ramp` up to
    `each`. Where a listener would otherwise have to wait, the first may be larger and the others
    smaller (see `models/speech/pacing.py`); they may be joined where the vocoder is behind."""

    # Eight frames cost the vocoder little more than one, and the host an eighth of the work.
    first: int = 1
    each: int = 8
    ramp: int | None = 2  # None: from `first` to `each` at once

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.each:
            raise Invalid(
                f"packets must grow from at least 1 frame: first={self.first}, each={self.each}",
                "first_frames",
            )
        if self.ramp is not None and self.ramp < 2:
            raise Invalid(f"ramp must be at least 2, or none, got {self.ramp}", "ramp")


@dataclass(frozen=True, slots=True)
class SpeechStyle:
    """How a text is to be read aloud, beside the voice's name. Not every model takes all of it."""

    instructions: str = ""
    language: str | None = None  # None: the model finds out
    voice: bytes = b""  # one that was made of a clip, as `Engine.enrol` gave it


DEFAULT_STYLE = SpeechStyle()


@dataclass(frozen=True, slots=True)
class Params:
    """How a request is answered. What a caller leaves open comes from the model
    (`ModelInfo.defaults`); the values here are for models that say nothing."""

    temperature: float = 0.0  # of the text; 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    min_p: float = 0.0  # tokens less likely than this times the best one are not drawn
    frequency_penalty: float = 0.0  # taken off a token's logit each time that the answer has it
    presence_penalty: float = 0.0  # the same, once
    seed: int | None = None  # None: a fresh one, reported in `Finished`
    speech_temperature: float = 0.9  # of the speech; 0 is greedy
    speech_top_p: float = 1.0
    speech_top_k: int = 50
    speech_repetition_penalty: float = 1.05
    greedy_speech: bool = False  # speech without chance, in all that a stage draws
    max_text_tokens: int = 1024
    max_frames: int = 4095
    stop: tuple[str, ...] = ()  # the answer ends before the first of these strings
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str = ""  # that the text must follow, in llguidance's form of Lark; none: it is free
    # tell how likely each token of the text was, and this many of the likeliest; None: not
    logprobs: int | None = None
    ignore_eos: bool = False  # the text runs to `max_text_tokens`
    # come before the end token, or the token that completes a stop string, may
    min_text_tokens: int = 0
    min_frames: int = 0
    speed: float = 1.0  # of the speech, at the same pitch: at 2 it lasts half as long
    packets: ChunkSizes = field(default_factory=ChunkSizes)
    want_codes: bool = False  # also yield `CodeFrames`
    priority: int = 0  # lower goes first

    def __post_init__(self) -> None:
        checks = {
            "temperature": 0.0 <= self.temperature <= 2.0,
            "top_p": 0.0 < self.top_p <= 1.0,
            "top_k": self.top_k >= 0,
            "repetition_penalty": 0.0 < self.repetition_penalty <= 10.0,
            "min_p": 0.0 <= self.min_p <= 1.0,
            "frequency_penalty": -2.0 <= self.frequency_penalty <= 2.0,
            "presence_penalty": -2.0 <= self.presence_penalty <= 2.0,
            "speech_temperature": 0.0 <= self.speech_temperature <= 2.0,
            "speech_top_p": 0.0 < self.speech_top_p <= 1.0,
            "speech_top_k": self.speech_top_k >= 0,
            "speech_repetition_penalty": 0.0 < self.speech_repetition_penalty <= 10.0,
            "max_text_tokens": self.max_text_tokens >= 1,
            "max_frames": self.max_frames >= 1,
            "min_text_tokens": 0 <= self.min_text_tokens <= self.max_text_tokens,
            "min_frames": 0 <= self.min_frames <= self.max_frames,
            "speed": 0.25 <= self.speed <= 4.0,
            "stop": len(self.stop) <= 16 and all(0 < len(s) <= 256 for s in self.stop),
            "logprobs": self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logit_bias": len(self.logit_bias) <= 1024
            and all(-100 <= b <= 100 for b in self.logit_bias.values()),
        }
        for name, fine in checks.items():
            if not fine:
                raise Invalid(f"{name} is out of range: {str(getattr(self, name))[:200]}", name)
        if (size := len(self.grammar)) > MAX_GRAMMAR:
            raise Invalid(
                f"the schema is too long: {size} letters of at most {MAX_GRAMMAR}",
                "response_format",
            )
        if self.grammar and (self.ignore_eos or self.min_text_tokens):
            raise Invalid(
                "a grammar says where the text ends: leave out min_tokens and ignore_eos",
                "response_format",
            )


Capability = Literal["text", "speech", "tts", "enrolment", "text_prefill", "speech_prefill"]
"""What a request asks for: an answer in words, an answer in words and speech, a given text read
aloud, or a voice made of a clip. Or the prefill of a prompt's beginning alone, so that the caches
have it: for an answer in words, or in words and speech."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """All that a request asks for beside its prompt. The engine's methods make it of what they are
    called with. On admission `params` get limits that fit the prompt, and a seed; then the family
    makes its stages' parameters of it (`Model.stage_params`)."""

    capability: Capability
    params: Params = field(default_factory=Params)
    voice: str | None = None
    style: SpeechStyle = DEFAULT_STYLE
    tts_ids: tuple[int, ...] | None = None  # of the text to be read aloud
    tts_streaming: bool = False  # `tts_ids` is where that text begins; the rest follows
    request_id: RequestId | None = None  # the caller's
    session: str | None = None  # requests of a session go to the same pipeline
    pipeline: str | None = None  # the name of the one that serves it; None: the router chooses
    owner: str = ""  # shares prefix caches with requests of the same owner only
    client: str = ""  # takes turns with other clients where requests wait

    @property
    def speaks(self) -> bool:
        """Whether speech is made, or prepared."""
        return self.capability in ("speech", "tts", "speech_prefill")

    @property
    def prefill_only(self) -> bool:
        return self.capability in ("text_prefill", "speech_prefill")

    @property
    def seed(self) -> int:
        """The seed of all that the request's stages draw."""
        if self.params.seed is None:
            raise Bug("a request has no seed before it is admitted")
        return self.params.seed
