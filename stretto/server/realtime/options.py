"""A session's settings: what holds now, how an update changes it, and how all of it is told. Pure.

Only fields that an update names change; objects merge; null clears or goes back to the default. What we do not support
is taken and ignored: an error would end some clients' session."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stretto.control.request import ChunkSizes, Params
from stretto.errors import Invalid
from stretto.family import ModelInfo
from stretto.prompt.tools import check_tools
from stretto.server.realtime import clientevents as c
from stretto.server.realtime.sound import RATES, FormatName, check_rate
from stretto.server.realtime.turns import Pauses
from stretto.server.voices import find_voice

log = logging.getLogger("stretto.realtime")

Modality = Literal["text", "audio"]
VadType = Literal["server_vad", "semantic_vad"]
SEMANTIC_PAUSE_MS = {"low": 1600, "medium": 800, "auto": 800, "high": 400}
MAX_SAID = 768 << 10  # bytes of instructions and tools: all of a session is told in one message of less than a MiB


@dataclass(frozen=True, slots=True)
class Turns:
    """How turns are found. None in its place: the client says when one is over."""

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

    def told(self) -> dict[str, Any]:
        shared = {"create_response": self.create_response, "interrupt_response": self.interrupt_response}
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
    """What holds for the next answer. A response may say otherwise for itself alone."""

    voice: str
    modalities: tuple[Modality, ...] = ("audio",)
    instructions: str = ""
    tools: tuple[dict[str, Any], ...] = ()  # as clients write them here
    tool_choice: str = "auto"
    only_tool: str | None = None  # the one that may be called
    max_output_tokens: int | Literal["inf"] = "inf"
    output_format: FormatName = "audio/pcm"
    temperature: float | None = None
    seed: int | None = None
    greedy_speech: bool | None = None
    max_audio_frames: int | None = None
    timeline: bool = False  # tell what each stage did when

    @property
    def spoken(self) -> bool:
        return "audio" in self.modalities

    def chat_tools(self) -> list[dict[str, Any]] | None:
        """The functions the model may call, as it is told of them."""
        if self.tool_choice == "none":
            return None
        offered = [t for t in self.tools if self.only_tool in (None, t.get("name"))]
        return _chat_tools(offered) or None

    def params(self, packets: ChunkSizes, defaults: Params) -> Params:
        """`defaults`: what the checkpoint says where nobody does."""
        given = {
            "temperature": self.temperature,
            "seed": self.seed,
            "greedy_speech": self.greedy_speech,
            "max_frames": self.max_audio_frames,
            "max_text_tokens": None if self.max_output_tokens == "inf" else self.max_output_tokens,
        }
        return replace(defaults, **{k: v for k, v in given.items() if v is not None}, packets=packets)  # type: ignore[arg-type]

    def updated(self, fields: c.Common, info: ModelInfo) -> Options:
        """With what an update says. A null of a session's goes back to the default, one of a response's means what
        the session has: some clients write out every field of a response."""
        changes: dict[str, Any] = {}
        default = self if isinstance(fields, c.ResponseFields) else Options(info.default_voice)
        for name, target in _SAME_NAMES.items():
            if (value := getattr(fields, name)) is not UNSET:
                changes[target] = getattr(default, target) if value is None else value
        if "modalities" in changes:
            changes["modalities"] = ("audio",) if "audio" in changes["modalities"] else ("text",)
        if "tools" in changes:
            # Tools of other kinds are nothing we could call, and strict clients would not have them back as they came.
            changes["tools"] = tuple(t for t in changes["tools"] if t.get("type", "function") == "function")
            _chat_tools(changes["tools"])
        if fields.tool_choice is None:
            changes["tool_choice"], changes["only_tool"] = default.tool_choice, default.only_tool
        elif not isinstance(fields.tool_choice, UnsetType):
            changes["tool_choice"], changes["only_tool"] = _choice(fields.tool_choice)
        output = _fields(_fields(fields.audio).get("output"))
        if "format" in output:
            given = output["format"]
            changes["output_format"] = _format(given, "audio.output.format") if given else default.output_format
        if "voice" in output:
            changes["voice"] = _voice(output["voice"], info) if output["voice"] else default.voice
        result = replace(self, **changes)
        said = len(msgspec.json.encode(result.instructions)) + len(msgspec.json.encode(result.tools))
        if said > MAX_SAID:
            raise Invalid(f"instructions and tools have {said:,} bytes, more than the {MAX_SAID:,} allowed", "session")
        return result


_SAME_NAMES = {
    "output_modalities": "modalities",
    "instructions": "instructions",
    "tools": "tools",
    "max_output_tokens": "max_output_tokens",
    "temperature": "temperature",
    "seed": "seed",
    "greedy_speech": "greedy_speech",
    "max_audio_frames": "max_audio_frames",
    "timeline": "timeline",
}


@dataclass(frozen=True, slots=True)
class SessionState:
    """All of a session's settings."""

    id: str
    model: str
    expires_at: int
    answers: Options
    input_format: FormatName = "audio/pcm"
    transcription: c.Transcription | None = None
    noise_reduction: c.NoiseReduction | None = None
    turns: Turns | None = field(default_factory=Turns)

    def updated(self, fields: c.SessionFields, info: ModelInfo) -> SessionState:
        changes: dict[str, Any] = {"answers": self.answers.updated(fields, info)}
        heard = _fields(_fields(fields.audio).get("input"))
        if "format" in heard:
            changes["input_format"] = _format(heard["format"], "audio.input.format")
        changes |= {k: heard[k] for k in ("transcription", "noise_reduction") if k in heard}
        if "turn_detection" in heard:
            patch = heard["turn_detection"]
            changes["turns"] = None if patch is None else _turns(self.turns, patch)
        return replace(self, **changes)

    def told(self) -> dict[str, Any]:
        a = self.answers
        transcription = None
        if self.transcription is not None:
            said = {k: v for k, v in msgspec.to_builtins(self.transcription).items() if v is not None}
            transcription = {"model": self.model, **said}
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self.id,
            "model": self.model,
            "expires_at": self.expires_at,
            "output_modalities": list(a.modalities),
            "instructions": a.instructions,
            "tools": list(a.tools),
            "tool_choice": a.tool_choice,
            "max_output_tokens": a.max_output_tokens,
            "tracing": None,
            "truncation": "auto",
            "prompt": None,
            "include": None,
            "audio": {
                "input": {
                    "format": told_format(self.input_format),
                    "transcription": transcription,
                    "noise_reduction": msgspec.to_builtins(self.noise_reduction),
                    "turn_detection": self.turns.told() if self.turns else None,
                },
                "output": {"format": told_format(a.output_format), "voice": a.voice, "speed": 1.0},
            },
        }


def told_format(format: FormatName) -> dict[str, Any]:
    return {"type": format, "rate": RATES[format]} if format == "audio/pcm" else {"type": format}


def _fields(value: Any) -> dict[str, Any]:
    """What an object says; nothing where there is none."""
    if not isinstance(value, msgspec.Struct):
        return {}
    return {n: v for n in value.__struct_fields__ if (v := getattr(value, n)) is not UNSET}


def _format(given: c.Format | None, param: str) -> FormatName:
    if given is None:
        return "audio/pcm"
    check_rate(given.type, given.rate, f"{param}.rate")
    return given.type


def _voice(given: str | c.VoiceId, info: ModelInfo) -> str:
    """The model's voice that is meant; its default for a name that nobody knows, as stock clients send their own."""
    name = given.id if isinstance(given, c.VoiceId) else given
    try:
        return find_voice(name, info, "voice") or info.default_voice
    except Invalid:
        log.info("there is no voice %r: %s speaks", name[:64], info.default_voice)
        return info.default_voice


def _turns(now: Turns | None, patch: c.TurnDetection) -> Turns:
    given = _fields(patch)
    kind = given.get("type", now.type if now else "server_vad")
    base = now if now is not None and now.type == kind else Turns(kind)
    default = Turns(kind)
    return replace(base, **{k: getattr(default, k) if v is None else v for k, v in given.items()})


def _choice(given: str | dict[str, Any]) -> tuple[str, str | None]:
    """The choice as it is told, which must be a word, and the one function that it allows."""
    if isinstance(given, dict):
        name = given.get("name")
        return "required", name if isinstance(name, str) else None
    if given not in ("auto", "none", "required"):
        raise Invalid(f"tool_choice must be auto, none, required or a function, got {given[:40]!r}", "tool_choice")
    return given, None


def _chat_tools(tools: Any) -> list[dict[str, Any]]:
    """Functions in the chat format."""
    known = ("name", "description", "parameters", "strict")
    return check_tools([{"type": "function", "function": {k: t[k] for k in known if k in t}} for t in tools])
