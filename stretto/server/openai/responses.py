"""POST /v1/responses: OpenAI's Responses API as a translation to chat. Text, images, sound and
video come in; text, function calls and JSON go out.

The input's items become messages where the prompt is built (`preprocess/response_items.py`). The
engine's events become output items and, in a stream, the events that clients expect
(`ResponseObjectWriter`). Responses are not stored: a client sends the whole conversation. Only the
items of an answer can be referred to for a while, since some clients always do so."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import msgspec
from msgspec import Raw

from stretto.engine.events import Event, Finished, TextDelta, TokenLogprob, Usage
from stretto.errors import Invalid
from stretto.params import Params
from stretto.preprocess.audio_references import references
from stretto.preprocess.pool.jobs import ByteRange, Conversation
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.split import outline
from stretto.preprocess.remote_media import remote_urls
from stretto.server.http.body import ON_THE_LOOP, Body
from stretto.server.http.exchange import Exchange, decode
from stretto.server.openai import response_schema as r
from stretto.server.openai.chat import call_id, logprobs_of
from stretto.server.openai.chat_params import LONGEST, check_schema_size, to_params, variables
from stretto.server.openai.generating_route import closing_events, report, unfinished
from stretto.server.openai.grammar import AUTO, LONG, NONE, REQUIRED, of_calls, of_format
from stretto.server.openai.schema import (
    ABSENT,
    ChatRequest,
    ContentLogprob,
    JsonSchema,
    ResponseFormat,
)
from stretto.server.openai.tools import Call, ToolParser
from stretto.server.request_log import RequestLog, finish_reason
from stretto.server.service import Service

LONG_FIELDS = ("input", "instructions", "tools")
LOGPROBS = "message.output_text.logprobs"
MOST_SHOWN = 16 << 10  # bytes of tools or instructions that the answer repeats
_EMPTY = Raw(b"[]")
_IGNORED = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What clients ask to be included, of things that no answer has here."""
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "top_logprobs")
"""Fields that mean what they mean in a chat."""
_decoder = msgspec.json.Decoder(r.ResponsesRequest)
_longest = {
    "chat_template_kwargs": LONGEST["chat_template_kwargs"],
    "tool_choice": 64 << 10,
    "text": LONGEST["response_format"],
    "metadata": 64 << 10,
}
_encode = msgspec.json.Encoder().encode


class ResponseTool(msgspec.Struct, frozen=True):
    type: str
    name: str = ""
    parameters: Raw = msgspec.field(default_factory=lambda: ABSENT)


class ToolChoice(msgspec.Struct, frozen=True):
    """One that names a function, or some of them."""

    type: str
    name: str = ""
    mode: str = "auto"
    tools: list[ResponseTool] = []


_tools = msgspec.json.Decoder(list[ResponseTool])
_choice = msgspec.json.Decoder(ToolChoice)


@dataclass(frozen=True, slots=True)
class LongFields:
    """The fields that nobody has decoded, as they came; one that is null counts as absent."""

    body: bytes | MemFile
    spans: dict[str, ByteRange]

    @classmethod
    def of(cls, body: bytes | MemFile, spans: dict[str, ByteRange]) -> LongFields:
        every = cls(body, spans)
        return cls(body, {n: span for n, span in spans.items() if every.head(n) != b"null"})

    def size(self, name: str) -> int:
        start, stop = self.spans.get(name, (0, 0))
        return stop - start

    def read(self, name: str) -> bytes:
        span = self.spans.get(name, (0, 0))
        return self.body.read(*span) if isinstance(self.body, MemFile) else self.body[slice(*span)]

    def head(self, name: str) -> bytes:
        start, stop = self.spans.get(name, (0, 0))
        return LongFields(self.body, {name: (start, min(stop, start + 4))}).read(name)

    def shown(self, name: str, default: Raw) -> Raw:
        """As the answer repeats it, if it is not too long for that."""
        return Raw(self.read(name)) if 0 < self.size(name) <= MOST_SHOWN else default


@dataclass(frozen=True, slots=True)
class ResponseInput:
    """A request: its short fields, and what was long as it came."""

    request: r.ResponsesRequest
    talk: Conversation
    instructions: Raw  # these two as the answer repeats them
    tools: Raw
    grammar: str = ""  # that the answer must follow


async def read_responses(service: Service, body: Body, request_log: RequestLog) -> ResponseInput:
    """Cuts a body into its fields: on the event loop if it is small, else in another process."""
    short, long, known, urls = await _outline(service, body, request_log)
    request = decode(short, _decoder, _longest)
    refuse_unsupported(request)
    if not long.size("input"):
        raise Invalid("input: missing required field input", "input")
    calls = request.tool_choice != NONE and long.head("tools") not in (b"", b"[]")
    talk = Conversation(
        long.body,
        long.spans["input"],
        long.spans["tools"] if calls else None,
        service.answers.find(known, request_log.owner),
        request_log.client,
        body.close,
        variables(request.chat_template_kwargs),
        "responses",
        long.spans.get("instructions"),
        await service.media.fetch(urls, body),
    )
    grammar = await _grammar(service, request, long if calls else None, request_log)
    shown = long.shown("instructions", ABSENT), long.shown("tools", _EMPTY)
    return ResponseInput(request, talk, *shown, grammar)


async def _outline(
    service: Service, body: Body, request_log: RequestLog
) -> tuple[bytes, LongFields, tuple[str, ...], tuple[str, ...]]:
    """The short fields, the long ones, and what these may refer to: ids of earlier items, and
    addresses of media."""
    if body.memfile is None:
        short, found = outline(body.data, LONG_FIELDS, ON_THE_LOOP)
        ends = list(accumulate((len(value) for value in found.values()), initial=0))
        spans = dict(zip(found, pairwise(ends), strict=True))
        long = LongFields.of(b"".join(found.values()), spans)
        messages = found.get("input", b"")
        return short, long, references(messages), remote_urls(messages)
    outlined, file = await service.engine().outline(
        body.memfile, LONG_FIELDS, ON_THE_LOOP, request_log.client
    )
    body.replace(file)
    await service.turns.take()
    long = LongFields.of(file, outlined.long)
    return file.read(0, outlined.short), long, outlined.references, outlined.remote


def refuse_unsupported(request: r.ResponsesRequest) -> None:
    """Refuse what would change the answer, rather than ignore it."""
    stored = "responses are not stored: send the conversation as input"
    strange = [name for name in request.include or () if name not in (LOGPROBS, *_IGNORED)]
    refused = {
        "previous_response_id": (request.previous_response_id is not None, stored),
        "conversation": (request.conversation != ABSENT, stored),
        "prompt": (request.prompt != ABSENT, "prompts are not stored: send instructions"),
        "background": (bool(request.background), "an answer is made while its client listens"),
        "truncation": (request.truncation == "auto", "only disabled is supported"),
        "include": (bool(strange), f"{', '.join(strange)[:100]} is not known here"),
    }
    for name, (is_refused, why) in refused.items():
        if is_refused:
            raise Invalid(f"{name}: {why}", name)


async def _grammar(
    service: Service, request: r.ResponsesRequest, long: LongFields | None, request_log: RequestLog
) -> str:
    """That the answer must follow; empty: none."""
    shape = request.text.format if request.text is not None else None
    required = request.tool_choice not in (ABSENT, NONE, AUTO)
    size = len(memoryview(shape.schema)) if shape is not None else 0
    check_schema_size(size, "text.format.schema")
    tools = b"[]"
    if required and long is not None:
        size = long.size("tools")
        check_schema_size(size, "tools")
        tools = long.read("tools")
    if size <= LONG:
        return grammar_of(request, tools)
    async with service.thread_turns.turn(request_log.client):
        return await asyncio.to_thread(grammar_of, request, tools)


def grammar_of(request: r.ResponsesRequest, tools: bytes) -> str:
    shape = request.text.format if request.text is not None else None
    shaped = shape is not None and shape.type != "text"
    grammar = ""
    if request.tool_choice not in (ABSENT, NONE, AUTO):
        grammar = _of_tools(request, tools)
        if grammar and shaped:
            raise Invalid(
                "text.format: a call is required by tool_choice; leave one of them out",
                "text.format",
            )
    if shape is not None and shaped:
        schema = JsonSchema(shape.name or "answer", shape.schema)
        try:
            grammar = of_format(ResponseFormat(shape.type, schema))
        except Invalid as e:
            at, words = "text.format.schema", str(e)
            raise Invalid(words.replace("response_format.json_schema", "text.format"), at) from None
    return grammar


def _of_tools(request: r.ResponsesRequest, tools: bytes) -> str:
    """Of the calls that `tool_choice` asks for; empty if it leaves the choice to the model."""
    only = None
    try:
        known = {t.name: bytes(t.parameters) for t in _tools.decode(tools)}
        if request.tool_choice != REQUIRED:
            choice = _choice.decode(request.tool_choice)
            if choice.type == "allowed_tools":
                if choice.mode != "required":
                    return ""
                allowed = {t.name for t in choice.tools}
                known = {name: schema for name, schema in known.items() if name in allowed}
            else:
                only = choice.name
    except msgspec.MsgspecError as e:
        raise Invalid(
            f"tool_choice: none, auto, required or a function of tools ({e})", "tool_choice"
        ) from None
    return of_calls(known, only, several=request.parallel_tool_calls is not False)


async def answer_responses(
    service: Service, response_input: ResponseInput, exchange: Exchange
) -> None:
    engine = service.engine()
    request_log = exchange.request_log
    request = response_input.request
    model = service.check_model(request.model, engine)
    if "text" not in engine.info.output_modalities:
        raise Invalid("this model reads texts aloud, and writes no answers", "model")
    chat = ChatRequest(
        max_tokens=request.max_output_tokens,
        logprobs=LOGPROBS in (request.include or ()) or request.top_logprobs is not None,
        **{name: getattr(request, name) for name in _SAME},
    )
    params = to_params(chat, engine.info.defaults, service.config.packets, response_input.grammar)
    writer = ResponseObjectWriter(
        service,
        exchange,
        new_response(response_input, model, params),
        stream=bool(request.stream),
        stores_items=request.store is not False,
        timeline=bool(request.timeline),
        tools=ToolParser() if response_input.talk.tools is not None else None,
    )
    events = engine.generate(
        response_input.talk,
        modalities=("text",),
        params=params,
        request_id=request_log.request_id,
        session=request_log.session,
        owner=request_log.owner,
    )
    async with closing_events(events):
        await writer.write(events)


def new_response(response_input: ResponseInput, model: str, params: Params) -> r.ResponseObject:
    """The response as it is before any output."""
    request = response_input.request
    return r.ResponseObject(
        id=f"resp_{secrets.token_hex(16)}",
        created_at=int(time.time()),
        model=model,
        status="in_progress",
        output=[],
        tools=response_input.tools,
        tool_choice=AUTO if request.tool_choice == ABSENT else request.tool_choice,
        text=request.text or r.TextOptions(r.TextFormat("text")),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        instructions=response_input.instructions,
        temperature=params.temperature,
        top_p=params.top_p,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
    )


def usage_to_wire(usage: Usage) -> r.ResponseUsage:
    total = usage.prompt_tokens + usage.text_tokens
    cached = r.InputTokensDetails(usage.cached_tokens)
    return r.ResponseUsage(usage.prompt_tokens, cached, usage.text_tokens, total)


@dataclass(slots=True)
class ResponseObjectWriter:
    """Writes one response: whole, or event by event. A message item is open from its first words
    to the first function's call or the end."""

    service: Service
    exchange: Exchange
    response: r.ResponseObject
    stream: bool
    stores_items: bool  # so that later requests can refer to them
    timeline: bool
    tools: ToolParser | None
    output: list[r.OutputItem] = field(default_factory=list)
    _number: int = 0  # of the next event
    _message: str | None = None  # the id of the message that is open
    _text: str = ""  # of it
    _logprobs: list[ContentLogprob] = field(default_factory=list)  # of it
    _unsent: list[TokenLogprob] = field(default_factory=list)  # of tokens whose text waits

    async def write(self, events: AsyncIterator[Event]) -> None:
        end: Finished | None = None
        # Nothing is sent before the first event: until then, what fails has a status of its own.
        async for event in events:
            self.exchange.request_log.record(event)
            if isinstance(event, TextDelta):
                await self._begin()
                self._unsent += event.logprobs
                parts = self.tools.feed(event.text) if self.tools else [event.text]
                await self._write(parts)
            elif isinstance(event, Finished):
                end = event
        if end is None:
            raise unfinished()
        await self._begin()
        await self._finish(end)

    async def _begin(self) -> None:
        if self._number or not self.stream:
            return
        await self.exchange.start_events()
        for kind in (r.Created, r.InProgress):
            await self._send(kind(sequence_number=self._number, response=self.response))

    async def _write(self, parts: Sequence[str | Call]) -> None:
        for part in parts:
            if isinstance(part, Call):
                await self._close("completed")
                await self._write_call(part)
            elif part:
                await self._write_text(part)

    async def _write_text(self, text: str) -> None:
        if self._message is None:
            self._message = f"msg_{secrets.token_hex(16)}"
            added = r.OutputMessage(self._message, "in_progress", [])
            await self._item(r.ResponseItemAdded, added)
            await self._in_item(r.OutputPartAdded, self._message, part=r.OutputText(""))
        self._text += text
        logprobs = logprobs_of(self._unsent).content
        self._unsent = []
        self._logprobs += logprobs
        await self._in_item(r.OutputTextDelta, self._message, delta=text, logprobs=logprobs)

    async def _close(self, status: r.Status) -> None:
        """The end of the message that is open, if one is."""
        if self._message is None:
            return
        id = self._message
        self._logprobs += logprobs_of(self._unsent).content
        part = r.OutputText(self._text, logprobs=self._logprobs)
        await self._in_item(r.OutputTextDone, id, text=part.text, logprobs=part.logprobs)
        await self._in_item(r.OutputPartDone, id, part=part)
        self._message = None
        self._text = ""
        self._logprobs = []
        self._unsent = []
        await self._end(r.OutputMessage(id, status, [part]))

    async def _write_call(self, call: Call) -> None:
        id = f"fc_{secrets.token_hex(16)}"
        status: r.Status = "completed" if call.complete else "incomplete"
        item = r.FunctionCall(id, "in_progress", call_id(), call.name, "")
        await self._item(r.ResponseItemAdded, item)
        await self._in_item(r.CallArgumentsDelta, id, delta=call.arguments)
        await self._in_item(r.CallArgumentsDone, id, name=call.name, arguments=call.arguments)
        await self._end(r.FunctionCall(id, status, item.call_id, call.name, call.arguments))

    async def _end(self, item: r.OutputItem) -> None:
        await self._item(r.ResponseItemDone, item)
        self.output.append(item)
        if self.stores_items:
            owner = self.exchange.request_log.owner
            self.service.answers.add(item.id, owner, _encode(item).decode())

    async def _finish(self, end: Finished) -> None:
        cut = finish_reason(end) == "length"
        if self.tools is not None:
            await self._write(self.tools.finish(cut=cut))
        if not self.output and self._message is None:
            await self._write_text("")  # clients expect a message, be it empty
        await self._close("incomplete" if cut else "completed")
        response = msgspec.structs.replace(
            self.response,
            status="incomplete" if cut else "completed",
            output=self.output,
            usage=usage_to_wire(end.usage),
            incomplete_details=r.IncompleteDetails() if cut else None,
            completed_at=None if cut else int(time.time()),
            stretto=report(end, self.exchange.request_log, self.timeline),
        )
        if not self.stream:
            await self.exchange.reply(response)
            return
        kind = r.Incomplete if cut else r.Completed
        await self._send(kind(sequence_number=self._number, response=response))
        await self.exchange.write(b"", more=False)

    # -- events

    async def _item(
        self, kind: type[r.ResponseItemAdded | r.ResponseItemDone], item: r.OutputItem
    ) -> None:
        await self._send(
            kind(sequence_number=self._number, output_index=len(self.output), item=item)
        )

    async def _in_item(self, kind: type[r.ResponseItemEvent], id: str, **fields: Any) -> None:
        place = len(self.output)
        await self._send(
            kind(sequence_number=self._number, item_id=id, output_index=place, **fields)
        )

    async def _send(self, event: r.ResponseEvent) -> None:
        if not self.stream:
            return
        self._number += 1
        name = event.__struct_config__.tag
        await self.exchange.write(f"event: {name}\ndata: ".encode() + _encode(event) + b"\n\n")
