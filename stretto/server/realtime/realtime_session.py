"""A realtime session: what each event of a client does, and when the server answers by itself.

The connection's reader calls `handle` with one event after another, on the event loop. Responses
(`response_manager.py`) and transcriptions (`transcribe.py`) are tasks of their own. An error event
answers the event that caused it, and the session goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import replace

from msgspec import UNSET

from stretto.engine.protocol import EngineClient
from stretto.engine.session import INPUT_RATE
from stretto.engine.session import Item as EngineItem
from stretto.errors import Invalid
from stretto.server.openai.error_body import Refused, describe
from stretto.server.realtime import client_events as c
from stretto.server.realtime import server_events as s
from stretto.server.realtime.answer_log import AnswerRecorder
from stretto.server.realtime.audio_formats import seconds_of
from stretto.server.realtime.audio_input import SAMPLE_BYTES, AudioInput, Turn, to_ms
from stretto.server.realtime.client_events import EventError
from stretto.server.realtime.item_reader import ItemReader, at_place
from stretto.server.realtime.items import Conversation, Entry, duplicate_item, new_id
from stretto.server.realtime.options import Kind, SessionState
from stretto.server.realtime.partial_transcripts import PartialTranscripts
from stretto.server.realtime.response import SpeechEnd, clock
from stretto.server.realtime.response_manager import MAX_OUT_OF_BAND, ResponseManager
from stretto.server.realtime.send_queue import SendQueue
from stretto.server.realtime.session_memory import SessionMemory
from stretto.server.realtime.tools import ToolReader
from stretto.server.realtime.transcribe import (
    Transcriber,
    TranscriptionOptions,
    TranscriptionTask,
    check_transcribes,
)
from stretto.server.realtime.turn_detection import Signal
from stretto.server.request_log import RequestLog, server_fault
from stretto.server.service import Service
from stretto.server.shares import Holding

log = logging.getLogger("stretto.realtime")

MIN_COMMIT = INPUT_RATE // 10  # samples: 100 ms
MAX_APPEND = 15 << 20  # bytes of one event
MAX_MS = 1 << 32
MAX_EVENT_ID = 512  # characters


class RealtimeSession:
    def __init__(
        self,
        service: Service,
        engine: EngineClient,
        send_queue: SendQueue,
        request_log: RequestLog,
        model: str,
        kind: Kind = "realtime",
    ) -> None:
        expires = int(time.time() + service.config.realtime_minutes * 60)
        state = SessionState.default(engine.info, kind, new_id("sess"), model, expires)
        request_log.realtime_session = state.id
        session = engine.session(owner=request_log.owner, client=request_log.client)
        self.service = service
        self.engine = engine
        self.engine_session = session
        self.send_queue = send_queue
        self.client = request_log.client  # the API key or address whose share it uses
        self.state = state
        self.recorder = AnswerRecorder(service.metrics, request_log, service.tracer)
        self.conversation = Conversation(session)
        self.audio_input = AudioInput(
            session, service.sessions.batcher, state.turns, state.input_format
        )
        self.memory = SessionMemory(
            Holding(service.sessions.memory, self.client),
            service.config.realtime_held_bytes,
            self.conversation,
            self.audio_input,
            state.answers.num_bytes,
        )
        self.responses = ResponseManager(
            service,
            engine,
            session,
            send_queue,
            self.client,
            self.conversation,
            self.audio_input,
            self.recorder,
            self.memory,
            state.answers,
        )
        self.tool_reader = ToolReader(service.turns)
        self.item_reader = ItemReader(service, session, self.conversation, self.client, self.memory)
        self.transcriber = Transcriber(
            session, send_queue, self.responses, self.recorder, self.memory
        )
        self.partials = PartialTranscripts(
            session, send_queue, service.metrics.realtime.partial_transcripts
        )
        self._item_id = ""  # of the turn that is being spoken
        # when the client ended a turn that was not answered yet
        self._committed: SpeechEnd | None = None
        self._transcribed: str | None = None  # the last item that was no part of a conversation
        self._closed = False
        self._expect()

    async def begin_with(self, fields: c.SessionFields) -> None:
        """Apply the settings of a client secret, before the session is open."""
        try:
            await self._update(fields)
        except EventError as e:
            raise Refused(429, str(e), kind="rate_limit_error", code=e.code) from None
        self.memory.recount()

    @property
    def busy(self) -> bool:
        """An answer is being made."""
        return self.responses.busy

    @property
    def transcribes(self) -> bool:
        """The session transcribes, and answers nothing."""
        return self.state.kind == "transcription"

    def greet(self, beta: bool = False) -> None:
        if beta and self.transcribes:
            self.send_queue.put(s.TranscriptionSessionCreated(session=self.state.to_beta()))
        else:
            self.send_queue.put(s.SessionCreated(session=self.state.to_wire()))

    async def close(self) -> None:
        """End all that runs, and the engine's session. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.partials.end()
            await asyncio.gather(self.responses.close(), self.transcriber.close())
            await self.engine_session.close()
        finally:
            self.memory.close()

    # -- events of the client

    async def handle(self, event: c.Event) -> None:
        try:
            await self._handle(event)
        except EventError as e:
            self.error(e.code, str(e), e.param, event.event_id)
        except Invalid as e:
            self.error("invalid_value", str(e), e.param, event.event_id)
        except Exception as e:  # noqa: BLE001 - the session's boundary: one event must not end it
            _, failure = describe(e)
            if fault := server_fault(e):
                log.warning("%s: an event failed: %s", self.state.id, fault)
            kind = failure.error.type
            self.error(
                failure.error.code or "server_error",
                failure.error.message,
                None,
                event.event_id,
                kind,
            )
        finally:
            self.memory.recount()

    def error(
        self,
        code: str,
        message: str,
        param: str | None = None,
        event_id: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        self.service.metrics.realtime.errors.labels(code).inc()
        if event_id is not None and len(event_id) > MAX_EVENT_ID:
            event_id = None
        info = s.ErrorInfo(kind, message[:2000], code, param, event_id)
        self.send_queue.put(s.Error(error=info))

    async def _handle(self, event: c.Event) -> None:
        if self.transcribes and isinstance(event, c.ItemCreate | c.ResponseCreate):
            raise EventError(
                "invalid_event", "a transcription session has no conversation and no responses"
            )
        if not isinstance(event, c.Append | c.ItemRetrieve | c.ResponseCancel | c.OutputClear):
            await self.responses.cancel_speculative()  # it was begun without this event
        match event:
            case c.Append():
                await self._append(event.audio)
            case c.Commit():
                await self._commit_by_client()
            case c.Clear():
                await self.partials.end()
                await self.audio_input.clear()
                self.send_queue.put(s.Cleared())
            case c.SessionUpdate():
                before = self.state
                await self._update(event.session)
                self.send_queue.put(s.SessionUpdated(session=self.state.to_wire(before=before)))
            case c.TranscriptionUpdate():
                await self._update(event.session.session())
                self.send_queue.put(s.TranscriptionSessionUpdated(session=self.state.to_beta()))
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
                    raise EventError(
                        "response_cancel_not_active",
                        "Cancellation failed: no active response found",
                    )
            case c.OutputClear():
                pass  # there is no buffer of output here

    async def _update(self, fields: c.SessionFields) -> None:
        tools = await self.tool_reader.read(fields)
        state = self._of_kind(fields).updated(fields, self.engine.info, tools)
        self.memory.resize_settings(state.answers.num_bytes)
        if self.responses.voice_locked:
            state = replace(state, answers=replace(state.answers, voice=self.state.answers.voice))
        self.state = state
        self._expect()
        self.responses.configure(state.answers)
        self.audio_input.configure(state.turns, state.input_format)

    def _of_kind(self, fields: c.SessionFields) -> SessionState:
        """The session as it is, or as one that transcribes from now on."""
        if fields.type in (UNSET, None, self.state.kind):
            return self.state
        if self.transcribes:
            raise Invalid("a transcription session stays one", "session.type")
        check_transcribes(self.engine.info)
        if self.conversation.entries or self.engine_session.pending or self.busy:
            raise Invalid(
                "only a session without a conversation can become one for transcription",
                "session.type",
            )
        return replace(
            self.state,
            kind="transcription",
            transcription=self.state.transcription or c.Transcription(),
        )

    def _expect(self) -> None:
        """Tell the engine how the next prompt begins, so that it prefills sound behind that."""
        answers = self.state.answers
        if self.transcribes:
            self.engine_session.expect(modalities=("text",))
        else:
            self.engine_session.expect(
                modalities=("text", "audio") if answers.has_audio else ("text",),
                instructions=answers.instructions or None,
                tools=answers.chat_tools(),
            )

    # -- sound

    async def _append(self, data: bytes) -> None:
        if len(data) > MAX_APPEND:
            raise Invalid(f"one event holds at most {MAX_APPEND >> 20} MiB of sound", "audio")
        coming = int(seconds_of(data, self.state.input_format) * INPUT_RATE) * SAMPLE_BYTES
        self.memory.reserve(coming, "input_audio_buffer_full", "audio")
        async with aclosing(self.audio_input.append(data)) as signals:
            async for signal in signals:
                await self._on_signal(signal)
        if self.transcribes:
            if self.state.turns is None and self.partials.item_id is None:
                self.partials.begin(new_id("item"), self._transcription_options())
            self.partials.wake()
        else:
            await self._check_idle()

    async def _on_signal(self, signal: Signal) -> None:
        turn = self.audio_input.turn
        turns = self.state.turns
        assert turn is not None
        assert turns is not None
        match signal:
            case Signal.STARTED:
                self._item_id = new_id("item")
                self.send_queue.put(
                    s.SpeechStarted(audio_start_ms=turn.start_ms, item_id=self._item_id)
                )
                if self.transcribes:
                    self.partials.begin(self._item_id, self._transcription_options())
                elif turns.interrupt_response:
                    await self.responses.interrupt("turn_detected")
            case Signal.PAUSED:
                if (
                    self.service.config.realtime_speculate
                    and turns.create_response
                    and not self.transcribes
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
        if self.transcribes:
            await self._transcribe_alone(self._item_id, turn.stop - turn.start)
            return
        speculative = await self.responses.speculative_turn()
        item = speculative or await self.engine_session.commit(self._item_id)
        seconds = (turn.stop - turn.start) / INPUT_RATE
        entry = self._add_audio_item(self._item_id, item, seconds)
        if speculative is not None:
            self.responses.confirm_speculative(end)
        elif turns.create_response:
            self.responses.answer_turn(end)
        self._transcribe(entry, item, seconds)

    def _transcription_options(self) -> TranscriptionOptions:
        settings = self.state.transcription or c.Transcription()
        return TranscriptionOptions(self.engine.info, settings, self.state.logprobs)

    def _transcribe(self, entry: Entry, item: EngineItem, seconds: float) -> None:
        if self.state.transcription is not None:
            options = self._transcription_options()
            self.transcriber.begin(TranscriptionTask(options, entry, item, seconds, True))

    async def _transcribe_alone(self, id: str, samples: int) -> None:
        """A turn is over in a session without a conversation, so the engine need not keep it."""
        sent = await self.partials.end()
        item = await self.engine_session.commit(id)
        await self.engine_session.remove(id)
        previous = self._transcribed
        self._transcribed = id
        entry = self._send_audio_item(id, previous)
        options = self._transcription_options()
        seconds = samples / INPUT_RATE
        self.transcriber.begin(TranscriptionTask(options, entry, item, seconds, False, sent))

    def _add_audio_item(self, id: str, engine_item: EngineItem, seconds: float) -> Entry:
        """A turn becomes part of the conversation; the engine's session has its item already."""
        entry = self._send_audio_item(id, self.conversation.last_id)
        entry.engine_id = engine_item.id
        entry.size = int(seconds * INPUT_RATE) * SAMPLE_BYTES
        self.conversation.append(entry)
        return entry

    def _send_audio_item(self, id: str, previous: str | None) -> Entry:
        content = [s.Part("input_audio", transcript=None)]
        item = s.Item(id, "message", status="completed", role="user", content=content)
        self.send_queue.put(s.Committed(previous_item_id=previous, item_id=id))
        self.send_queue.put(s.ItemAdded(previous_item_id=previous, item=item))
        self.send_queue.put(s.ItemDone(previous_item_id=previous, item=item))
        return Entry(item)

    async def _commit_by_client(self) -> None:
        id = self._item_id if self.audio_input.turn is not None else new_id("item")
        id = self.partials.item_id or id
        await self.audio_input.finish()
        samples = self.engine_session.pending
        if samples < MIN_COMMIT:
            ms = to_ms(samples)
            raise EventError(
                "input_audio_buffer_commit_empty",
                f"Error committing input audio buffer: buffer too small. Expected at least 100ms "
                f"of audio, but buffer "
                f"only has {ms}ms of audio.",
            )
        if self.transcribes:
            await self._transcribe_alone(id, samples)
            return
        item = await self.engine_session.commit(id)
        self._committed = SpeechEnd(clock())
        entry = self._add_audio_item(id, item, samples / INPUT_RATE)
        self._transcribe(entry, item, samples / INPUT_RATE)

    async def _check_idle(self) -> None:
        """Answer, although the user has not spoken for `idle_timeout_ms`."""
        turns = self.state.turns
        start = self.audio_input.idle_from
        if turns is None or turns.idle_timeout_ms is None or start is None:
            return
        if self.audio_input.turn is not None or self.busy:
            return
        stop = self.audio_input.position
        if to_ms(stop - start) < turns.idle_timeout_ms:
            return
        self.audio_input.end_idle()
        id = new_id("item")
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
                raise duplicate_item(f"the item {event.item.id!r} is being spoken")
            async with self.item_reader.conversion(event.item):
                entry, message = await self.item_reader.read(event.item, self.state.input_format)
                self.memory.reserve(entry.size, "conversation_full", "item")
                await self.conversation.insert(entry, message, event.previous_item_id)
            try:
                # again, now that its pictures are decoded
                self.memory.reserve(0, "conversation_full", "item")
            except EventError:
                await self.conversation.delete(entry)
                raise
        except Invalid as e:
            raise at_place(e, "item") from None
        previous = self.conversation.before(entry)
        self.send_queue.put(s.ItemAdded(previous_item_id=previous, item=entry.item))
        self.send_queue.put(s.ItemDone(previous_item_id=previous, item=entry.item))

    def _find(self, id: str, what: str) -> Entry:
        entry = self.conversation.find(id)
        if entry is None:
            message = f"there is no item {id[:128]!r}"
            raise EventError(f"item_{what}_invalid_item_id", message, "item_id")
        return entry

    async def _truncate(self, event: c.ItemTruncate) -> None:
        entry = self._find(event.item_id, "truncate")
        played = min(max(0, event.audio_end_ms), MAX_MS) / 1000
        if entry.speech is not None:
            played = min(played, entry.speech.seconds)
            await self.conversation.truncate(entry, played)
        elif (active := self.responses.active) is not None and entry in active.writer.entries:
            # it is still being written; some clients truncate, then cancel
            active.cut(entry.id, played)
        ms = round(played * 1000)
        self.send_queue.put(
            s.ItemTruncated(item_id=entry.id, content_index=event.content_index, audio_end_ms=ms)
        )

    async def _delete(self, id: str) -> None:
        entry = self._find(id, "delete")
        self.transcriber.cancel(id)
        await self.conversation.delete(entry)
        self.send_queue.put(s.ItemDeleted(item_id=id))

    # -- responses

    async def _create_response(self, fields: c.ResponseFields | None) -> None:
        fields = fields or c.ResponseFields()
        options = self.state.answers.updated(
            fields, self.engine.info, await self.tool_reader.read(fields)
        )
        options.check_choice()
        self.memory.reserve(options.num_bytes, "conversation_full", "response")
        items = None
        size = 0
        if isinstance(fields.input, list):
            items, size = await self.item_reader.read_input(
                fields.input, options.num_bytes, self.state.input_format
            )
        out_of_band = fields.conversation == "none"
        if (active := self.responses.active) is not None and not out_of_band:
            message = f"Conversation already has an active response in progress: {active.id}"
            raise EventError("conversation_already_has_active_response", message)
        if out_of_band and len(self.responses.out_of_band) >= MAX_OUT_OF_BAND:
            raise EventError(
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
        speech_end = self._committed
        self._committed = None
        if out_of_band:
            self.responses.start_out_of_band(response, speech_end)
        else:
            self.responses.start_response(response, speech_end)
