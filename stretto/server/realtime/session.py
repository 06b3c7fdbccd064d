"""A realtime session: what each event of a client means, and when the server speaks by itself. Asyncio.

The connection's reader calls `handle` with one event after another. A response and each transcription are tasks beside
it; on the event loop, between two awaits, nobody else changes anything. An error answers the event that caused it, and
the session goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from stretto.errors import Invalid
from stretto.orchestrator.api import Engine, Message
from stretto.orchestrator.session import INPUT_RATE, Session
from stretto.orchestrator.session import Item as EngineItem
from stretto.server.failures import describe
from stretto.server.realtime import clientevents as c
from stretto.server.realtime import serverevents as s
from stretto.server.realtime.items import Conversation, DuplicateItem, Entry, NoSuchItem, new_id, read_item
from stretto.server.realtime.listener import SAMPLE_BYTES, Listener, Turn, to_ms
from stretto.server.realtime.options import Options, SessionState
from stretto.server.realtime.outbox import Outbox
from stretto.server.realtime.response import Reason, Response, SpeechEnd, clock
from stretto.server.realtime.sound import seconds_of
from stretto.server.realtime.transcribe import after_first_sound, transcribe
from stretto.server.realtime.turns import Signal
from stretto.server.realtime.writer import Writer
from stretto.server.service import Service
from stretto.server.tools import ToolParser

log = logging.getLogger("stretto.realtime")

MIN_COMMIT = INPUT_RATE // 10  # samples: 100 ms
MAX_SIDE_RESPONSES = 4  # beside the conversation, at once
MAX_TRANSCRIPTIONS = 8  # waiting or under way
GRACE_S = 0.25  # a client that ends its turns itself asks for the answer in a second message
IN_A_THREAD = 64 << 10
MAX_MS = 1 << 32


class Problem(Exception):
    """What a client is told in an `error` event."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(slots=True)
class Guess:
    """An answer that was begun at a pause, before the turn is surely over."""

    response: Response
    item_id: str
    item: EngineItem


@dataclass(slots=True, eq=False)
class RealtimeSession:
    service: Service
    engine: Engine
    talk: Session  # the engine's
    outbox: Outbox
    owner: str
    state: SessionState
    conversation: Conversation = field(init=False)
    listener: Listener = field(init=False)
    active: Response | None = None  # of the conversation; told to the client
    spoken: bool = False  # then the voice stays
    _guess: Guess | None = None
    _item_id: str = ""  # of the turn that is being spoken
    _committed: SpeechEnd | None = None  # when the client ended a turn that was not answered yet
    _closed: bool = False
    _answer_next: bool = False  # a turn ended while an answer was running
    _idle_from: int | None = None  # position in the sound at which waiting for the user began
    _side: set[Response] = field(default_factory=set)
    _transcriptions: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _conversation_id: str = field(default_factory=lambda: new_id("conv"))

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.talk)
        self.listener = Listener(self.talk, self.service.sessions.batcher, self.state.turns, self.state.input_format)

    @classmethod
    def open(cls, service: Service, engine: Engine, outbox: Outbox, owner: str, model: str) -> RealtimeSession:
        expires = int(time.time() + service.config.realtime_minutes * 60)
        state = SessionState(new_id("sess"), model, expires, Options(engine.info.default_voice))
        return cls(service, engine, engine.session(owner=owner), outbox, owner, state)

    @property
    def busy(self) -> bool:
        """Something is being said, or is about to be."""
        return self.active is not None or bool(self._side) or self._guess is not None

    def greet(self) -> None:
        self.outbox.put(s.SessionCreated(session=self.state.told()))

    async def close(self) -> None:
        """End all that runs. The engine's session goes too. Once is enough, twice does no harm."""
        if self._closed:
            return
        self._closed, self._answer_next = True, False
        guessed = [self._guess.response] if self._guess is not None else []
        running = [self.active] if self.active is not None else []
        for response in (*guessed, *running, *self._side):
            response.over = True
        tasks = {*self._tasks, *self._transcriptions.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.talk.close()

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
            self.error(failure.error.code or "server_error", failure.error.message, None, event.event_id, kind)

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
        self.outbox.put(s.Error(error=s.ErrorInfo(kind, message[:2000], code, param, named)))

    async def _handle(self, event: c.Event) -> None:
        if not isinstance(event, c.Append | c.ItemRetrieve | c.ResponseCancel | c.OutputClear):
            await self._drop_guess()  # it was made without knowing of this
        match event:
            case c.Append():
                await self._append(event.audio)
            case c.Commit():
                await self._commit_by_client()
            case c.Clear():
                await self.listener.clear()
                self.outbox.put(s.Cleared())
            case c.SessionUpdate():
                self._update(event.session)
            case c.ItemCreate():
                await self._create_item(event)
            case c.ItemTruncate():
                await self._truncate(event)
            case c.ItemDelete():
                await self._delete(event.item_id)
            case c.ItemRetrieve():
                self.outbox.put(s.ItemRetrieved(item=self._find(event.item_id, "retrieve").item))
            case c.ResponseCreate():
                await self._create_response(event.response)
            case c.ResponseCancel():
                await self._cancel_by_client(event.response_id)
            case c.OutputClear():
                pass  # there is no buffer of output here

    def _update(self, fields: c.SessionFields) -> None:
        state = self.state.updated(fields, self.engine.info)
        if self.spoken:
            state = replace(state, answers=replace(state.answers, voice=self.state.answers.voice))
        self.state = state
        answers = state.answers
        self.talk.expect(  # so that sound is read ahead behind the same words as the answer's prompt begins with
            modalities=("text", "audio") if answers.spoken else ("text",),
            instructions=answers.instructions or None,
            tools=answers.chat_tools(),
        )
        self.listener.configure(state.turns, state.input_format)
        self.outbox.put(s.SessionUpdated(session=state.told()))

    # -- sound

    async def _append(self, data: bytes) -> None:
        most = int(self.service.config.realtime_held_mb * (1 << 20))
        coming = int(seconds_of(data, self.state.input_format) * INPUT_RATE) * SAMPLE_BYTES
        if self.listener.held + self.conversation.size + coming > most:
            raise Problem("input_audio_buffer_full", f"a session holds at most {most >> 20} MiB of sound", "audio")
        await self.listener.hear(data, self._signal)
        await self._look_for_idle()

    async def _signal(self, signal: Signal) -> None:
        turn, turns = self.listener.turn, self.state.turns
        assert turn is not None
        assert turns is not None
        match signal:
            case Signal.STARTED:
                self._item_id, self._idle_from = new_id("item"), None
                self.outbox.put(s.SpeechStarted(audio_start_ms=turn.start_ms, item_id=self._item_id))
                if turns.interrupt_response:
                    await self._interrupt("turn_detected")
            case Signal.PAUSED:
                if self.service.config.realtime_speculate and turns.create_response and not self.busy:
                    await self._make_guess()
            case Signal.RESUMED:
                await self._drop_guess()
            case Signal.STOPPED:
                await self._stopped(turn)

    async def _stopped(self, turn: Turn) -> None:
        turns = self.state.turns
        assert turns is not None
        wait = self.listener.silence_s
        end = SpeechEnd(clock() - wait, wait)
        self.outbox.put(s.SpeechStopped(audio_end_ms=turn.stop_ms, item_id=self._item_id))
        if self._guess is not None and self._guess.response.error is not None:
            await self._drop_guess()  # it may work now
        guess, self._guess = self._guess, None
        item = guess.item if guess is not None else await self.talk.commit(self._item_id)
        entry = self._add_spoken(self._item_id, item, (turn.stop - turn.start) / INPUT_RATE)
        if guess is not None:
            self.service.metrics.realtime.speculations.labels("kept").inc()
            guess.response.speech_end = end
            self._activate(guess.response)
        elif turns.create_response:
            self._answer(end)
        self._transcribe(entry, item, (turn.stop - turn.start) / INPUT_RATE)

    def _add_spoken(self, id: str, item: EngineItem, seconds: float) -> Entry:
        """What was said is part of the conversation: the engine's item is there already."""
        previous = self.conversation.last_id
        told = s.Item(id, "message", status="completed", role="user", content=[s.Part("input_audio", transcript=None)])
        entry = Entry(told, item.id, size=int(seconds * INPUT_RATE) * SAMPLE_BYTES)
        self.conversation.entries.append(entry)
        self.conversation.size += entry.size
        self.outbox.put(s.Committed(previous_item_id=previous, item_id=id))
        self.outbox.put(s.ItemAdded(previous_item_id=previous, item=told))
        self.outbox.put(s.ItemDone(previous_item_id=previous, item=told))
        return entry

    async def _commit_by_client(self) -> None:
        id = self._item_id if self.listener.turn is not None else new_id("item")
        await self.listener.finish()
        samples = self.talk.pending
        if samples < MIN_COMMIT:
            ms = to_ms(samples)
            raise Problem(
                "input_audio_buffer_commit_empty",
                f"Error committing input audio buffer: buffer too small. Expected at least 100ms of audio, but buffer "
                f"only has {ms}ms of audio.",
            )
        item = await self.talk.commit(id)
        self._committed = SpeechEnd(clock())
        entry = self._add_spoken(id, item, samples / INPUT_RATE)
        self._transcribe(entry, item, samples / INPUT_RATE)

    async def _look_for_idle(self) -> None:
        """Nobody has said anything for long: the model is asked to."""
        turns = self.state.turns
        if turns is None or turns.idle_timeout_ms is None or self.listener.turn is not None or self.busy:
            return
        if self._idle_from is None or to_ms(self.listener.position - self._idle_from) < turns.idle_timeout_ms:
            return
        start, self._idle_from = self._idle_from, None
        id = new_id("item")
        stop = self.listener.position
        self.outbox.put(s.TimeoutTriggered(audio_start_ms=to_ms(start), audio_end_ms=to_ms(stop), item_id=id))
        await self.listener.finish()
        if self.talk.pending:
            samples = self.talk.pending
            self._add_spoken(id, await self.talk.commit(id), samples / INPUT_RATE)
        self._answer(None)

    # -- items

    async def _create_item(self, event: c.ItemCreate) -> None:
        try:
            self.conversation.check_new(event.item.id)
            item, message, size = await self._read(event.item)
            if self.listener.held + self.conversation.size + size > self.service.config.realtime_held_mb * (1 << 20):
                raise Problem("conversation_full", "the session holds as much as it may", "item")
            entry = Entry(item, size=size)
            await self.conversation.insert(entry, message, event.previous_item_id)
        except DuplicateItem as e:
            raise Problem("item_create_duplicate_item_id", str(e), e.param) from None
        except NoSuchItem as e:
            raise Problem("item_create_invalid_previous_item_id", str(e), e.param) from None
        previous = self.conversation.before(entry)
        self.outbox.put(s.ItemAdded(previous_item_id=previous, item=item))
        self.outbox.put(s.ItemDone(previous_item_id=previous, item=item))

    async def _read(self, given: c.Item) -> tuple[s.Item, Message | None, int]:
        if sum(len(p.audio or b"") for p in given.content or ()) > IN_A_THREAD:
            return await asyncio.to_thread(read_item, given, self.state.input_format)
        return read_item(given, self.state.input_format)

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
        elif self.active is not None and entry in self.active.writer.entries:
            self.active.cuts[entry.id] = played  # it is still being said; some clients truncate, then cancel
        ms = round(played * 1000)
        self.outbox.put(s.ItemTruncated(item_id=entry.id, content_index=event.content_index, audio_end_ms=ms))

    async def _delete(self, id: str) -> None:
        self._find(id, "delete")
        if (task := self._transcriptions.get(id)) is not None:
            task.cancel()
        await self.conversation.delete(id)
        self.outbox.put(s.ItemDeleted(item_id=id))

    # -- responses

    async def _create_response(self, fields: c.ResponseFields | None) -> None:
        fields = fields or c.ResponseFields()
        options = self.state.answers.updated(fields, self.engine.info)
        given = await self._input(fields.input) if isinstance(fields.input, list) else None
        beside = fields.conversation == "none"
        if self.active is not None and not beside:
            message = f"Conversation already has an active response in progress: {self.active.id}"
            raise Problem("conversation_already_has_active_response", message)
        if len(self._side) >= MAX_SIDE_RESPONSES:
            raise Problem("rate_limit_exceeded", f"{MAX_SIDE_RESPONSES} responses beside the conversation run already")
        response = self._make(options, beside=beside, metadata=fields.metadata, items=given)
        response.speech_end, self._committed = self._committed, None
        if beside:
            self._side.add(response)
            response.release()
        else:
            self._activate(response)
        self._begin(response)

    async def _input(self, items: list[c.Item]) -> list[EngineItem]:
        """What is answered instead of the conversation."""
        out = []
        for given in items:
            if given.type == "item_reference":
                entry = next((e for e in self.conversation.entries if e.id == given.id), None)
                found = self.conversation.engine_item(entry) if entry is not None else None
                if found is None:
                    raise Invalid(f"there is no item {given.id!r}", "response.input")
                out.append(found)
            else:
                item, message, _ = await self._read(given)
                if message is not None:
                    out.append(EngineItem(item.id, message))
        return out

    def _answer(self, speech_end: SpeechEnd | None) -> None:
        """Answer a turn that the server has found; when the answer that runs is over, if one does."""
        if self.active is not None:
            self._answer_next = True
            return
        response = self._make(self.state.answers)
        response.speech_end = speech_end
        self._activate(response)
        self._begin(response)

    def _make(
        self,
        options: Options,
        *,
        beside: bool = False,
        metadata: dict[str, str] | None = None,
        items: list[EngineItem] | None = None,
    ) -> Response:
        tools = options.chat_tools()
        config = self.service.config

        def start() -> Any:
            return self.talk.respond(
                modalities=("text", "audio") if options.spoken else ("text",),
                voice=options.voice if options.spoken else None,
                params=options.params(config.packets),
                tools=tools,
                instructions=options.instructions or None,
                items=items,
                remember=not beside,
            )

        conversation = None if beside else self.conversation
        writer = Writer(
            options, self.engine.info, self.outbox.put, conversation, self._conversation_id, metadata=metadata
        )
        return Response(
            writer=writer,
            start=start,
            outbox=self.outbox,
            admission=self.service.admission,
            owner=self.owner,
            lead=config.realtime_lead,
            parser=ToolParser() if tools else None,
        )

    def _activate(self, response: Response) -> None:
        """This is the conversation's response now, and the client hears of it."""
        self.active = response
        self._idle_from = None
        response.release()

    def _begin(self, response: Response) -> None:
        response.task = self._spawn(self._run(response), "response")

    async def _run(self, response: Response) -> None:
        try:
            await response.run()
        finally:
            self._count(response)
            self._side.discard(response)
            if self.active is response:
                self.active = None
                self._after(response)

    def _count(self, response: Response) -> None:
        metrics = self.service.metrics.realtime
        if response.status != "in_progress":
            metrics.responses.labels(response.status).inc()
        if (seconds := response.speech_to_audio) is not None:
            metrics.first_audio.observe(seconds)

    def _after(self, response: Response) -> None:
        """A response of the conversation is over."""
        self.spoken = self.spoken or response.playback.sent > 0
        self._idle_from = self.listener.position + int(response.playback.lead * INPUT_RATE)
        if self._answer_next and not self.service.draining:
            self._answer_next = False
            self._answer(None)

    async def _interrupt(self, reason: Reason) -> bool:
        """Stop what is being said, at once; whether anything was."""
        self._answer_next = False
        response = self.active
        if response is None or not response.cancel(reason):
            return False
        since = clock()
        self.active = None
        await response.ended()
        metrics = self.service.metrics.realtime
        metrics.cancel.observe(clock() - since)
        metrics.barge_in.labels("speech" if reason == "turn_detected" else "client").inc()
        self.spoken = self.spoken or response.playback.sent > 0
        await response.forget_unheard()
        return True

    async def _cancel_by_client(self, id: str | None) -> None:
        beside = next((r for r in self._side if r.id == id), None)
        if beside is not None:
            beside.cancel("client_cancelled")
            await beside.ended()
            self._side.discard(beside)
        elif (id is not None and (self.active is None or self.active.id != id)) or not await self._interrupt(
            "client_cancelled"
        ):
            raise Problem("response_cancel_not_active", "Cancellation failed: no active response found")

    # -- answers begun before the turn is surely over

    async def _make_guess(self) -> None:
        item = await self.talk.commit(self._item_id, maybe=True)
        response = self._make(self.state.answers)
        response.speculative = True
        self._guess = Guess(response, self._item_id, item)
        self._begin(response)

    async def _drop_guess(self) -> None:
        """The turn goes on: nobody hears of that answer, and the engine has the sound as if there had been none."""
        guess, self._guess = self._guess, None
        if guess is None:
            return
        self.service.metrics.realtime.speculations.labels("dropped").inc()
        guess.response.cancel("turn_detected")
        await guess.response.ended()
        for id in self.conversation.forgotten():
            if id != guess.item_id:  # what there was of its answer
                await self.talk.remove(id)
        await self.talk.reopen(guess.item_id)

    # -- words of what was said

    def _transcribe(self, entry: Entry, item: EngineItem, seconds: float) -> None:
        wanted = self.state.transcription
        if wanted is None:
            return
        if len(self._transcriptions) >= MAX_TRANSCRIPTIONS:
            told = s.ErrorInfo("server_error", "too many transcriptions are waiting", "server_busy")
            self.outbox.put(s.TranscriptionFailed(item_id=entry.id, content_index=0, error=told))
            return

        async def run() -> None:
            how = "cancelled"
            try:
                await after_first_sound(lambda: self.active.sounded if self.active else None, GRACE_S)
                fine = await transcribe(self.talk, wanted, entry, item, seconds, self.outbox.put)
                how = "completed" if fine else "failed"
            finally:
                self._transcriptions.pop(entry.id, None)
                self.service.metrics.realtime.transcriptions.labels(how).inc()

        self._transcriptions[entry.id] = asyncio.create_task(run(), name="transcription")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
