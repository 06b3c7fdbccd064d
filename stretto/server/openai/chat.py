"""POST /v1/chat/completions: a conversation is answered in text and speech, streamed or whole.

`read_chat` cuts the body into short fields, which it decodes, and messages and tools, which stay
bytes. `answer_chat` checks what the decoder could not, asks the engine, and sends each
`ChatAnswer`. Stock clients expect this order within a stream: the role, then the audio's id, both
once; text and sound as they come; the audio's expiry, once; the finish reason; usage if it was
requested; [DONE]."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import UNSET

from stretto.engine.events import AudioChunk, Event, Finished, TextDelta, TokenLogprob, Usage
from stretto.errors import Invalid
from stretto.preprocess.audio_references import references
from stretto.preprocess.pool.jobs import Conversation
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.split import outline
from stretto.preprocess.remote_media import remote_urls
from stretto.server.http.body import ON_THE_LOOP, Body
from stretto.server.http.exchange import Exchange, decode
from stretto.server.openai import codecs
from stretto.server.openai.answer_store import AnswerStore
from stretto.server.openai.chat_params import (
    LONGEST,
    NONE,
    audio_format,
    check_schema_size,
    refuse_unsupported,
    to_params,
    variables,
)
from stretto.server.openai.generating_route import closing_events, report, slices, unfinished
from stretto.server.openai.grammar import LONG as LONG_SCHEMAS
from stretto.server.openai.grammar import calls_required, grammar_of, schema_bytes
from stretto.server.openai.schema import (
    Audio,
    AudioDelta,
    CalledFunction,
    ChatChunk,
    ChatRequest,
    ChatResponse,
    ChatUsage,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    CompletionDetails,
    ContentLogprob,
    Delta,
    Message,
    PromptDetails,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from stretto.server.openai.tools import Call, ToolParser
from stretto.server.openai.voices import find_voice
from stretto.server.request_log import RequestLog, finish_reason
from stretto.server.service import Service
from stretto.server.tasks import run_all
from stretto.types import RequestId

LONG = ("messages", "tools")  # fields that may be long
MOST_SHORT = ON_THE_LOOP  # bytes of all others
_decoder = msgspec.json.Decoder(ChatRequest)


@dataclass(slots=True)
class ChatAnswer:
    """One answer in the making: its names, the engine's events and, of a stream, what was sent."""

    request: ChatRequest
    exchange: Exchange
    store: AnswerStore
    events: AsyncIterator[Event]
    id: str  # of all answers to one question
    created: int
    model: str
    format: str | None  # of the speech; None: nothing is spoken
    tools: ToolParser | None
    index: int  # among the answers to one question
    audio_id: str = field(default_factory=lambda: f"audio_{secrets.token_hex(16)}")
    # of one that is streamed
    begun: bool = False
    transcript: list[str] = field(default_factory=list)
    num_calls: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of tokens whose text is not sent
    pieces: codecs.Pieces = field(default_factory=codecs.Pieces)

    @property
    def includes_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and bool(options.include_usage)

    def parse(self, text: str) -> list[str | Call]:
        return self.tools.feed(text) if self.tools else [text] if text else []

    def parse_rest(self, end: Finished) -> list[str | Call]:
        return self.tools.finish(cut=end.text == "length") if self.tools else []

    @property
    def calling(self) -> bool:
        """A function is being called: that is not read aloud."""
        return self.tools is not None and (self.tools.inside or self.tools.num_calls > 0)

    def reason(self, end: Finished) -> str:
        reason = finish_reason(end)
        return "tool_calls" if self.tools and self.tools.num_calls and reason == "stop" else reason

    def remember(self, transcript: str) -> int:
        """Let later requests refer to the transcript by the audio's id, until the time returned."""
        return self.store.add(self.audio_id, self.exchange.request_log.owner, transcript)

    # -- whole

    async def complete(self) -> tuple[Choice, Finished]:
        """Collect the answer to its end."""
        parts: list[str | Call] = []
        logprobs: list[TokenLogprob] = []
        sound: list[bytes] = []
        end: Finished | None = None
        async with closing_events(self.events) as events:
            async for event in events:
                self.exchange.request_log.record(event)
                match event:
                    case TextDelta():
                        parts += self.parse(event.text)
                        logprobs += event.logprobs
                    case AudioChunk() if not self.calling:
                        sound.append(event.pcm16())
                    case Finished():
                        parts += self.parse_rest(event)
                        end = event
        if end is None:
            raise unfinished()
        message = await self._message(parts, b"".join(sound))
        shown = logprobs_of(logprobs) if self.request.logprobs else None
        return Choice(message, self.reason(end), self.index, shown), end

    async def _message(self, parts: list[str | Call], pcm: bytes) -> Message:
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [
            ToolCall(call_id(), CalledFunction(part.name, part.arguments))
            for part in parts
            if isinstance(part, Call)
        ]
        tool_calls = calls or UNSET
        if self.format is None or (calls and not pcm):
            return Message(text if text or not calls else None, tool_calls=tool_calls)
        rate = self.exchange.request_log.sample_rate
        data = await codecs.encode_elsewhere(self.format, pcm, rate)
        audio = Audio(self.audio_id, data, text, self.remember(text))
        return Message(None, audio=audio, tool_calls=tool_calls)

    # -- streamed

    async def stream(self) -> Finished:
        """Send the answer as it is made. Nothing is sent before the first event: what fails until
        then has an HTTP status of its own."""
        end: Finished | None = None
        async with closing_events(self.events) as events:
            async for event in events:
                self.exchange.request_log.record(event)
                match event:
                    case TextDelta():
                        self.logprobs += event.logprobs
                        await self.write_text(self.parse(event.text))
                    case AudioChunk() if not self.calling:
                        await self.write_sound(event.pcm16())
                    case Finished():
                        await self.finish(event)
                        end = event
        if end is None:
            raise unfinished()
        return end

    async def write_text(self, parts: list[str | Call]) -> None:
        await self._begin()
        for part in parts:
            if isinstance(part, Call):
                function = CalledFunction(part.name, part.arguments)
                call = ToolCallDelta(self.num_calls, call_id(), function)
                await self._delta(Delta(tool_calls=[call]))
                self.num_calls += 1
            elif self.format is not None:
                self.transcript.append(part)
                await self._delta(Delta(audio=AudioDelta(transcript=part)), self._take_logprobs())
            else:
                await self._delta(Delta(content=part), self._take_logprobs())

    async def write_sound(self, pcm: bytes) -> None:
        await self._begin()
        for part in slices(self.pieces.feed(pcm)):
            await self._delta(Delta(audio=AudioDelta(data=part)))

    async def finish(self, end: Finished) -> None:
        await self.write_text(self.parse_rest(end))
        if self.format is not None:
            if rest := self.pieces.finish():
                await self._delta(Delta(audio=AudioDelta(data=rest)))
            expires = self.remember("".join(self.transcript))
            await self._delta(Delta(audio=AudioDelta(expires_at=expires)))
        timings = report(end, self.exchange.request_log, bool(self.request.timeline))
        # Words may have been held back and dropped (a stop string, a function's call): their tokens
        # go out here.
        last = ChunkChoice(Delta(), self.reason(end), self.index, self._take_logprobs())
        await self.send([last], stretto=timings)

    async def _begin(self) -> None:
        if self.begun:
            return
        self.begun = True
        if not self.exchange.started:
            await self.exchange.start_events()
        if self.format is not None:
            # The id goes out once: the clients' own code joins what comes twice.
            await self._delta(Delta(role="assistant"))
            await self._delta(Delta(audio=AudioDelta(id=self.audio_id)))
        else:
            await self._delta(Delta(role="assistant", content=""))

    def _take_logprobs(self) -> ChoiceLogprobs | None:
        """Log probabilities of the tokens up to here. Those of a token whose text is held back come
        with that text."""
        if not self.logprobs:
            return None
        found = logprobs_of(self.logprobs)
        self.logprobs = []
        return found if found.content else None

    async def _delta(self, delta: Delta, logprobs: ChoiceLogprobs | None = None) -> None:
        await self.send([ChunkChoice(delta, index=self.index, logprobs=logprobs)])

    async def send(self, choices: list[ChunkChoice], **extra: Any) -> None:
        if self.includes_usage:
            extra.setdefault("usage", None)
        chunk = ChatChunk(self.id, self.created, self.model, choices, **extra)
        await self.exchange.event(chunk)


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A request: its short fields, and its messages and tools as they came."""

    request: ChatRequest
    talk: Conversation
    grammar: str = ""  # that the answer must follow


async def read_chat(service: Service, body: Body, request_log: RequestLog) -> ChatInput:
    """Cuts a body into its fields: on the event loop if it is small, else in another process."""
    if body.memfile is not None:
        return await _read_large(service, body, body.memfile, request_log)
    short, found = outline(body.data, LONG, MOST_SHORT)
    request = _decoded(short)
    if "messages" not in found:
        raise _no_messages()
    messages = bytes(found["messages"])
    tools = bytes(found.get("tools", b"null"))
    used = tools if calls_functions(request, tools) else None
    if used is not None and calls_required(request):
        check_schema_size(len(used), "tools")
    talk = Conversation.of(
        messages,
        used,
        recalled=service.answers.find(references(messages), request_log.owner),
        client=request_log.client,
        close=body.close,
        variables=variables(request.chat_template_kwargs),
        remote=await service.media.fetch(remote_urls(messages), body),
    )
    return ChatInput(request, talk, await _grammar(service, request, used, request_log))


async def _read_large(
    service: Service, body: Body, memfile: MemFile, request_log: RequestLog
) -> ChatInput:
    outlined, file = await service.engine().outline(memfile, LONG, MOST_SHORT, request_log.client)
    body.replace(file)
    await service.turns.take()
    request = _decoded(file.read(0, outlined.short))
    if "messages" not in outlined.long:
        raise _no_messages()
    span = outlined.long.get("tools")
    if span is None or not calls_functions(request, file.read(span[0], min(span[1], span[0] + 5))):
        span = None
    recalled = service.answers.find(outlined.references, request_log.owner)
    talk = Conversation(
        file,
        outlined.long["messages"],
        span,
        recalled,
        request_log.client,
        body.close,
        variables(request.chat_template_kwargs),
        remote=await service.media.fetch(outlined.remote, body),
    )
    tools = None
    if span is not None and calls_required(request):
        check_schema_size(span[1] - span[0], "tools")
        tools = file.read(*span)
    return ChatInput(request, talk, await _grammar(service, request, tools, request_log))


async def _grammar(
    service: Service, request: ChatRequest, tools: bytes | None, request_log: RequestLog
) -> str:
    """The grammar that the answer must follow; empty if its text is free."""
    if request.response_format is None and not calls_required(request):
        return ""
    if schema_bytes(request, tools) <= LONG_SCHEMAS:
        return grammar_of(request, tools)
    async with service.thread_turns.turn(request_log.client):
        return await asyncio.to_thread(grammar_of, request, tools)


def num_answers(chat: ChatInput) -> int:
    """Each of them runs in the engine like a request of its own."""
    return chat.request.n or 1


def _decoded(short: bytes) -> ChatRequest:
    request = decode(short, _decoder, LONGEST)
    shape = request.response_format
    if shape is not None and shape.json_schema is not None:
        check_schema_size(
            len(memoryview(shape.json_schema.schema)), "response_format.json_schema.schema"
        )
    return request


def calls_functions(request: ChatRequest, tools: bytes) -> bool:
    return tools.strip() not in (b"null", b"[]") and request.tool_choice != NONE


def _no_messages() -> Invalid:
    return Invalid("messages: missing required field messages", "messages")


async def answer_chat(service: Service, chat: ChatInput, exchange: Exchange) -> None:
    answers = ask_engine(service, chat, exchange)
    if chat.request.stream:
        await stream_answers(answers)
    else:
        await send_whole(answers)


def ask_engine(service: Service, chat: ChatInput, exchange: Exchange) -> list[ChatAnswer]:
    """Check what the decoder could not, and ask the engine for each answer to the question."""
    engine = service.engine()
    request_log = exchange.request_log
    request = chat.request
    model = service.check_model(request.model, engine)
    refuse_unsupported(request)
    spoken = "audio" in (request.modalities or ())
    format = audio_format(request, bool(request.stream)) if spoken else None
    request_log.sample_rate = engine.info.sample_rate
    params = to_params(request, engine.info.defaults, service.config.packets, chat.grammar)
    voice = find_voice(request.audio.voice if request.audio else None, engine.info, "audio.voice")
    id, created = f"chatcmpl-{secrets.token_hex(16)}", int(time.time())
    answers: list[ChatAnswer] = []
    for i, talk in enumerate(chat.talk.shared(num_answers(chat))):
        events = engine.generate(
            talk,
            modalities=("text", "audio") if spoken else ("text",),
            voice=voice,
            params=params if params.seed is None else replace(params, seed=params.seed + i),
            request_id=RequestId(f"{request_log.request_id}-{i}") if i else request_log.request_id,
            session=request_log.session,
            owner=request_log.owner,
        )
        answer = ChatAnswer(
            request=request,
            exchange=exchange,
            store=service.answers,
            events=events,
            id=id,
            created=created,
            model=model,
            format=format,
            tools=ToolParser() if chat.talk.tools is not None else None,
            index=i,
        )
        answers.append(answer)
    return answers


# ---- answers


def chat_usage(answers: Sequence[Usage]) -> ChatUsage:
    """Of all answers to one question, whose prompt counts once."""
    usage = answers[0]
    media = usage.audio_prompt_tokens + usage.image_prompt_tokens
    text = sum(u.text_tokens for u in answers)
    frames = sum(u.frames for u in answers)
    completion = text + frames
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
        completion_tokens_details=CompletionDetails(text_tokens=text, audio_tokens=frames),
    )


async def send_whole(answers: Sequence[ChatAnswer]) -> None:
    completed = await run_all([answer.complete() for answer in answers])
    first = answers[0]
    end = completed[0][1]
    await first.exchange.reply(
        ChatResponse(
            id=first.id,
            created=first.created,
            model=first.model,
            choices=[choice for choice, _ in completed],
            usage=chat_usage([end.usage for _, end in completed]),
            stretto=report(end, first.exchange.request_log, bool(first.request.timeline)),
        )
    )


def logprobs_of(tokens: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    """In OpenAI's form, which does not list the token that ends the answer."""

    def letters(token: TokenLogprob) -> list[int] | None:
        return None if token.text_bytes is None else list(token.text_bytes)

    return ChoiceLogprobs(
        [
            ContentLogprob(
                t.token,
                t.logprob,
                letters(t),
                [TopLogprob(best.token, best.logprob, letters(best)) for best in t.top],
            )
            for t in tokens
            if t.text_bytes is not None
        ]
    )


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


async def stream_answers(answers: Sequence[ChatAnswer]) -> None:
    ends = await run_all([answer.stream() for answer in answers])
    first = answers[0]
    if first.includes_usage:
        await first.send([], usage=chat_usage([end.usage for end in ends]))
    await first.exchange.write(b"data: [DONE]\n\n", more=False)
