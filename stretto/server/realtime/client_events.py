"""The events that clients may send over `/v1/realtime`, as one tagged union, and how a message is
decoded to one of them. The endpoint's reader calls `decode`.

Unknown fields are ignored, as OpenAI's clients expect. Where an absent field, null and a value have
three meanings, the field is `UNSET`, None or the value. `decode` also does what msgspec cannot: an
error names the event, the size of what is decoded is bounded, and sound and pictures are decoded in
pieces, so that a thread that does it lets others run."""

from __future__ import annotations

import binascii
import re
import secrets
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from stretto._validation import NOT_JSON, read_json, wrong_field
from stretto.server.realtime.audio_formats import FormatName

Name = Annotated[str, Meta(max_length=512)]
Id = Annotated[str, Meta(min_length=1, max_length=128)]
Milliseconds = Annotated[int, Meta(ge=0, le=60_000)]
Text = Annotated[str, Meta(max_length=128 << 10)]
Modalities = Annotated[list[Literal["text", "audio"]], Meta(min_length=1, max_length=2)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
SHORT = 8 << 10  # bytes of an event of most types; longer ones are checked before they are decoded
LARGE = 256 << 10  # bytes of a message; longer ones are decoded in a thread, not on the event loop
MOST = 1 << 20  # bytes of an event without its sound and pictures
MOST_FIELD = 16 << 10  # bytes of a field of a session or a response, but for those in `_LONG`
MAX_PARTS = 256  # of an item
_MEDIA = 4 << 10  # bytes of a string from which on it is decoded by itself
_PIECE = 1 << 18  # characters of base64 at a time; a multiple of 4


# ---- sessions


class Format(Struct):
    type: FormatName
    rate: int | None = None


class Transcription(Struct):
    model: Name | None = None
    language: Name | None = None
    languages: Annotated[list[Name], Meta(max_length=16)] | None = None
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


class NamedTool(Struct):
    name: str | None = None


class Truncation(Struct):
    type: str


class AudioInputFields(Struct):
    format: Format | UnsetType | None = UNSET
    transcription: Transcription | UnsetType | None = UNSET
    noise_reduction: NoiseReduction | UnsetType | None = UNSET
    turn_detection: TurnDetection | UnsetType | None = UNSET


class AudioOutputFields(Struct):
    format: Format | UnsetType | None = UNSET
    voice: Name | VoiceId | UnsetType | None = UNSET
    speed: Annotated[float, Meta(ge=0.25, le=4)] | UnsetType | None = UNSET


class AudioFields(Struct):
    input: AudioInputFields | UnsetType | None = UNSET
    output: AudioOutputFields | UnsetType | None = UNSET


class Sampling(Struct):
    """How an answer is made: fields that are not OpenAI's, of a session and of a response."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | UnsetType | None = UNSET
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)] | UnsetType | None = UNSET
    greedy_speech: bool | UnsetType | None = UNSET
    max_audio_frames: Annotated[int, Meta(ge=1, le=1 << 20)] | UnsetType | None = UNSET
    timeline: bool | UnsetType | None = UNSET


class Common(Sampling):
    """The fields that a session and a single response share."""

    output_modalities: Modalities | UnsetType | None = UNSET
    instructions: Text | UnsetType | None = UNSET
    tools: Raw = msgspec.field(
        default_factory=Raw
    )  # empty: absent. Read tool by tool (`options.py`)
    tool_choice: str | NamedTool | UnsetType | None = UNSET
    max_output_tokens: (
        Annotated[int, Meta(ge=1, le=1 << 20)] | Literal["inf"] | UnsetType | None
    ) = UNSET
    audio: AudioFields | UnsetType | None = UNSET


class SessionFields(Common):
    type: Literal["realtime", "transcription"] | UnsetType | None = UNSET
    truncation: str | Truncation | UnsetType | None = UNSET
    include: Annotated[list[Name], Meta(max_length=16)] | UnsetType | None = UNSET


class TranscriptionFields(Struct):
    """A transcription session as clients of the beta write it."""

    input_audio_format: Literal["pcm16", "g711_ulaw", "g711_alaw"] | UnsetType | None = UNSET
    input_audio_transcription: Transcription | UnsetType | None = UNSET
    input_audio_noise_reduction: NoiseReduction | UnsetType | None = UNSET
    turn_detection: TurnDetection | UnsetType | None = UNSET
    include: Annotated[list[Name], Meta(max_length=16)] | UnsetType | None = UNSET

    def session(self) -> SessionFields:
        """The same settings as a current session has them."""
        format: Format | UnsetType | None = UNSET
        if self.input_audio_format is None or isinstance(self.input_audio_format, str):
            format = Format(BETA_FORMATS[self.input_audio_format or "pcm16"])
        audio = AudioInputFields(
            format,
            self.input_audio_transcription,
            self.input_audio_noise_reduction,
            self.turn_detection,
        )
        return SessionFields(type="transcription", include=self.include, audio=AudioFields(audio))


BETA_FORMATS: dict[str, FormatName] = {
    "pcm16": "audio/pcm",
    "g711_ulaw": "audio/pcmu",
    "g711_alaw": "audio/pcma",
}


# ---- items


class Part(Struct):
    type: Literal[
        "input_text", "input_audio", "input_image", "output_text", "output_audio", "text", "audio"
    ]
    text: Text | None = None
    audio: bytes | None = None
    transcript: Text | None = None
    image_url: str | None = None
    detail: str | None = None


class Item(Struct):
    type: Literal["message", "function_call", "function_call_output", "item_reference"]
    id: Id | None = None
    role: Literal["system", "user", "assistant"] | None = None
    content: Annotated[list[Part], Meta(max_length=MAX_PARTS)] | None = None
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


class TranscriptionUpdate(ClientEvent, tag="transcription_session.update"):
    """An event of the beta protocol."""

    session: TranscriptionFields


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
    """It has a meaning for WebRTC alone."""


Event = (
    SessionUpdate
    | TranscriptionUpdate
    | Append
    | Commit
    | Clear
    | ItemCreate
    | ItemTruncate
    | ItemDelete
    | ItemRetrieve
    | ResponseCreate
    | ResponseCancel | OutputClear
)  # fmt: skip


class Head(Struct):
    """The fields that name an event, to read before the event and when it cannot be decoded."""

    type: Raw = msgspec.field(default_factory=Raw)
    event_id: Raw = msgspec.field(default_factory=Raw)


class EventError(Exception):
    """Why an event of a client was refused: what the `error` event says. `event_id`: that of a
    message that is no event, if it could be read."""

    def __init__(
        self, code: str, message: str, param: str | None = None, event_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.event_id = event_id


decoder = msgspec.json.Decoder(Event)
_head = msgspec.json.Decoder(Head)
_object = msgspec.json.Decoder(dict[str, Raw])
_array = msgspec.json.Decoder(list[Raw])
_encode = msgspec.json.Encoder().encode
_LONG = {
    "session.update": ("session", SessionFields, ("instructions", "tools")),
    "response.create": ("response", ResponseFields, ("instructions", "tools", "input")),
}
"""Events with an object that may have long fields: its name, its type, and these fields."""


def decode(data: bytes) -> Event:
    """A message of a client. Raises `EventError`."""
    if len(data) <= SHORT:
        return _decoded(data)
    cut = CutMedia(data)
    event = _decoded(cut.short, _bounded(cut.short) if len(cut.short) > SHORT else cut.short)
    cut.fill(event)
    return event


def _decoded(data: bytes, bounded: bytes | None = None) -> Event:
    try:
        event: Event = read_json(data if bounded is None else bounded, decoder.decode)
        return event
    except msgspec.ValidationError as e:
        raise _explain(data, e) from None
    except NOT_JSON as e:
        raise _not_json(e) from None


def _not_json(error: Exception) -> EventError:
    return EventError("invalid_json", f"this is not JSON: {str(error)[:200]}")


def _explain(data: bytes, error: msgspec.ValidationError) -> EventError:
    try:
        kind, event_id = _read_head(data)
    except msgspec.ValidationError:
        return EventError("invalid_event", "an event must be a JSON object with a type")
    except NOT_JSON as e:
        return _not_json(e)
    wrong = wrong_field(error)
    if kind is None:
        return EventError(
            "invalid_event", "an event needs a type, which is a string", "type", event_id
        )
    if wrong.param == "type":
        return EventError(
            "invalid_event", f"there is no event of type {kind[:100]!r}", "type", event_id
        )
    return EventError("invalid_value", str(wrong), wrong.param, event_id)


def _read_head(data: bytes) -> tuple[str | None, str | None]:
    """The type and the id of an event, where they are strings of a sensible length."""
    head = read_json(data, _head.decode)

    def word(raw: Raw) -> str | None:
        text = bytes(memoryview(raw)[: 8 << 10])
        value = (
            msgspec.json.decode(text)
            if text.startswith(b'"') and text.endswith(b'"') and len(text) > 1
            else None
        )
        return value if isinstance(value, str) else None

    event_id = word(head.event_id)
    return word(head.type), event_id if event_id is not None and len(event_id) <= 512 else None


# ---- large events


def _bounded(data: bytes) -> bytes:
    """The same event without what takes long to decode and has no use: fields that are there more
    than once (a number such as 1e-320 takes 7 us), unknown fields. Refuses an event with more parts
    than an item may have."""
    try:
        kind, event_id = _read_head(data)
        if kind == "input_audio_buffer.append":
            return data
        fields = _object.decode(data)
        if kind == "conversation.item.create" and "item" in fields:
            _check_parts(_object.decode(fields["item"]), "item", event_id)
        elif kind in _LONG:
            name, known, long = _LONG[kind]
            if name in fields:
                inner = {
                    k: v
                    for k, v in _object.decode(fields[name]).items()
                    if k in known.__struct_fields__
                }
                _check_fields(inner, name, long, event_id)
                fields[name] = Raw(_encode(inner))
        else:
            raise _too_long(f"an event of this type has at most {SHORT:,} bytes", None, event_id)
        return _encode(fields)
    except msgspec.ValidationError:
        return data  # the decoder meets the same mistake, and says which one it is
    except NOT_JSON as e:
        raise _not_json(e) from None


def _check_fields(
    fields: Mapping[str, Raw], place: str, long: tuple[str, ...], event_id: str | None
) -> None:
    for name, value in fields.items():
        if name not in long and len(memoryview(value)) > MOST_FIELD:
            raise _too_long(
                f"{place}.{name} has more than {MOST_FIELD:,} bytes", f"{place}.{name}", event_id
            )
    if "input" in fields and "input" in long:
        items = _array.decode(fields["input"])
        if len(items) > 256:
            raise _too_long("response.input has more than 256 items", "response.input", event_id)
        for item in items:
            _check_parts(_object.decode(item), "response.input", event_id)


def _check_parts(item: Mapping[str, Raw], place: str, event_id: str | None) -> None:
    content = item.get("content")
    if content is not None and len(_array.decode(content)) > MAX_PARTS:
        raise _too_long(
            f"{place}.content has more than {MAX_PARTS} parts", f"{place}.content", event_id
        )


def _too_long(message: str, param: str | None, event_id: str | None) -> EventError:
    return EventError("invalid_value", message, param, event_id)


_KEYS = (b'"audio"', b'"image_url"')
_VALUE = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*"')
_MARK = secrets.token_bytes(9)
"""Stands for a string that was cut out, with its number of three bytes behind it; nobody else can
write it."""
_MARK_TEXT = b64encode(_MARK).decode()


class CutMedia:
    """The long strings of an event's sound and pictures, cut out of it: `short` is what is left.
    They are found by their names, and by the end of their strings; so no decoder gets them whole,
    but one small piece after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._strings = list(_media(data))
        parts = []
        at = 0
        for i, (start, stop) in enumerate(self._strings):
            parts += [data[at:start], b64encode(_MARK + i.to_bytes(3, "big"))]
            at = stop
        self.short = b"".join([*parts, data[at:]]) if parts else data
        if len(self.short) > MOST:
            raise EventError(
                "invalid_value", f"without sound and pictures, an event has at most {MOST:,} bytes"
            )

    def fill(self, event: Event) -> None:
        """Put the strings where they belong."""
        if not self._strings:
            return
        try:
            if isinstance(event, Append):
                event.audio = self._sound(event.audio)
            for part in _parts(event):
                if part.audio:
                    part.audio = self._sound(part.audio)
                if part.image_url:
                    part.image_url = self._url(part.image_url)
        except (binascii.Error, UnicodeDecodeError):
            where = "audio" if isinstance(event, Append) else "content"
            raise EventError(
                "invalid_value", f"{where}: Invalid base64 encoded string", where, event.event_id
            ) from None

    def _sound(self, value: bytes) -> bytes:
        found = self._string(value)
        if found is None:
            return value
        pieces = (found[i : i + _PIECE] for i in range(0, len(found), _PIECE))
        return b"".join([binascii.a2b_base64(piece, strict_mode=True) for piece in pieces])

    def _url(self, value: str) -> str:
        found = self._string(binascii.a2b_base64(value)) if value.startswith(_MARK_TEXT) else None
        return value if found is None else str(found, "ascii")

    def _string(self, value: bytes) -> memoryview | None:
        if len(value) != 12 or not value.startswith(_MARK):
            return None
        start, stop = self._strings[int.from_bytes(value[9:], "big")]
        found = memoryview(self._data)[start:stop]
        return (
            memoryview(bytes(found).replace(b"\\/", b"/"))
            if _escaped(self._data, start, stop)
            else found
        )


def _parts(event: Event) -> Iterator[Part]:
    items: list[Item] = []
    if isinstance(event, ItemCreate):
        items = [event.item]
    elif (
        isinstance(event, ResponseCreate)
        and event.response is not None
        and isinstance(event.response.input, list)
    ):
        items = event.response.input
    for item in items:
        yield from item.content or ()


def _media(data: bytes) -> Iterator[tuple[int, int]]:
    """The positions of the long strings of the fields `audio` and `image_url`."""
    at = left = 0
    following = {key: data.find(key) for key in _KEYS}
    while any(place >= 0 for place in following.values()):
        key, place = min(
            ((k, p) for k, p in following.items() if p >= 0), key=lambda found: found[1]
        )
        left += place - at
        at = place + len(key)
        if (match := _VALUE.match(data, at)) is not None:
            start = match.end()
            stop = data.find(b'"', start)
            if stop - start >= _MEDIA and (
                not _escaped(data, start, stop) or _only_slashes(data[start:stop])
            ):
                yield start, stop
                left += start - at
                at = stop
        if left > MOST:
            raise EventError(
                "invalid_value", f"without sound and pictures, an event has at most {MOST:,} bytes"
            )
        following = {k: p if p >= at or p < 0 else data.find(k, at) for k, p in following.items()}


def _escaped(data: bytes, start: int, stop: int) -> bool:
    return data.find(b"\\", start, stop) >= 0


def _only_slashes(text: bytes) -> bool:
    """Whether all escapes are slashes: some clients write them so."""
    return text.count(b"\\") == text.count(b"\\/")
