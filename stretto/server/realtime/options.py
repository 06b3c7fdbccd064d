"""A session's settings: what holds now, how an update changes it, and how all of it is told. Pure.

Only fields that an update names change; objects merge; null clears or goes back to the default.
Much of what we do not support is taken and ignored, since stock clients send it unasked and an
error would end their session; what changes how an answer is cut or told (`truncation`, `include`)
is refused, unless it says what we do anyway."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from sys import getsizeof
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from stretto._validation import NOT_JSON, not_json
from stretto.errors import Invalid
from stretto.family import ModelInfo
from stretto.params import ChunkSizes, Params
from stretto.preprocess.messages import check_tools
from stretto.server.openai.grammar import check_choice, of_calls
from stretto.server.openai.voices import find_voice
from stretto.server.realtime import client_events as c
from stretto.server.realtime.audio_formats import RATES, FormatName, check_rate
from stretto.server.realtime.turn_detection import Pauses

log = logging.getLogger("stretto.realtime")

Modality = Literal["text", "audio"]
Kind = Literal["realtime", "transcription"]
VadType = Literal["server_vad", "semantic_vad"]
SEMANTIC_PAUSE_MS = {"low": 1600, "medium": 800, "auto": 800, "high": 400}
MAX_TEXT_BYTES = (
    768 << 10
)  # bytes of instructions and tools: all of a session is told in one message of less than a MiB
MAX_TOOLS, MAX_TOOLS_BYTES, MAX_TOOL_BYTES = 256, 256 << 10, 64 << 10
SHORT_TEXT_BYTES = (
    4 << 10
)  # bytes of instructions or tools that are told again only where an update changes them
# of Python's objects for a byte of JSON, at most
DECODED_BYTES = 24
LOGPROBS = "item.input_audio_transcription.logprobs"
# Python's own reading of numbers: it takes 1 us where msgspec takes 8.
_values = msgspec.json.Decoder(float_hook=float)
_array = msgspec.json.Decoder(list[Raw])


@dataclass(frozen=True, slots=True)
class TurnSettings:
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
class Function:
    """One that the model may call."""

    name: str
    written: Raw  # as the client wrote it
    chat: dict[str, Any]  # in the format of chats

    @property
    def schema(self) -> bytes:
        """Of its arguments, as JSON."""
        return msgspec.json.encode(self.chat["function"].get("parameters"))


@dataclass(frozen=True, slots=True)
class Options:
    """What holds for the next answer. A response may say otherwise for itself alone."""

    voice: str
    modalities: tuple[Modality, ...] = ("audio",)
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
    timeline: bool = False  # tell what each stage did when

    @property
    def has_audio(self) -> bool:
        return "audio" in self.modalities

    @property
    def num_bytes(self) -> int:
        """What instructions and tools hold, at most."""
        return getsizeof(self.instructions) + DECODED_BYTES * tools_size(self.tools)

    def chat_tools(self) -> list[dict[str, Any]] | None:
        """The functions the model may call, as it is told of them."""
        if self.tool_choice == "none":
            return None
        return [t.chat for t in self.tools if self.only_tool in (None, t.name)] or None

    @property
    def call_required(self) -> bool:
        return self.tool_choice == "required"

    def check_choice(self) -> None:
        """Raise what is wrong with a call that is required."""
        if self.call_required:
            check_choice({t.name: t for t in self.tools}, self.only_tool)

    def grammar(self) -> str:
        """That the answer must follow; none: it is free. Long schemas take some milliseconds."""
        if not self.call_required:
            return ""
        schemas = {t.name: t.schema for t in self.tools}
        return of_calls(schemas, self.only_tool, several=True)

    def params(self, packets: ChunkSizes, defaults: Params, grammar: str = "") -> Params:
        """`defaults`: what the checkpoint says where nobody does."""
        stated = {
            "temperature": self.temperature,
            "seed": self.seed,
            "greedy_speech": self.greedy_speech,
            "max_frames": self.max_audio_frames,
            "speed": self.speed,
            "max_text_tokens": None if self.max_output_tokens == "inf" else self.max_output_tokens,
        }
        chosen: dict[str, Any] = {k: v for k, v in stated.items() if v is not None}
        return replace(defaults, **chosen, packets=packets, grammar=grammar)

    def updated(
        self, fields: c.Common, info: ModelInfo, tools: Sequence[Function] | None = None
    ) -> Options:
        """With what an update says. A null of a session's goes back to the default, one of a
        response's means what the session has: some clients write out every field of a response.
        `tools`: those of the update, if they have been read already."""
        changes: dict[str, Any] = {}
        default = self if isinstance(fields, c.ResponseFields) else Options(info.default_voice)
        for name, target in _SAME_NAMES.items():
            if (value := getattr(fields, name)) is not UNSET:
                changes[target] = getattr(default, target) if value is None else value
        if "modalities" in changes:
            changes["modalities"] = ("audio",) if "audio" in changes["modalities"] else ("text",)
        written = bytes(fields.tools)
        if written == b"null":
            changes["tools"] = default.tools
        elif written:
            changes["tools"] = tuple(tools if tools is not None else read_tools(fields.tools))
        if fields.tool_choice is None:
            changes["tool_choice"] = default.tool_choice
            changes["only_tool"] = default.only_tool
        elif not isinstance(fields.tool_choice, UnsetType):
            changes["tool_choice"], changes["only_tool"] = _choice(fields.tool_choice)
        output = _fields(_fields(fields.audio).get("output"))
        if "format" in output:
            value = output["format"]
            changes["output_format"] = (
                _format(value, "audio.output.format") if value else default.output_format
            )
        if "voice" in output:
            changes["voice"] = _voice(output["voice"], info) if output["voice"] else default.voice
        if "speed" in output:
            changes["speed"] = output["speed"] or default.speed
        result = replace(self, **changes)
        size = len(msgspec.json.encode(result.instructions)) + tools_size(result.tools)
        if size > MAX_TEXT_BYTES:
            raise Invalid(
                f"instructions and tools have {size:,} bytes, more than the {MAX_TEXT_BYTES:,} "
                f"allowed",
                "session",
            )
        return result


_SAME_NAMES = {
    "output_modalities": "modalities",
    "instructions": "instructions",
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
        self, fields: c.SessionFields, info: ModelInfo, tools: Sequence[Function] | None = None
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
        """All of it, as events tell it. `before`: what the client knows; of that, long instructions
        and tools are left out."""
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
            long["tools"] = [t.written for t in a.tools]
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self.id,
            "model": self.model,
            "expires_at": self.expires_at,
            "output_modalities": list(a.modalities),
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
        heard = self._input_to_wire()
        formats = {format: name for name, format in c.BETA_FORMATS.items()}
        return {
            "object": "realtime.transcription_session",
            "id": self.id,
            "expires_at": self.expires_at,
            "input_audio_format": formats[self.input_format],
            "input_audio_transcription": heard["transcription"],
            "input_audio_noise_reduction": heard["noise_reduction"],
            "turn_detection": heard["turn_detection"],
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
    """What an object says; nothing where there is none."""
    if not isinstance(value, msgspec.Struct):
        return {}
    return {n: v for n in value.__struct_fields__ if (v := getattr(value, n)) is not UNSET}


def _format(value: c.Format | None, param: str) -> FormatName:
    if value is None:
        return "audio/pcm"
    check_rate(value.type, value.rate, f"{param}.rate")
    return value.type


def _voice(value: str | c.VoiceId, info: ModelInfo) -> str:
    """The model's voice that is meant; its default for a name that nobody knows, as stock clients
    send their own."""
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
    """The choice as it is told, which must be a word, and the one function that it allows."""
    if isinstance(value, c.NamedTool):  # one without a name is of a kind that is ignored
        return ("required", value.name) if value.name else ("auto", None)
    if value not in ("auto", "none", "required"):
        raise Invalid(
            f"tool_choice must be auto, none, required or a function, got {value[:40]!r}",
            "tool_choice",
        )
    return value, None


def split_tools(written: Raw) -> list[Raw]:
    """The tools one by one, none of them decoded."""
    if len(memoryview(written)) > MAX_TOOLS_BYTES:
        raise Invalid(f"tools have more than the {MAX_TOOLS_BYTES:,} bytes allowed", "tools")
    try:
        tools = _array.decode(written)
    except msgspec.ValidationError:
        raise Invalid("tools must be a list", "tools") from None
    except NOT_JSON as e:
        raise Invalid(f"tools: {not_json(e)}", "tools") from None
    if len(tools) > MAX_TOOLS:
        raise Invalid(f"tools has more than {MAX_TOOLS} functions", "tools")
    if any(len(memoryview(tool)) > MAX_TOOL_BYTES for tool in tools):
        raise Invalid(f"a tool has at most {MAX_TOOL_BYTES:,} bytes", "tools")
    return tools


def read_tool(written: Raw) -> Function | None:
    """None: it is of another kind. We could not call it, and strict clients would not have it back
    as it came."""
    try:
        tool = _values.decode(written)
    except NOT_JSON as e:
        raise Invalid(f"tools: {not_json(e)}", "tools") from None
    if not isinstance(tool, dict):
        raise Invalid("tools must be objects", "tools")
    if tool.get("type", "function") != "function":
        return None
    names = ("name", "description", "parameters", "strict")
    [chat] = check_tools(
        [{"type": "function", "function": {k: tool[k] for k in names if k in tool}}]
    )
    return Function(chat["function"]["name"], Raw(bytes(written)), chat)


def read_tools(written: Raw) -> list[Function]:
    return [tool for part in split_tools(written) if (tool := read_tool(part)) is not None]


def tools_size(tools: Sequence[Function]) -> int:
    """Bytes of them as they are told."""
    return sum(len(memoryview(t.written)) + 1 for t in tools)
