"""Requests, answers and events of OpenAI's chat, speech and transcription API as msgspec structs,
with the few fields that this server adds.

The routes decode and encode them on the event loop; `openapi.py` publishes them. Requests forbid
unknown fields, so that a misspelt field is an error that names it rather than a silent default.
Limits are part of the types, where the decoder and the published schema both have them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**20)]
Length = Annotated[int, Meta(ge=1, le=2**20)]
VoiceName = Annotated[
    str, Meta(min_length=1, max_length=64, pattern="^[A-Za-z0-9][A-Za-z0-9 ._-]*$(?!\\n)")
]
ChatFormat = Literal["pcm16", "wav", "mp3", "flac", "opus", "aac"]
ABSENT = Raw(b"null")
SpeechFormat = Literal["pcm", "wav", "mp3", "flac", "opus", "aac"]


# ---- requests


class VoiceId(Struct, frozen=True, forbid_unknown_fields=True):
    id: Name


class AudioOptions(Struct, frozen=True, forbid_unknown_fields=True):
    voice: Name | VoiceId | None = None
    format: ChatFormat | None = None  # None: pcm16 when streamed, else wav


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect: nothing is padded here


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: Raw = field(default_factory=lambda: ABSENT)
    strict: bool | None = None  # without effect: the schema is always followed
    description: str | None = None


class ResponseFormat(Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields without a bound of their own are `Raw`: the decoder skips them, so that nothing is
    made of them on the event loop. Messages and tools are decoded and checked where prompts are
    built."""

    messages: Raw = field(default_factory=lambda: ABSENT)
    model: Name | None = None
    modalities: (
        Annotated[list[Literal["text", "audio"]], Meta(min_length=1, max_length=2)] | None
    ) = None
    audio: AudioOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Seed | None = None
    stop: (
        Annotated[str, Meta(min_length=1, max_length=256)]
        | Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)]
        | None
    ) = None
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    n: Annotated[int, Meta(ge=1, le=8)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None
    ) = None
    tools: Raw = field(default_factory=lambda: ABSENT)
    tool_choice: Raw = field(default_factory=lambda: ABSENT)
    response_format: ResponseFormat | None = None

    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    # Ours.
    top_k: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    min_audio_frames: Count | None = None
    max_audio_frames: Length | None = None
    greedy_speech: bool | None = None
    speech_temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    speech_top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    speech_top_k: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    speech_repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    timeline: bool | None = None  # report what each stage did when
    chat_template_kwargs: Raw = field(default_factory=lambda: ABSENT)

    # Known, and only good for one value.
    functions: Raw = field(default_factory=lambda: ABSENT)
    function_call: Raw = field(default_factory=lambda: ABSENT)
    prediction: Raw = field(default_factory=lambda: ABSENT)
    web_search_options: Raw = field(default_factory=lambda: ABSENT)
    moderation: Raw = field(default_factory=lambda: ABSENT)

    # Stock clients send these; they have no effect here.
    user: str | None = None
    metadata: Raw = field(default_factory=lambda: ABSENT)
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Raw = field(default_factory=lambda: ABSENT)
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


MAX_INPUT = 65536
"""Characters of a text that is read aloud."""


class SpeechFields(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a text is read aloud."""

    model: Name | None = None
    voice: Name | VoiceId | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    # without effect on models that take none
    instructions: Annotated[str, Meta(max_length=4096)] | None = None
    language: Name | None = None  # ours; None: the model finds out

    # Ours.
    seed: Seed | None = None
    min_audio_frames: Count | None = None
    max_audio_frames: Length | None = None
    greedy_speech: bool | None = None
    speech_temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    speech_top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    speech_top_k: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    speech_repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    timeline: bool | None = None


class SpeechRequest(SpeechFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    input: Annotated[str, Meta(min_length=1, max_length=MAX_INPUT)]
    response_format: SpeechFormat | None = None  # None: mp3
    stream_format: Literal["audio", "sse"] | None = None


class VoiceRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A clip that a voice is made of. With what is said in it, speech is a closer likeness."""

    name: VoiceName
    # a sound file in base64; decoded where prompts are built
    audio: Raw = field(default_factory=lambda: ABSENT)
    format: Annotated[str, Meta(max_length=16, pattern="^[a-z0-9]+$")] | None = None
    text: Annotated[str, Meta(max_length=2048)] | None = None
    model: Name | None = None


class TranscriptionRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of a form, besides its `file`."""

    model: Name | None = None
    language: Annotated[str, Meta(max_length=8)] | None = None
    # what the sound is about, names that are in it
    prompt: Annotated[str, Meta(max_length=4096)] | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] | None = (
        None  # None: json
    )
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None  # None: greedy
    stream: bool | None = None
    # of verbose_json, which has segments anyhow
    timestamp_granularities: (
        Annotated[list[Literal["segment", "word"]], Meta(max_length=2)] | None
    ) = None

    # Ours.
    seed: Seed | None = None
    max_tokens: Length | None = None  # of each window


# ---- answers


class PromptDetails(Struct, frozen=True):
    text_tokens: int
    audio_tokens: int
    image_tokens: int
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    text_tokens: int
    audio_tokens: int  # codec frames, 12.5 a second
    reasoning_tokens: int = 0


class ChatUsage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TimelineEntry(Struct, frozen=True):
    """Something that took time; seconds from the request's arrival in the engine."""

    lane: str
    name: str
    start: float
    stop: float


class Report(Struct, frozen=True, omit_defaults=True):
    """What we add to an answer: how it was made. Seconds from the request's arrival; stock clients
    skip it."""

    seed: int
    total_s: float
    audio_s: float
    first_text_s: float | None = None
    first_audio_s: float | None = None
    rtf: float | None = None  # time to make the speech over the time it plays
    underrun_s: float = 0.0  # how long a player that starts at once would have waited
    timeline: list[TimelineEntry] | UnsetType = UNSET


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str  # JSON


class ToolCall(Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Audio(Struct, frozen=True):
    id: str
    data: bytes  # base64 in JSON
    transcript: str
    expires_at: int


class Message(Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    audio: Audio | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None  # of its text; None for special tokens


class ContentLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct, frozen=True):
    content: list[ContentLogprob]
    refusal: None = None


class Choice(Struct, frozen=True):
    message: Message
    finish_reason: str
    index: int = 0
    logprobs: ChoiceLogprobs | None = None


class ChatResponse(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: ChatUsage
    stretto: Report
    object: Literal["chat.completion"] = "chat.completion"


class AudioDelta(Struct, frozen=True):
    id: str | UnsetType = UNSET
    data: bytes | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET


class ToolCallDelta(Struct, frozen=True):
    index: int
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Delta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    audio: AudioDelta | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    index: int = 0
    logprobs: ChoiceLogprobs | None = None


class ChatChunk(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChatUsage | UnsetType | None = UNSET
    stretto: Report | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class SpeechUsage(Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    stretto: Report


SpeechFinishReason = Literal["stop", "length"]
"""`length`: the speech was cut at a limit."""


class SpeechDelta(Struct, frozen=True, tag="speech.audio.delta"):
    audio: bytes


class SpeechDone(Struct, frozen=True, tag="speech.audio.done"):
    usage: SpeechUsage
    finish_reason: SpeechFinishReason


class VoiceCard(Struct, frozen=True):
    name: str
    created: int | None = None  # None: it is the model's own
    has_text: bool | None = None
    object: Literal["voice"] = "voice"


class VoiceList(Struct, frozen=True):
    data: list[VoiceCard]
    object: Literal["list"] = "list"


class VoiceDeleted(Struct, frozen=True):
    name: str
    deleted: bool = True
    object: Literal["voice.deleted"] = "voice.deleted"


class Transcript(Struct, frozen=True):
    text: str


class Segment(Struct, frozen=True):
    id: int
    start: float
    end: float
    text: str


class VerboseTranscript(Struct, frozen=True):
    text: str
    language: str
    duration: float
    segments: list[Segment]


class TranscriptSegment(Struct, frozen=True, tag="transcript.text.segment"):
    """Of a stream in verbose_json: a segment is complete."""

    id: str
    start: float
    end: float
    text: str


class TranscriptDelta(Struct, frozen=True, tag="transcript.text.delta"):
    delta: str


class TranscriptDone(Struct, frozen=True, tag="transcript.text.done"):
    text: str


class ModelCard(Struct, frozen=True):
    id: str
    created: int
    input_modalities: tuple[str, ...]
    output_modalities: tuple[str, ...]
    voices: tuple[str, ...]
    default_voice: str
    sample_rate: int
    max_model_len: int
    root: str
    ideas: tuple[str, ...]  # questions it can answer; none: the page shows its own
    defaults: dict[str, float]  # of the request's fields, as the checkpoint says
    description: str = ""  # what it is, as the checkpoint says
    languages: tuple[str, ...] = ()
    instructions: bool = False
    cloning: bool = False
    transcribes: bool = False  # it has /v1/audio/transcriptions
    weights: str = ""  # how they are stored where they come quantised
    random_weights: bool = False  # what it says is noise
    stages: dict[str, str] = {}  # and what each does, in words
    max_body_bytes: int = 0
    owned_by: str = "stretto"
    object: Literal["model"] = "model"


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Health(Struct, frozen=True):
    status: Literal["loading", "ready", "draining", "dead"]
    stages: dict[str, str] = {}
    error: str | None = None


class Version(Struct, frozen=True):
    version: str
