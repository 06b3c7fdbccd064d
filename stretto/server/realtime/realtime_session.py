"""A realtime session: what each event of a client means, and when the server speaks by itself.
Asyncio.

The connection's reader calls `handle` with one event after another. Responses
(`response_manager.py`) and transcriptions (`transcribe.py`) are tasks of their own; on the event
loop, between two awaits, nobody else changes anything. An error answers the event that caused it,
and the session goes on."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace

from stretto.engine.events import Message
from stretto.engine.protocol import EngineClient
from stretto.engine.session import INPUT_RATE, Session
from stretto.engine.session import Item as EngineItem
from stretto.errors import Invalid
from stretto.server.openai.error_body import describe
from stretto.server.realtime import client_events as c
from stretto.server.realtime import server_events as s
from stretto.server.realtime.audio_formats import seconds_of
from stretto.server.realtime.audio_input import SAMPLE_BYTES, AudioInput, Turn, to_ms
from stretto.server.realtime.items import (
    Conversation,
    DuplicateItem,
    Entry,
    NoSuchItem,
    media_bytes,
    new_id,
    read_item,
)
from stretto.server.realtime.options import Function, Options, SessionState, read_tool, split_tools
from stretto.server.realtime.response import ResponseTask, SpeechEnd, clock
from stretto.server.realtime.response_manager import MAX_OUT_OF_BAND, ResponseManager
from stretto.server.realtime.send_queue import SendQueue
from stretto.server.realtime.transcribe import Transcriber
from stretto.server.realtime.turn_detection import Signal
from stretto.server.request_log import RequestLog
from stretto.server.service import Service
from stretto.server.shares import Holding

log = logging.getLogger("stretto.realtime")

MIN_COMMIT = INPUT_RATE // 10  # samples: 100 ms
THREAD_BYTES = 64 << 10
# of an item, that are converted on the event loop: each has a resampler of its own
MAX_INLINE_SOUNDS = 4
TOOLS_AT_ONCE = 16 << 10  # bytes of tools that are read before others have a turn
MAX_APPEND = 15 << 20  # bytes of one event
MAX_MS = 1 << 32


class Problem(Exception):
    """What a client is told in an `error` event."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(slots=True, eq=False)
class RealtimeSession:
    service: Service
    engine: EngineClient
    engine_session: Session
    send_queue: SendQueue
    sender: str  # whose share of the server it uses
    state: SessionState
    held: Holding = field(init=False)  # of the memory of all sessions
    conversation: Conversation = field(init=False)
    audio_input: AudioInput = field(init=False)
    responses: ResponseManager = field(init=False)
    transcriber: Transcriber = field(init=False)
    _item_id: str = ""  # of the turn that is being spoken
    _committed: SpeechEnd | None = None  # when the client ended a turn that was not answered yet
    _closed: bool = False
    _tools_read: tuple[bytes, tuple[Function, ...]] = (
        b"",
        (),
    )  # the last ones that were read, by their digest
    _idle_from: int | None = None  # position in the sound at which waiting for the user began

    def __post_init__(self) -> None:
        self.held = Holding(self.service.sessions.memory, self.sender)
        self.conversation = Conversation(self.engine_session)
        self.audio_input = AudioInput(
            self.engine_session,
            self.service.sessions.batcher,
            self.state.turns,
            self.state.input_format,
        )
        self.responses = ResponseManager(
            self.service, self.engine, self.engine_session, self.send_queue, self.sender,
            self.conversation, options=lambda: self.state.answers,
            on_begin=self._on_response_begin, on_end=self._on_response_end,
            on_release=self._count_memory,
        )  # fmt: skip
        count = self.service.metrics.realtime.transcriptions
        self.transcriber = Transcriber(
            self.engine_session, self.engine.info.transcription, self.send_queue.put,
            lambda: self.responses.audio_started, count,
        )  # fmt: skip

    @classmethod
    def open(
        cls,
        service: Service,
        engine: EngineClient,
        send_queue: SendQueue,
        request_log: RequestLog,
        model: str,
    ) -> RealtimeSession:
        expires = int(time.time() + service.config.realtime_minutes * 60)
        state = SessionState(new_id("sess"), model, expires, Options(engine.info.default_voice))
        engine_session = engine.session(owner=request_log.owner, sender=request_log.sender)
        return cls(service, engine, engine_session, send_queue, request_log.sender, state)

    @property
    def busy(self) -> bool:
        """Something is being said, or is about to be."""
        return self.responses.busy

    def greet(self) -> None:
        self.send_queue.put(s.SessionCreated(session=self.state.to_wire()))

    async def close(self) -> None:
        """End all that runs. The engine's session goes too. Once is enough, twice does no harm."""
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.gather(self.responses.close(), self.transcriber.close())
            await self.engine_session.close()
        finally:
            self.held.close()

    # -- events of the client

    async def handle(self, event: c.Event) -> None:
        try:
            await self._handle(event)
        except Problem as e:
            self.error(e.code, str(e), e.param, event.event_id)
        except Invalid as e:
            self.error("invalid_value", str(e), e.param, event.event_id)
        except Exception as e:  # noqa: BLE001 - the session's boundary: one event must not end it
            _, failure = describe(e)
            kind = failure.error.type
            self.error(
                failure.error.code or "server_error",
                failure.error.message,
                None,
                event.event_id,
                kind,
            )
        finally:
            self._count_memory()

    def error(
        self,
        code: str,
        message: str,
        param: str | None = None,
        event_id: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        self.service.metrics.realtime.errors.labels(code).inc()
        named = event_id if event_id is not None and len(event_id) <= 512 else None
        self.send_queue.put(s.Error(error=s.ErrorInfo(kind, message[:2000], code, param, named)))

    async def _handle(self, event: c.Event) -> None:
        if not isinstance(event, c.Append | c.ItemRetrieve | c.ResponseCancel | c.OutputClear):
            await self.responses.cancel_speculative()  # it was made without knowing of this
        match event:
            case c.Append():
                await self._append(event.audio)
            case c.Commit():
                await self._commit_by_client()
            case c.Clear():
                await self.audio_input.clear()
                self.send_queue.put(s.Cleared())
            case c.SessionUpdate():
                await self._update(event.session)
            case c.ItemCreate():
                await self._create_item(event)
            case c.ItemTruncate():
                await self._truncate(event)
            case c.ItemDelete():
                await self._delete(event.item_id)
            case c.ItemRetrieve():
                self.send_queue.put(
                    s.ItemRetrieved(item=self._find(event.item_id, "retrieve").item)
                )
            case c.ResponseCreate():
                await self._create_response(event.response)
            case c.ResponseCancel():
                if not await self.responses.cancel(event.response_id):
                    raise Problem(
                        "response_cancel_not_active",
                        "Cancellation failed: no active response found",
                    )
            case c.OutputClear():
                pass  # there is no buffer of output here

    async def _update(self, fields: c.SessionFields) -> None:
        tools = await self._read_tools(fields)
        state = self.state.updated(fields, self.engine.info, tools)
        more = max(0, state.answers.num_bytes - self.state.answers.num_bytes)
        self._reserve(more, "session_full", "session")
        if self.responses.voice_locked:
            state = replace(state, answers=replace(state.answers, voice=self.state.answers.voice))
        before = self.state
        self.state = state
        answers = state.answers
        # so that sound is read ahead behind the same words as the answer's prompt begins with
        self.engine_session.expect(
            modalities=("text", "audio") if answers.has_audio else ("text",),
            instructions=answers.instructions or None,
            tools=answers.chat_tools(),
        )
        self.audio_input.configure(state.turns, state.input_format)
        self.send_queue.put(s.SessionUpdated(session=state.to_wire(before=before)))

    async def _read_tools(self, fields: c.Common) -> tuple[Function, ...] | None:
        """The tools of an update, in turns of the event loop; those of the update before, if they
        are the same."""
        if bytes(fields.tools) in (b"", b"null"):
            return None
        digest = hashlib.blake2b(fields.tools).digest()
        if digest != self._tools_read[0]:
            tools = []
            size = 0
            for part in split_tools(fields.tools):
                size += len(memoryview(part))
                if size > TOOLS_AT_ONCE:
                    await self.service.turns.take()
                    size = len(memoryview(part))
                if (tool := read_tool(part)) is not None:
                    tools.append(tool)
            self._tools_read = digest, tuple(tools)
        return self._tools_read[1]

    # -- sound

    async def _append(self, data: bytes) -> None:
        if len(data) > MAX_APPEND:
            raise Invalid(f"one event holds at most {MAX_APPEND >> 20} MiB of sound", "audio")
        coming = int(seconds_of(data, self.state.input_format) * INPUT_RATE) * SAMPLE_BYTES
        self._reserve(coming, "input_audio_buffer_full", "audio")
        await self.audio_input.append(data, self._on_signal)
        await self._check_idle()

    async def _on_signal(self, signal: Signal) -> None:
        turn = self.audio_input.turn
        turns = self.state.turns
        assert turn is not None
        assert turns is not None
        match signal:
            case Signal.STARTED:
                self._item_id = new_id("item")
                self._idle_from = None
                self.send_queue.put(
                    s.SpeechStarted(audio_start_ms=turn.start_ms, item_id=self._item_id)
                )
                if turns.interrupt_response:
                    await self.responses.interrupt("turn_detected")
            case Signal.PAUSED:
                if (
                    self.service.config.realtime_speculate
                    and turns.create_response
                    and not self.busy
                ):
                    await self.responses.start_speculative(self._item_id)
            case Signal.RESUMED:
                await self.responses.cancel_speculative()
            case Signal.STOPPED:
                await self._stopped(turn)

    async def _stopped(self, turn: Turn) -> None:
        turns = self.state.turns
        assert turns is not None
        wait = self.audio_input.silence_s
        end = SpeechEnd(clock() - wait, wait)
        self.send_queue.put(
            s.SpeechStopped(audio_end_ms=turn.stop_ms, item_id=self._item_id, vad_wait_s=wait)
        )
        speculative_item = await self.responses.speculative_item()
        item = (
            speculative_item
            if speculative_item is not None
            else await self.engine_session.commit(self._item_id)
        )
        seconds = (turn.stop - turn.start) / INPUT_RATE
        entry = self._add_audio_item(self._item_id, item, seconds)
        if speculative_item is not None:
            self.responses.confirm_speculative(end)
        elif turns.create_response:
            self.responses.answer_turn(end)
        self._transcribe(entry, item, seconds)

    def _transcribe(self, entry: Entry, item: EngineItem, seconds: float) -> None:
        self.transcriber.begin(self.state.transcription, entry, item, seconds, self.state.logprobs)

    def _add_audio_item(self, id: str, engine_item: EngineItem, seconds: float) -> Entry:
        """What was said is part of the conversation: the engine's item is there already."""
        previous = self.conversation.last_id
        item = s.Item(
            id,
            "message",
            status="completed",
            role="user",
            content=[s.Part("input_audio", transcript=None)],
        )
        entry = Entry(item, engine_item.id, size=int(seconds * INPUT_RATE) * SAMPLE_BYTES)
        self.conversation.append(entry)
        self.send_queue.put(s.Committed(previous_item_id=previous, item_id=id))
        self.send_queue.put(s.ItemAdded(previous_item_id=previous, item=item))
        self.send_queue.put(s.ItemDone(previous_item_id=previous, item=item))
        return entry

    async def _commit_by_client(self) -> None:
        id = self._item_id if self.audio_input.turn is not None else new_id("item")
        await self.audio_input.finish()
        samples = self.engine_session.pending
        if samples < MIN_COMMIT:
            ms = to_ms(samples)
            raise Problem(
                "input_audio_buffer_commit_empty",
                f"Error committing input audio buffer: buffer too small. Expected at least 100ms "
                f"of audio, but buffer "
                f"only has {ms}ms of audio.",
            )
        item = await self.engine_session.commit(id)
        self._committed = SpeechEnd(clock())
        entry = self._add_audio_item(id, item, samples / INPUT_RATE)
        self._transcribe(entry, item, samples / INPUT_RATE)

    async def _check_idle(self) -> None:
        """Nobody has said anything for long: the model is asked to."""
        turns = self.state.turns
        if (
            turns is None
            or turns.idle_timeout_ms is None
            or self.audio_input.turn is not None
            or self.busy
        ):
            return
        if (
            self._idle_from is None
            or to_ms(self.audio_input.position - self._idle_from) < turns.idle_timeout_ms
        ):
            return
        start = self._idle_from
        self._idle_from = None
        id = new_id("item")
        stop = self.audio_input.position
        self.send_queue.put(
            s.TimeoutTriggered(audio_start_ms=to_ms(start), audio_end_ms=to_ms(stop), item_id=id)
        )
        await self.audio_input.finish()
        if self.engine_session.pending:
            samples = self.engine_session.pending
            self._add_audio_item(id, await self.engine_session.commit(id), samples / INPUT_RATE)
        self.responses.answer_turn(None)

    # -- items

    async def _create_item(self, event: c.ItemCreate) -> None:
        try:
            self.conversation.check_new(event.item.id)
            if self.audio_input.turn is not None and event.item.id == self._item_id:
                raise DuplicateItem(f"the item {event.item.id!r} is being spoken", "item.id")
            async with self._conversion(event.item):
                entry, message = await self._read(event.item)
                self._reserve(entry.size, "conversation_full", "item")
                await self.conversation.insert(entry, message, event.previous_item_id)
            try:
                self._reserve(0, "conversation_full", "item")  # now that its pictures are decoded
            except Problem:
                await self.conversation.delete(entry.id)
                raise
        except DuplicateItem as e:
            raise Problem("item_create_duplicate_item_id", str(e), e.param) from None
        except NoSuchItem as e:
            raise Problem("item_create_invalid_previous_item_id", str(e), e.param) from None
        except Invalid as e:
            raise _named(e, "item") from None
        previous = self.conversation.before(entry)
        self.send_queue.put(s.ItemAdded(previous_item_id=previous, item=entry.item))
        self.send_queue.put(s.ItemDone(previous_item_id=previous, item=entry.item))

    async def _read(self, fields: c.Item) -> tuple[Entry, Message | None]:
        if _has_many_sounds(fields):
            return await asyncio.to_thread(read_item, fields, self.state.input_format)
        return read_item(fields, self.state.input_format)

    def _conversion(self, fields: c.Item) -> AbstractAsyncContextManager[None]:
        """A turn for what is done with an item's sounds in threads. Pictures are decoded in other
        processes, which have turns of their own."""
        pictures = any(p.image_url for p in fields.content or ())
        if pictures or not _has_many_sounds(fields):
            return nullcontext()
        return self.service.thread_turns.turn(self.sender)

    @property
    def _size(self) -> int:
        """Bytes that it holds, about. What waits to be sent counts by itself."""
        settings = self.state.answers.num_bytes + self.responses.held_bytes
        return self.audio_input.held_bytes + self.conversation.size + settings

    def _count_memory(self) -> None:
        if not self._closed:
            self.held.resize(self._size)

    def _reserve(self, coming: int, code: str, param: str) -> None:
        """For so many bytes more, within what one session and the sessions of its sender may
        hold."""
        size = self._size + coming
        most = self.service.config.realtime_held_bytes
        if size > most:
            raise Problem(code, f"a session holds at most {most >> 20} MiB", param)
        if not self.held.fits(size):
            raise Problem(
                code,
                "your sessions hold all that they may of the server's memory for sessions",
                param,
            )
        self.held.resize(size)

    def _find(self, id: str, what: str) -> Entry:
        try:
            return self.conversation.find(id)
        except NoSuchItem as e:
            raise Problem(f"item_{what}_invalid_item_id", str(e), e.param) from None

    async def _truncate(self, event: c.ItemTruncate) -> None:
        entry = self._find(event.item_id, "truncate")
        played = min(max(0, event.audio_end_ms), MAX_MS) / 1000
        if entry.speech is not None:
            played = min(played, entry.speech.seconds)
            await self.conversation.truncate(entry, played)
        elif (active := self.responses.active) is not None and entry in active.writer.entries:
            # it is still being said; some clients truncate, then cancel
            active.cuts[entry.id] = played
        ms = round(played * 1000)
        self.send_queue.put(
            s.ItemTruncated(item_id=entry.id, content_index=event.content_index, audio_end_ms=ms)
        )

    async def _delete(self, id: str) -> None:
        self._find(id, "delete")
        self.transcriber.cancel(id)
        await self.conversation.delete(id)
        self.send_queue.put(s.ItemDeleted(item_id=id))

    # -- responses

    async def _create_response(self, stated: c.ResponseFields | None) -> None:
        fields = stated or c.ResponseFields()
        options = self.state.answers.updated(
            fields, self.engine.info, await self._read_tools(fields)
        )
        options.check_choice()
        self._reserve(options.num_bytes, "conversation_full", "response")
        items = None
        size = 0
        if isinstance(fields.input, list):
            items, size = await self._input(fields.input, options.num_bytes)
        out_of_band = fields.conversation == "none"
        if (active := self.responses.active) is not None and not out_of_band:
            message = f"Conversation already has an active response in progress: {active.id}"
            raise Problem("conversation_already_has_active_response", message)
        if out_of_band and len(self.responses.out_of_band) >= MAX_OUT_OF_BAND:
            raise Problem(
                "rate_limit_exceeded",
                f"{MAX_OUT_OF_BAND} responses beside the conversation run already",
            )
        response = self.responses.make(
            options,
            out_of_band=out_of_band,
            metadata=fields.metadata,
            items=items,
            items_bytes=size,
        )
        response.speech_end = self._committed
        self._committed = None
        if out_of_band:
            self.responses.start_out_of_band(response)
        else:
            self.responses.start_response(response)

    async def _input(self, items: list[c.Item], beside: int) -> tuple[list[EngineItem], int]:
        """What is answered instead of the conversation, and its bytes, for which there is room with
        so many `beside` them."""
        size = 0
        out = []
        for number, fields in enumerate(items):
            if fields.type == "item_reference":
                entry = next((e for e in self.conversation.entries if e.id == fields.id), None)
                found = self.conversation.engine_item(entry) if entry is not None else None
                if found is None:
                    raise Invalid(f"there is no item {fields.id!r}", "response.input")
                out.append(found)
            else:
                place = f"response.input[{number}]"
                async with self._conversion(fields):
                    entry, message = await self._read(fields)
                    if message is None:
                        continue
                    self._reserve(beside + size + entry.size, "conversation_full", place)
                    try:
                        item = await self.engine_session.item(message, id=entry.id)
                    except Invalid as e:
                        raise _named(e, place) from None
                size += max(entry.size, entry.text_size + media_bytes(item.message))
                self._reserve(beside + size, "conversation_full", place)
                out.append(item)
        return out, size

    # -- what the speaker tells

    def _on_response_begin(self) -> None:
        self._idle_from = None

    def _on_response_end(self, response: ResponseTask) -> None:
        """Waiting for the user begins when all of it was heard."""
        self._idle_from = self.audio_input.position + int(response.playback.lead * INPUT_RATE)


def _has_many_sounds(fields: c.Item) -> bool:
    sizes = [len(p.audio) for p in fields.content or () if p.audio]
    return sum(sizes) > THREAD_BYTES or len(sizes) > MAX_INLINE_SOUNDS


def _named(error: Invalid, place: str) -> Invalid:
    """The same error with the item's place in the event, where the engine names a message."""
    message, param = (
        said and said.replace("messages[0]", place, 1) for said in (str(error), error.param)
    )
    return Invalid(message or "", param)
