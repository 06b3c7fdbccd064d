"""The events that the server sends over `/v1/realtime`. Every field that a stock client requires is
there; a field that must not be null is left out instead (`UNSET`). `SendQueue` gives each event its
id."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


# ---- what events carry


class Part(Struct):
    """In items `input_text`, `input_audio`, `input_image`, `output_text`, `output_audio`; in a
    response's parts `text` and `audio`."""

    type: str
    text: str | UnsetType = UNSET
    transcript: str | UnsetType | None = UNSET
    image_url: str | UnsetType = UNSET
    detail: str | UnsetType = UNSET


class Item(Struct):
    id: str
    type: str
    object: str = "realtime.item"
    status: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    content: list[Part] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    output: str | UnsetType = UNSET


class ErrorInfo(Struct):
    type: str
    message: str
    code: str | None = None
    param: str | None = None
    event_id: str | None = None


class StatusError(Struct):
    type: str
    code: str | None
    message: str


class StatusDetails(Struct):
    type: str
    reason: str | UnsetType = UNSET
    error: StatusError | UnsetType = UNSET


class Timings(Struct):
    """Not OpenAI's. Seconds since the answer was requested, but where the name says otherwise."""

    seed: int | None = None
    first_text_s: float | None = None
    first_audio_s: float | None = None
    total_s: float | None = None
    audio_s: float = 0.0
    vad_wait_s: float | None = None  # from the end of speech to the end of the turn
    speech_to_audio_s: float | None = None  # from the end of speech to the first sound
    speculative: bool = False  # begun before the turn had certainly ended
    timeline: list[dict[str, Any]] | UnsetType = UNSET


class Response(Struct):
    id: str
    status: Status
    output_modalities: list[str]
    audio: dict[str, Any]
    max_output_tokens: int | str
    object: str = "realtime.response"
    status_details: StatusDetails | None = None
    output: list[Item] = []
    conversation_id: str | None = None
    usage: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    stretto: Timings | UnsetType = UNSET


# ---- events


class ServerEvent(Struct, tag_field="type", kw_only=True):
    event_id: str = ""


class SessionCreated(ServerEvent, tag="session.created"):
    session: dict[str, Any]


class SessionUpdated(ServerEvent, tag="session.updated"):
    session: dict[str, Any]


class TranscriptionSessionCreated(ServerEvent, tag="transcription_session.created"):
    """An event of the beta protocol."""

    session: dict[str, Any]


class TranscriptionSessionUpdated(ServerEvent, tag="transcription_session.updated"):
    """An event of the beta protocol."""

    session: dict[str, Any]


class Error(ServerEvent, tag="error"):
    error: ErrorInfo


class ItemAdded(ServerEvent, tag="conversation.item.added"):
    previous_item_id: str | None
    item: Item


class ItemDone(ServerEvent, tag="conversation.item.done"):
    previous_item_id: str | None
    item: Item


class ItemDeleted(ServerEvent, tag="conversation.item.deleted"):
    item_id: str


class ItemTruncated(ServerEvent, tag="conversation.item.truncated"):
    item_id: str
    content_index: int
    audio_end_ms: int


class ItemRetrieved(ServerEvent, tag="conversation.item.retrieved"):
    item: Item


class Committed(ServerEvent, tag="input_audio_buffer.committed"):
    previous_item_id: str | None
    item_id: str


class Cleared(ServerEvent, tag="input_audio_buffer.cleared"):
    pass


class SpeechStarted(ServerEvent, tag="input_audio_buffer.speech_started"):
    audio_start_ms: int
    item_id: str


class SpeechStopped(ServerEvent, tag="input_audio_buffer.speech_stopped"):
    audio_end_ms: int
    item_id: str
    vad_wait_s: float  # not OpenAI's: the silence that ended the turn, as in `Timings`


class TimeoutTriggered(ServerEvent, tag="input_audio_buffer.timeout_triggered"):
    audio_start_ms: int
    audio_end_ms: int
    item_id: str


class TranscriptLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TranscriptionDelta(ServerEvent, tag="conversation.item.input_audio_transcription.delta"):
    item_id: str
    content_index: int
    delta: str
    logprobs: list[TranscriptLogprob] | UnsetType = UNSET


class TranscriptionCompleted(
    ServerEvent, tag="conversation.item.input_audio_transcription.completed"
):
    item_id: str
    content_index: int
    transcript: str
    usage: dict[str, Any]
    logprobs: list[TranscriptLogprob] | UnsetType = UNSET


class TranscriptionFailed(ServerEvent, tag="conversation.item.input_audio_transcription.failed"):
    item_id: str
    content_index: int
    error: ErrorInfo


class ResponseCreated(ServerEvent, tag="response.created"):
    response: Response


class ResponseDone(ServerEvent, tag="response.done"):
    response: Response


class OutputItemAdded(ServerEvent, tag="response.output_item.added"):
    response_id: str
    output_index: int
    item: Item


class OutputItemDone(ServerEvent, tag="response.output_item.done"):
    response_id: str
    output_index: int
    item: Item


class InItem(ServerEvent):
    """An event of an item of a response."""

    response_id: str
    item_id: str
    output_index: int


class InPart(InItem):
    """An event of a part of such an item."""

    content_index: int


class PartAdded(InPart, tag="response.content_part.added"):
    part: Part


class PartDone(InPart, tag="response.content_part.done"):
    part: Part


class AudioDelta(InPart, tag="response.output_audio.delta"):
    delta: bytes


class AudioDone(InPart, tag="response.output_audio.done"):
    pass


class TranscriptDelta(InPart, tag="response.output_audio_transcript.delta"):
    delta: str


class TranscriptDone(InPart, tag="response.output_audio_transcript.done"):
    transcript: str


class TextDelta(InPart, tag="response.output_text.delta"):
    delta: str


class TextDone(InPart, tag="response.output_text.done"):
    text: str


class ArgumentsDelta(InItem, tag="response.function_call_arguments.delta"):
    call_id: str
    delta: str


class ArgumentsDone(InItem, tag="response.function_call_arguments.done"):
    call_id: str
    name: str
    arguments: str
