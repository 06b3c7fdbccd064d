"""A session's settings: how an update changes them, and how events show them. Pure.

Only fields that an update names change; objects merge; null clears or goes back to the default.
Much of what we do not support is taken and ignored, since stock clients send it unasked and an
error would end their session; what changes what an answer leaves out or includes (`truncation`,
`include`) is refused, unless it says what we do anyway."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from sys import getsizeof
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stretto.errors import Invalid
from stretto.family import ModelInfo
from stretto.params import ChunkSizes, Params
from stretto.server.openai.grammar import check_choice, of_calls
from stretto.server.openai.voices import find_voice
from stretto.server.realtime import client_events as c
from stretto.server.realtime.audio_formats import RATES, FormatName, check_rate
from stretto.server.realtime.tools import Function, tools_size
from stretto.server.realtime.turn_detection import Pauses

log = logging.getLogger("stretto.realtime")

Modality = Literal["text", "audio"]
Kind = Literal["realtime", "transcription"]
VadType = Literal["server_vad", "semantic_vad"]
SEMANTIC_PAUSE_MS = {"low": 1600, "medium": 800, "auto": 800, "high": 400}
# bytes of instructions and tools: one message of less than a MiB shows all of a session
MAX_TEXT_BYTES = 768 << 10
# bytes of instructions or tools; longer ones are shown again only where an update changes them
SHORT_TEXT_BYTES = 4 << 10
# of Python's objects for a byte of JSON, at most
DECODED_BYTES = 24
LOGPROBS = "item.input_audio_transcription.logprobs"


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """How turns are detected. None in its place: the client commits each turn."""

    type: VadType = "server_vad"
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None
    create_response: bool = True
    interrupt_response: bool = True
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"

    @property
    def pauses(self) -> Pauses:
        semantic = self.type == "semantic_vad"
        silence = SEMANTIC_PAUSE_MS[self.eagerness] if semantic else self.silence_duration_ms
        return Pauses.of(self.threshold, self.prefix_padding_ms, silence)

    def to_wire(self) -> dict[str, Any]:
        shared = {
            "create_response": self.create_response,
            "interrupt_response": self.interrupt_response,
        }
        if self.type == "semantic_vad":
            return {"type": self.type, "eagerness": self.eagerness, **shared}
        return {
            "type": self.type,
            "threshold": self.threshold,
            "prefix_padding_ms": self.prefix_padding_ms,
            "silence_duration_ms": self.silence_duration_ms,
            "idle_timeout_ms": self.idle_timeout_ms,
            **shared,
        }


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of the next answer. A response may have others for itself alone."""

    voice: str
    output_modalities: tuple[Modality, ...] = ("audio",)
    instructions: str = ""
    tools: tuple[Function, ...] = ()
    tool_choice: str = "auto"
    only_tool: str | None = None  # the one that may be called
    max_output_tokens: int | Literal["inf"] = "inf"
    output_format: FormatName = "audio/pcm"
    speed: float = 1.0
    temperature: float | None = None
    seed: int | None = None
    greedy_speech: bool | None = None
    max_audio_frames: int | None = None
    timeline: bool = False  # report what each stage did when

    @property
    def has_audio(self) -> bool:
        return "audio" in self.output_modalities

    @property
    def num_bytes(self) -> int:
        """Bytes that instructions and tools hold, at most."""
        return getsizeof(self.instructions) + DECODED_BYTES * tools_size(self.tools)

    def chat_tools(self) -> list[dict[str, Any]] | None:
        """The functions that the model may call, in the format of chats."""
        if self.tool_choice == "none":
            return None
        return [t.chat for t in self.tools if self.only_tool in (None, t.name)] or None

    @property
    def call_required(self) -> bool:
        return self.tool_choice == "required"

    def check_choice(self) -> None:
        """Raises `Invalid` if a call is required that no tool allows."""
        if self.call_required:
            check_choice({t.name: t for t in self.tools}, self.only_tool)

    def grammar(self) -> str:
        """The grammar that the answer must follow; empty: it is free. Long schemas take some
        milliseconds."""
        if not self.call_required:
            return ""
        schemas = {t.name: t.schema for t in self.tools}
        return of_calls(schemas, self.only_tool, several=True)

    def params(self, packets: ChunkSizes, defaults: Params, grammar: str = "") -> Params:
        """`defaults`: those of the checkpoint, for what the client leaves open."""
        settings = {
            "temperature": self.temperature,
            "seed": self.seed,
            "greedy_speech": self.greedy_speech,
            "max_frames": self.max_audio_frames,
            "speed": self.speed,
            "max_text_tokens": None if self.max_output_tokens == "inf" else self.max_output_tokens,
        }
        changes: dict[str, Any] = {k: v for k, v in settings.items() if v is not None}
        return replace(defaults, **changes, packets=packets, grammar=grammar)

    def updated(
        self, fields: c.Common, info: ModelInfo, tools: tuple[Function, ...] | None = None
    ) -> Options:
        """The settings after an update. A null in a session goes back to the default; a null in a
        response means what the session has: some clients write out every field of a response.
        `tools`: those that a `ToolReader` has read of the update, if it names any."""
        changes: dict[str, Any] = {}
        default = self if isinstance(fields, c.ResponseFields) else Options(info.default_voice)
        for name in _SAME_NAMES:
            if (value := getattr(fields, name)) is not UNSET:
                changes[name] = getattr(default, name) if value is None else value
        if (modalities := changes.get("output_modalities")) is not None:
            changes["output_modalities"] = ("audio",) if "audio" in modalities else ("text",)
        if bytes(fields.tools) == b"null":
            changes["tools"] = default.tools
        elif tools is not None:
            changes["tools"] = tools
        if fields.tool_choice is None:
            changes["tool_choice"] = default.tool_choice
            changes["only_tool"] = default.only_tool
        elif not isinstance(fields.tool_choice, UnsetType):
            changes["tool_choice"], changes["only_tool"] = _choice(fields.tool_choice)
        changes |= _output_changes(_fields(fields.audio).get("output"), default, info)
        result = replace(self, **changes)
        _check_size(result)
        return result


_SAME_NAMES = (
    "output_modalities",
    "instructions",
    "max_output_tokens",
    "temperature",
    "seed",
    "greedy_speech",
    "max_audio_frames",
    "timeline",
)
"""Fields that clients and `Options` call the same."""


def _output_changes(
    output: c.AudioOutputFields | None, default: Options, info: ModelInfo
) -> dict[str, Any]:
    """The options that an update of `audio.output` changes."""
    changes: dict[str, Any] = {}
    fields = _fields(output)
    if "format" in fields:
        value = fields["format"]
        changes["output_format"] = (
            _format(value, "audio.output.format") if value else default.output_format
        )
    if "voice" in fields:
        changes["voice"] = _voice(fields["voice"], info) if fields["voice"] else default.voice
    if "speed" in fields:
        changes["speed"] = fields["speed"] or default.speed
    return changes


def _check_size(options: Options) -> None:
    size = len(msgspec.json.encode(options.instructions)) + tools_size(options.tools)
    if size > MAX_TEXT_BYTES:
        raise Invalid(
            f"instructions and tools have {size:,} bytes, more than the {MAX_TEXT_BYTES:,} allowed",
            "session",
        )


@dataclass(frozen=True, slots=True)
class SessionState:
    """All of a session's settings."""

    id: str
    model: str
    expires_at: int
    answers: Options
    kind: Kind = "realtime"
    input_format: FormatName = "audio/pcm"
    transcription: c.Transcription | None = None
    noise_reduction: c.NoiseReduction | None = None
    logprobs: bool = False  # of transcriptions
    turns: TurnSettings | None = field(default_factory=TurnSettings)

    @classmethod
    def default(
        cls, info: ModelInfo, kind: Kind, id: str, model: str, expires_at: int
    ) -> SessionState:
        transcription = c.Transcription() if kind == "transcription" else None
        options = Options(info.default_voice)
        return cls(id, model, expires_at, options, kind, transcription=transcription)

    def updated(
        self, fields: c.SessionFields, info: ModelInfo, tools: tuple[Function, ...] | None = None
    ) -> SessionState:
        changes: dict[str, Any] = {"answers": self.answers.updated(fields, info, tools)}
        truncation = (
            fields.truncation.type
            if isinstance(fields.truncation, c.Truncation)
            else fields.truncation
        )
        if truncation not in (UNSET, None, "auto"):
            raise Invalid(
                "truncation: only auto is supported (the oldest turns are forgotten)", "truncation"
            )
        if fields.include is not UNSET:
            if unknown := [name for name in fields.include or () if name != LOGPROBS]:
                raise Invalid(
                    f"include: there is only {LOGPROBS}, not {unknown[0][:100]!r}", "include"
                )
            changes["logprobs"] = bool(fields.include)
        audio = _fields(_fields(fields.audio).get("input"))
        if "format" in audio:
            changes["input_format"] = _format(audio["format"], "audio.input.format")
        changes |= {k: audio[k] for k in ("transcription", "noise_reduction") if k in audio}
        if changes.get("transcription", self.transcription) is None and self.kind != "realtime":
            changes["transcription"] = c.Transcription()
        if "turn_detection" in audio:
            patch = audio["turn_detection"]
            changes["turns"] = None if patch is None else _turns(self.turns, patch)
        return replace(self, **changes)

    def to_wire(self, before: SessionState | None = None) -> dict[str, Any]:
        """All settings, as events show them. `before`: what the client knows; of that, long
        instructions and tools are left out."""
        if self.kind == "transcription":
            return self._transcription_to_wire()
        a = self.answers
        known = before.answers if before is not None else None
        long: dict[str, Any] = {}
        if (
            known is None
            or a.instructions != known.instructions
            or len(a.instructions) <= SHORT_TEXT_BYTES
        ):
            long["instructions"] = a.instructions
        if known is None or a.tools != known.tools or tools_size(a.tools) <= SHORT_TEXT_BYTES:
            long["tools"] = [t.json for t in a.tools]
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self.id,
            "model": self.model,
            "expires_at": self.expires_at,
            "output_modalities": list(a.output_modalities),
            **long,
            "tool_choice": a.tool_choice,
            "max_output_tokens": a.max_output_tokens,
            "tracing": None,
            "truncation": "auto",
            "prompt": None,
            "include": [LOGPROBS] if self.logprobs else None,
            "audio": {
                "input": self._input_to_wire(),
                "output": {
                    "format": format_to_wire(a.output_format),
                    "voice": a.voice,
                    "speed": a.speed,
                },
            },
        }

    def _transcription_to_wire(self) -> dict[str, Any]:
        return {
            "type": "transcription",
            "object": "realtime.transcription_session",
            "id": self.id,
            "expires_at": self.expires_at,
            "include": [LOGPROBS] if self.logprobs else None,
            "audio": {"input": self._input_to_wire()},
        }

    def to_beta(self) -> dict[str, Any]:
        """A transcription session, for clients of the beta."""
        audio_input = self._input_to_wire()
        formats = {format: name for name, format in c.BETA_FORMATS.items()}
        return {
            "object": "realtime.transcription_session",
            "id": self.id,
            "expires_at": self.expires_at,
            "input_audio_format": formats[self.input_format],
            "input_audio_transcription": audio_input["transcription"],
            "input_audio_noise_reduction": audio_input["noise_reduction"],
            "turn_detection": audio_input["turn_detection"],
            "include": [LOGPROBS] if self.logprobs else None,
        }

    def _input_to_wire(self) -> dict[str, Any]:
        transcription = None
        if self.transcription is not None:
            settings = {
                k: v for k, v in msgspec.to_builtins(self.transcription).items() if v is not None
            }
            transcription = {"model": self.model, **settings}
        return {
            "format": format_to_wire(self.input_format),
            "transcription": transcription,
            "noise_reduction": msgspec.to_builtins(self.noise_reduction),
            "turn_detection": self.turns.to_wire() if self.turns else None,
        }


def format_to_wire(format: FormatName) -> dict[str, Any]:
    return {"type": format, "rate": RATES[format]} if format == "audio/pcm" else {"type": format}


def _fields(value: Any) -> dict[str, Any]:
    """The fields that a client's object names; none where there is no object."""
    if not isinstance(value, msgspec.Struct):
        return {}
    return {n: v for n in value.__struct_fields__ if (v := getattr(value, n)) is not UNSET}


def _format(value: c.Format | None, param: str) -> FormatName:
    if value is None:
        return "audio/pcm"
    check_rate(value.type, value.rate, f"{param}.rate")
    return value.type


def _voice(value: str | c.VoiceId, info: ModelInfo) -> str:
    """The model's voice of this name; the default for an unknown name, as stock clients send
    OpenAI's."""
    name = value.id if isinstance(value, c.VoiceId) else value
    try:
        return find_voice(name, info, "voice") or info.default_voice
    except Invalid:
        log.info("there is no voice %r: %s speaks", name[:64], info.default_voice)
        return info.default_voice


def _turns(now: TurnSettings | None, patch: c.TurnDetection) -> TurnSettings:
    value = _fields(patch)
    kind = value.get("type", now.type if now else "server_vad")
    base = now if now is not None and now.type == kind else TurnSettings(kind)
    default = TurnSettings(kind)
    return replace(base, **{k: getattr(default, k) if v is None else v for k, v in value.items()})


def _choice(value: str | c.NamedTool) -> tuple[str, str | None]:
    """The choice as events show it, which must be a word, and the one function that it allows."""
    if isinstance(value, c.NamedTool):  # one without a name is of a kind that is ignored
        return ("required", value.name) if value.name else ("auto", None)
    if value not in ("auto", "none", "required"):
        raise Invalid(
            f"tool_choice must be auto, none, required or a function, got {value[:40]!r}",
            "tool_choice",
        )
    return value, None
