"""What clients may send over `/v1/realtime`, as one tagged union, and how a message becomes one of them.

Fields that nobody knows are ignored, as OpenAI's clients expect. Where a field may be absent, null and given with three
meanings, it is `UNSET`, None or a value. `decode` also does what msgspec cannot: it tells which event was wrong, and
takes a large sound apart in pieces, so that a thread that does it lets others run."""

from __future__ import annotations

import binascii
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from stretto.fields import NOT_JSON, read_json, wrong_field
from stretto.server.realtime.sound import FormatName

Name = Annotated[str, Meta(max_length=512)]
Id = Annotated[str, Meta(min_length=1, max_length=128)]
Milliseconds = Annotated[int, Meta(ge=0, le=60_000)]
Text = Annotated[str, Meta(max_length=128 << 10)]
Modalities = Annotated[list[Literal["text", "audio"]], Meta(min_length=1, max_length=2)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
LARGE = 256 << 10  # bytes of a message that are decoded in a thread, and not on the event loop
_PIECE = 1 << 18  # characters of base64 at a time; a multiple of 4


# ---- sessions


class Format(Struct):
    type: FormatName
    rate: int | None = None


class Transcription(Struct):
    model: Name | None = None
    language: Name | None = None
    prompt: Annotated[str, Meta(max_length=4096)] | None = None


class NoiseReduction(Struct):
    type: Literal["near_field", "far_field"] | None = None


class TurnDetection(Struct):
    type: Literal["server_vad", "semantic_vad"] | UnsetType = UNSET
    threshold: Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType | None = UNSET
    prefix_padding_ms: Milliseconds | UnsetType | None = UNSET
    silence_duration_ms: Milliseconds | UnsetType | None = UNSET
    idle_timeout_ms: Annotated[int, Meta(ge=1, le=600000)] | UnsetType | None = UNSET
    create_response: bool | UnsetType | None = UNSET
    interrupt_response: bool | UnsetType | None = UNSET
    eagerness: Literal["low", "medium", "high", "auto"] | UnsetType | None = UNSET


class VoiceId(Struct):
    id: Name


class AudioInput(Struct):
    format: Format | UnsetType | None = UNSET
    transcription: Transcription | UnsetType | None = UNSET
    noise_reduction: NoiseReduction | UnsetType | None = UNSET
    turn_detection: TurnDetection | UnsetType | None = UNSET


class AudioOutput(Struct):
    format: Format | UnsetType | None = UNSET
    voice: Name | VoiceId | UnsetType | None = UNSET
    speed: float | UnsetType | None = UNSET


class Audio(Struct):
    input: AudioInput | UnsetType | None = UNSET
    output: AudioOutput | UnsetType | None = UNSET


class Sampling(Struct):
    """Ours: how an answer is made. Beside OpenAI's fields of a session and of a response."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | UnsetType | None = UNSET
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)] | UnsetType | None = UNSET
    greedy_speech: bool | UnsetType | None = UNSET
    max_audio_frames: Annotated[int, Meta(ge=1, le=1 << 20)] | UnsetType | None = UNSET
    timeline: bool | UnsetType | None = UNSET


class Common(Sampling):
    """What a session and a single response both say."""

    output_modalities: Modalities | UnsetType | None = UNSET
    instructions: Text | UnsetType | None = UNSET
    tools: Annotated[list[dict[str, Any]], Meta(max_length=256)] | UnsetType | None = UNSET
    tool_choice: str | dict[str, Any] | UnsetType | None = UNSET
    max_output_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | Literal["inf"] | UnsetType | None = UNSET
    audio: Audio | UnsetType | None = UNSET


class SessionFields(Common):
    type: Literal["realtime"] | UnsetType | None = UNSET


# ---- items


class Part(Struct):
    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio", "text", "audio"]
    text: Text | None = None
    audio: bytes | None = None
    transcript: Text | None = None
    image_url: str | None = None
    detail: str | None = None


class Item(Struct):
    type: Literal["message", "function_call", "function_call_output", "item_reference"]
    id: Id | None = None
    role: Literal["system", "user", "assistant"] | None = None
    content: Annotated[list[Part], Meta(max_length=256)] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Text | None = None


class ResponseFields(Common):
    metadata: Metadata | None = None
    conversation: Name | None = None
    input: Annotated[list[Item], Meta(max_length=256)] | UnsetType | None = UNSET


# ---- events


class ClientEvent(Struct, tag_field="type", kw_only=True):
    event_id: str | None = None


class SessionUpdate(ClientEvent, tag="session.update"):
    session: SessionFields


class Append(ClientEvent, tag="input_audio_buffer.append"):
    audio: bytes


class Commit(ClientEvent, tag="input_audio_buffer.commit"):
    pass


class Clear(ClientEvent, tag="input_audio_buffer.clear"):
    pass


class ItemCreate(ClientEvent, tag="conversation.item.create"):
    item: Item
    previous_item_id: str | None = None


class ItemTruncate(ClientEvent, tag="conversation.item.truncate"):
    item_id: str
    content_index: Annotated[int, Meta(ge=0, le=1 << 20)]
    audio_end_ms: int | float


class ItemDelete(ClientEvent, tag="conversation.item.delete"):
    item_id: str


class ItemRetrieve(ClientEvent, tag="conversation.item.retrieve"):
    item_id: str


class ResponseCreate(ClientEvent, tag="response.create"):
    response: ResponseFields | None = None


class ResponseCancel(ClientEvent, tag="response.cancel"):
    response_id: str | None = None


class OutputClear(ClientEvent, tag="output_audio_buffer.clear"):
    """Means something to WebRTC alone."""


Event = (
    SessionUpdate | Append | Commit | Clear | ItemCreate | ItemTruncate | ItemDelete | ItemRetrieve | ResponseCreate
    | ResponseCancel | OutputClear
)  # fmt: skip


class Head(Struct):
    """What is looked at when an event cannot be read."""

    type: Any = None
    event_id: Any = None


class Malformed(Exception):
    """A message that is not an event. `code` as clients know it; `event_id` if it could be told."""

    def __init__(self, code: str, message: str, param: str | None = None, event_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param, self.event_id = code, param, event_id


_decoder = msgspec.json.Decoder(Event)
_head = msgspec.json.Decoder(Head)


def decode(data: bytes) -> Event:
    """A message of a client. Raises `Malformed`."""
    if len(data) > LARGE and (large := _large_append(data)) is not None:
        return large
    try:
        event: Event = read_json(data, _decoder.decode)
        return event
    except msgspec.ValidationError as e:
        raise _explain(data, e) from None
    except NOT_JSON as e:
        raise Malformed("invalid_json", f"this is not JSON: {str(e)[:200]}") from None


def _explain(data: bytes, error: msgspec.ValidationError) -> Malformed:
    try:
        head = read_json(data, _head.decode)
    except msgspec.ValidationError:
        return Malformed("invalid_event", "an event must be a JSON object with a type")
    except NOT_JSON as e:
        return Malformed("invalid_json", f"this is not JSON: {str(e)[:200]}")
    event_id = head.event_id if isinstance(head.event_id, str) and len(head.event_id) <= 512 else None
    wrong = wrong_field(error)
    if not isinstance(head.type, str):
        return Malformed("invalid_event", "an event needs a type, which is a string", "type", event_id)
    if wrong.param == "type":
        return Malformed("invalid_event", f"there is no event of type {head.type[:100]!r}", "type", event_id)
    return Malformed("invalid_value", str(wrong), wrong.param, event_id)


def _large_append(data: bytes) -> Append | None:
    """The same event with its sound decoded piece by piece; None if this is not plainly an append."""
    key = data.find(b'"audio"', 0, 4096)
    start = data.find(b'"', key + 7, key + 16) + 1 if key >= 0 else 0
    end = data.find(b'"', start) if start else -1
    if end < 0 or data.find(b"\\", start, end) >= 0:
        return None
    try:
        event = _decoder.decode(data[:start] + data[end:])
        if not isinstance(event, Append):
            return None
        view = memoryview(data)[start:end]
        pieces = [binascii.a2b_base64(view[i : i + _PIECE], strict_mode=True) for i in range(0, len(view), _PIECE)]
    except (msgspec.ValidationError, binascii.Error, *NOT_JSON):
        return None  # the plain way says what is wrong
    event.audio = b"".join(pieces)
    return event
