"""Requests, answers and events of OpenAI's Responses API as msgspec structs: those fields of the
API that a server without tools and stores of its own can honour. Used by `responses.py`.

Requests forbid unknown fields, as in `schema.py`. Fields without effect here are listed as such;
`responses.py` refuses those that would change the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from stretto.server.openai.schema import (
    ABSENT,
    ContentLogprob,
    Length,
    Name,
    Report,
    Seed,
)


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    schema: Raw = field(default_factory=lambda: ABSENT)
    strict: bool | None = None  # without effect: the schema is always followed
    description: str | None = None


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None  # without effect


class ResponsesRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`input`, `instructions` and `tools` are decoded and checked where prompts are built."""

    input: Raw = field(default_factory=lambda: ABSENT)
    instructions: Raw = field(default_factory=lambda: ABSENT)
    tools: Raw = field(default_factory=lambda: ABSENT)
    tool_choice: Raw = field(default_factory=lambda: ABSENT)
    parallel_tool_calls: bool | None = None
    model: Name | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: Length | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: Annotated[list[Name], Meta(max_length=16)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None
    store: bool | None = None  # False: items of the answer cannot be referred to

    # Ours.
    seed: Seed | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    timeline: bool | None = None
    chat_template_kwargs: Raw = field(default_factory=lambda: ABSENT)

    # Known, and only good for one value.
    previous_response_id: Name | None = None
    conversation: Raw = field(default_factory=lambda: ABSENT)
    prompt: Raw = field(default_factory=lambda: ABSENT)
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None

    # Stock clients send these; they have no effect here.
    user: str | None = None
    reasoning: Raw = field(default_factory=lambda: ABSENT)
    stream_options: Raw = field(default_factory=lambda: ABSENT)
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Raw = field(default_factory=lambda: ABSENT)
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None
    context_management: Raw = field(default_factory=lambda: ABSENT)


# ---- answers


class OutputText(Struct, frozen=True):
    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []
    type: Literal["output_text"] = "output_text"


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputMessage(Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: Status
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class FunctionCall(Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str  # JSON


OutputItem = OutputMessage | FunctionCall


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Struct, frozen=True):
    id: str
    created_at: int
    model: str
    status: Status
    output: list[OutputItem]
    tools: Raw
    tool_choice: Raw
    text: TextOptions
    parallel_tool_calls: bool
    instructions: Raw = field(default_factory=lambda: ABSENT)
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    error: None = None
    previous_response_id: None = None
    store: bool = False
    background: bool = False
    truncation: Literal["disabled"] = "disabled"
    stretto: Report | UnsetType = UNSET
    object: Literal["response"] = "response"


# ---- events


class ResponseEvent(Struct, frozen=True, tag_field="type", kw_only=True):
    sequence_number: int


class Created(ResponseEvent, frozen=True, tag="response.created"):
    response: ResponseObject


class InProgress(ResponseEvent, frozen=True, tag="response.in_progress"):
    response: ResponseObject


class Completed(ResponseEvent, frozen=True, tag="response.completed"):
    response: ResponseObject


class Incomplete(ResponseEvent, frozen=True, tag="response.incomplete"):
    response: ResponseObject


class ResponseItemAdded(ResponseEvent, frozen=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ResponseItemDone(ResponseEvent, frozen=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ResponseItemEvent(ResponseEvent, frozen=True):
    item_id: str
    output_index: int


class OutputPartAdded(ResponseItemEvent, frozen=True, tag="response.content_part.added"):
    part: OutputText
    content_index: int = 0


class OutputPartDone(ResponseItemEvent, frozen=True, tag="response.content_part.done"):
    part: OutputText
    content_index: int = 0


class OutputTextDelta(ResponseItemEvent, frozen=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ContentLogprob] = []
    content_index: int = 0


class OutputTextDone(ResponseItemEvent, frozen=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ContentLogprob] = []
    content_index: int = 0


class CallArgumentsDelta(
    ResponseItemEvent, frozen=True, tag="response.function_call_arguments.delta"
):
    delta: str


class CallArgumentsDone(
    ResponseItemEvent, frozen=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str
