"""POST /v1/chat/completions: a conversation in, an answer out, in words and aloud, whole or as it is made.

`answer_chat` checks what the decoder could not, asks the engine, and hands its events to one of two writers. The
order within a stream is what the stock clients are built for: role, then the audio's id, both once; words and sound
as they come; the audio's expiry, once; the reason for the end; usage if asked for; [DONE]."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from stretto.errors import Invalid
from stretto.orchestrator.api import AudioChunk, Event, Finished, ModelInfo, Params, TextDelta, Usage
from stretto.prompt.jobs import Conversation, references
from stretto.server import codecs
from stretto.server.answer import closing, drop_none, finish_reason, note, report, slices, unfinished
from stretto.server.body import ON_THE_LOOP, Body
from stretto.server.exchange import Exchange, Visit, decode
from stretto.server.schema import (
    ABSENT,
    Audio,
    AudioDelta,
    CalledFunction,
    ChatChunk,
    ChatRequest,
    ChatResponse,
    ChatUsage,
    Choice,
    ChunkChoice,
    CompletionDetails,
    Delta,
    Message,
    PromptDetails,
    ToolCall,
    ToolCallDelta,
)
from stretto.server.service import Service
from stretto.server.tools import Call, ToolParser
from stretto.server.voices import find_voice

LONG = ("messages", "tools")  # fields that may be long
MOST_SHORT = ON_THE_LOOP  # bytes of all others
_NONE, _AUTO, _EMPTY = Raw(b'"none"'), Raw(b'"auto"'), Raw(b"[]")
_decoder = msgspec.json.Decoder(ChatRequest)


@dataclass(slots=True)
class Answer:
    """One answer in the making: what it is called, and what of it is known."""

    request: ChatRequest
    service: Service
    exchange: Exchange
    model: str
    info: ModelInfo
    format: str | None  # of the speech; None: nothing is spoken
    tools: ToolParser | None
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(16)}")
    audio_id: str = field(default_factory=lambda: f"audio_{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def parse(self, text: str) -> list[str | Call]:
        return self.tools.feed(text) if self.tools else [text] if text else []

    def parse_rest(self) -> list[str | Call]:
        return self.tools.finish() if self.tools else []

    @property
    def calling(self) -> bool:
        """A function is being called: that is not read aloud."""
        return self.tools is not None and (self.tools.inside or self.tools.num_calls > 0)

    def reason(self, end: Finished) -> str:
        reason = finish_reason(end)
        return "tool_calls" if self.tools and self.tools.num_calls and reason == "stop" else reason

    def keep(self, transcript: str) -> int:
        return self.service.memory.keep(self.audio_id, self.exchange.visit.owner, transcript)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its short fields, and its messages and tools as they came."""

    request: ChatRequest
    talk: Conversation


async def read_chat(service: Service, body: Body, visit: Visit) -> Asked:
    """Cuts a body into its fields: on the event loop if it is small, else in another process."""
    if body.spool is None:
        request = decode(body.data, _decoder)
        if request.messages is ABSENT:
            raise _no_messages()
        messages, tools = bytes(request.messages), bytes(request.tools)
        used = tools if calls_functions(request, tools) else None
        recalled = service.memory.recall(references(messages), visit.owner)
        return Asked(request, Conversation.of(messages, used, recalled=recalled, sender=visit.sender, close=body.close))
    outlined, file = await service.engine().outline(body.spool, LONG, MOST_SHORT, visit.sender)
    body.replace(file)
    view = file.view()
    request = decode(bytes(view[: outlined.short]), _decoder)
    if "messages" not in outlined.long:
        raise _no_messages()
    span = outlined.long.get("tools")
    if span is None or not calls_functions(request, bytes(view[span[0] : min(span[1], span[0] + 5)])):
        span = None
    recalled = service.memory.recall(outlined.references, visit.owner)
    talk = Conversation(file, outlined.long["messages"], span, recalled, visit.sender, body.close)
    return Asked(request, talk)


def calls_functions(request: ChatRequest, tools: bytes) -> bool:
    return tools.strip() not in (b"null", b"[]") and request.tool_choice != _NONE


def _no_messages() -> Invalid:
    return Invalid("messages: missing required field messages", "messages")


async def answer_chat(service: Service, asked: Asked, exchange: Exchange) -> None:
    engine, visit, request = service.engine(), exchange.visit, asked.request
    model = service.check_model(request.model, engine)
    refuse_unsupported(request)
    spoken, stream = "audio" in (request.modalities or ()), bool(request.stream)
    answer = Answer(
        request=request,
        service=service,
        exchange=exchange,
        model=model,
        info=engine.info,
        format=audio_format(request, stream) if spoken else None,
        tools=ToolParser() if asked.talk.tools is not None else None,
    )
    visit.sample_rate = engine.info.sample_rate
    events = engine.generate(
        asked.talk,
        modalities=("text", "audio") if spoken else ("text",),
        voice=find_voice(request.audio.voice if request.audio else None, engine.info, "audio.voice"),
        params=to_params(request),
        request_id=visit.request_id,
        owner=visit.owner,
    )
    async with closing(events):
        await (stream_answer if stream else whole_answer)(answer, events)


# ---- requests


def refuse_unsupported(request: ChatRequest) -> None:
    """Fields we know and cannot honour: better an error than an answer to another question."""
    r = request
    refused: list[tuple[str, bool, str]] = [
        ("n", r.n not in (None, 1), "only one answer is made per request"),
        ("response_format", bool(r.response_format and r.response_format.type != "text"), "only text is supported"),
        ("frequency_penalty", bool(r.frequency_penalty), "only 0 is supported; see repetition_penalty"),
        ("presence_penalty", bool(r.presence_penalty), "only 0 is supported; see repetition_penalty"),
        ("logprobs", bool(r.logprobs), "log probabilities are not reported"),
        ("top_logprobs", bool(r.top_logprobs), "log probabilities are not reported"),
        ("functions", r.functions not in (ABSENT, _EMPTY), "use tools"),
        ("function_call", r.function_call not in (ABSENT, _NONE, _AUTO), "use tools"),
        ("prediction", r.prediction != ABSENT, "predicted output is not supported"),
        ("web_search_options", r.web_search_options != ABSENT, "there is no web search"),
        ("moderation", r.moderation != ABSENT, "there is no moderation"),
        ("tool_choice", r.tool_choice not in (ABSENT, _NONE, _AUTO), "only auto and none are supported"),
        ("stream_options", bool(r.stream_options) and not r.stream, "only allowed when stream is true"),
    ]
    for name, bad, why in refused:
        if bad:
            raise Invalid(f"{name}: {why}", name)


def audio_format(request: ChatRequest, stream: bool) -> str:
    format = (request.audio.format if request.audio else None) or ("pcm16" if stream else "wav")
    codecs.check(format, "audio.format")
    if stream and format != "pcm16":
        raise Invalid(f"audio.format: a stream carries pcm16 only, not {format}", "audio.format")
    return format


def to_params(request: ChatRequest) -> Params:
    r = request
    longest = r.max_completion_tokens if r.max_completion_tokens is not None else r.max_tokens
    stop = (r.stop,) if isinstance(r.stop, str) else tuple(r.stop or ())
    given = {
        "temperature": r.temperature,
        "top_p": r.top_p,
        "top_k": max(0, r.top_k) if r.top_k is not None else None,  # -1 is how others say off
        "repetition_penalty": r.repetition_penalty,
        "seed": r.seed,
        "greedy_speech": r.greedy_speech,
        "max_text_tokens": longest,
        "max_frames": r.max_audio_frames,
        "stop": stop,
        "logit_bias": token_bias(r.logit_bias),
        "ignore_eos": r.ignore_eos,
        "min_text_tokens": r.min_tokens,
        "min_frames": r.min_audio_frames,
    }
    check_lengths(r.min_tokens, longest or Params().max_text_tokens, "min_tokens")
    check_lengths(r.min_audio_frames, r.max_audio_frames or Params().max_frames, "min_audio_frames")
    return Params(**drop_none(given))


def check_lengths(least: int | None, most: int, param: str) -> None:
    if least is not None and least > most:
        raise Invalid(f"{param} is {least}, more than the {most} that are allowed at most", param)


def token_bias(bias: dict[str, float] | None) -> dict[int, float]:
    for key in bias or {}:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise Invalid(f"logit_bias: {key[:40]!r} is not the id of a token", "logit_bias")
    return {int(k): b for k, b in (bias or {}).items()}


# ---- answers


def chat_usage(usage: Usage) -> ChatUsage:
    media = usage.audio_prompt_tokens + usage.image_prompt_tokens
    completion = usage.text_tokens + usage.frames
    return ChatUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=completion,
        total_tokens=usage.prompt_tokens + completion,
        prompt_tokens_details=PromptDetails(
            text_tokens=usage.prompt_tokens - media,
            audio_tokens=usage.audio_prompt_tokens,
            image_tokens=usage.image_prompt_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        completion_tokens_details=CompletionDetails(text_tokens=usage.text_tokens, audio_tokens=usage.frames),
    )


async def whole_answer(answer: Answer, events: AsyncIterator[Event]) -> None:
    visit = answer.exchange.visit
    parts: list[str | Call] = []
    sound: list[bytes] = []
    end: Finished | None = None
    async for event in events:
        note(event, visit)
        match event:
            case TextDelta():
                parts += answer.parse(event.text)
            case AudioChunk() if not answer.calling:
                sound.append(event.pcm16())
            case Finished():
                end = event
    if end is None:
        raise unfinished()
    parts += answer.parse_rest()
    await answer.exchange.reply(
        ChatResponse(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=[Choice(await whole_message(answer, parts, b"".join(sound)), answer.reason(end))],
            usage=chat_usage(end.usage),
            stretto=report(end, visit, bool(answer.request.timeline)),
        )
    )


async def whole_message(answer: Answer, parts: list[str | Call], pcm: bytes) -> Message:
    text = "".join(p for p in parts if isinstance(p, str))
    calls = [ToolCall(call_id(), CalledFunction(p.name, p.arguments)) for p in parts if isinstance(p, Call)]
    tool_calls = calls or UNSET
    if answer.format is None or (calls and not pcm):
        return Message(text if text or not calls else None, tool_calls=tool_calls)
    data = await codecs.encode_elsewhere(answer.format, pcm, answer.info.sample_rate)
    return Message(None, audio=Audio(answer.audio_id, data, text, answer.keep(text)), tool_calls=tool_calls)


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


async def stream_answer(answer: Answer, events: AsyncIterator[Event]) -> None:
    visit, writer = answer.exchange.visit, Writer(answer)
    end: Finished | None = None
    # Nothing is sent before the first event: until then, what fails has a status of its own.
    async for event in events:
        note(event, visit)
        match event:
            case TextDelta():
                await writer.words(answer.parse(event.text))
            case AudioChunk():
                if not answer.calling:
                    await writer.sound(event.pcm16())
            case Finished():
                end = event
    if end is None:
        raise unfinished()
    await writer.finish(end)


@dataclass(slots=True)
class Writer:
    """Writes one streamed answer."""

    answer: Answer
    transcript: list[str] = field(default_factory=list)
    num_calls: int = 0
    _pieces: codecs.Pieces = field(default_factory=codecs.Pieces)

    @property
    def spoken(self) -> bool:
        return self.answer.format is not None

    async def words(self, parts: list[str | Call]) -> None:
        await self._begin()
        for part in parts:
            if isinstance(part, Call):
                function = CalledFunction(part.name, part.arguments)
                await self._delta(Delta(tool_calls=[ToolCallDelta(self.num_calls, call_id(), function)]))
                self.num_calls += 1
            elif self.spoken:
                self.transcript.append(part)
                await self._delta(Delta(audio=AudioDelta(transcript=part)))
            else:
                await self._delta(Delta(content=part))

    async def sound(self, pcm: bytes) -> None:
        await self._begin()
        await self._sound(self._pieces.feed(pcm))

    async def finish(self, end: Finished) -> None:
        await self.words(self.answer.parse_rest())
        answer = self.answer
        if self.spoken:
            await self._sound(self._pieces.finish())
            await self._delta(Delta(audio=AudioDelta(expires_at=answer.keep("".join(self.transcript)))))
        made = report(end, answer.exchange.visit, bool(answer.request.timeline))
        await self._send([ChunkChoice(Delta(), answer.reason(end))], stretto=made)
        if self._include_usage:
            await self._send([], usage=chat_usage(end.usage))
        await answer.exchange.write(b"data: [DONE]\n\n", more=False)

    @property
    def _include_usage(self) -> bool:
        options = self.answer.request.stream_options
        return bool(options and options.include_usage)

    async def _begin(self) -> None:
        exchange = self.answer.exchange
        if exchange.started:
            return
        await exchange.start_events()
        if self.spoken:
            # The id goes out once: the clients' own code joins what comes twice.
            await self._delta(Delta(role="assistant"))
            await self._delta(Delta(audio=AudioDelta(id=self.answer.audio_id)))
        else:
            await self._delta(Delta(role="assistant", content=""))

    async def _sound(self, data: bytes) -> None:
        for part in slices(data):
            await self._delta(Delta(audio=AudioDelta(data=part)))

    async def _delta(self, delta: Delta) -> None:
        await self._send([ChunkChoice(delta)])

    async def _send(self, choices: list[ChunkChoice], **extra: Any) -> None:
        a = self.answer
        if self._include_usage:
            extra.setdefault("usage", None)
        await a.exchange.event(ChatChunk(a.id, a.created, a.model, choices, **extra))
