"""One response: the engine's events, held back or paced, become the client's. A task of its own on
the event loop, started and watched by `ResponseManager`.

Until it is released, the engine's events wait here: a speculative response, begun at a pause, may
turn out to be too early, and then the client never hears of it. `cancel` ends a response at once:
the closing events are written before it returns, and nothing of this response can follow them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stretto.engine.events import AudioChunk, Event, Finished, TextDelta, Usage
from stretto.engine.session import Item as EngineItem
from stretto.engine.session import Session
from stretto.server.openai.error_body import describe
from stretto.server.openai.generating_route import unfinished
from stretto.server.openai.grammar import LONG
from stretto.server.openai.tools import Call, ToolParser
from stretto.server.realtime import server_events as s
from stretto.server.realtime.answer_log import AnswerLog
from stretto.server.realtime.items import Conversation, Entry, call_message
from stretto.server.realtime.playback_estimate import PlaybackClock
from stretto.server.realtime.send_queue import SendQueue
from stretto.server.realtime.tools import tools_size
from stretto.server.realtime.writer import ResponseWriter, usage_to_wire
from stretto.server.request_log import finish_reason
from stretto.server.service import Service

Reason = Literal["turn_detected", "client_cancelled"]
MAX_SPANS = 2000
clock = time.perf_counter


@dataclass(slots=True)
class SpeechEnd:
    """When the user stopped speaking, as far as it is known."""

    at: float  # on `clock`
    vad_wait: float | None = None  # seconds of silence that ended the turn


@dataclass(slots=True, eq=False)
class ResponseTask:
    writer: ResponseWriter
    service: Service
    engine_session: Session
    send_queue: SendQueue
    client: str  # whose turn it is where requests wait
    items: list[EngineItem] | None = None  # answered instead of the conversation
    num_bytes: int = 0  # of its options and items
    turn: EngineItem | None = None  # of a speculative response: the turn, which may go on
    parser: ToolParser | None = field(init=False)
    speech_end: SpeechEnd | None = None
    playback: PlaybackClock = field(default_factory=lambda: PlaybackClock(clock))
    # its first sound was sent, or it is over
    audio_started: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False  # the client got its last event, or will get none
    error: Exception | None = None  # why it failed
    log: AnswerLog = field(init=False)
    cuts: dict[str, float] = field(default_factory=dict)  # by item: seconds that the client played
    _task: asyncio.Task[None] | None = None
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _held_events: list[Event] = field(default_factory=list)
    _held_samples: int = 0
    # sound that came before it was known whether the text is a function call
    _early_audio: list[AudioChunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parser = ToolParser() if self.writer.options.chat_tools() else None
        self.log = AnswerLog("response", self.id, clock)
        self.log.sample_rate = self.writer.info.sample_rate
        self.log.speculative = self.turn is not None

    @property
    def id(self) -> str:
        return self.writer.id

    @property
    def conversation(self) -> Conversation | None:
        return self.writer.conversation

    # -- what the manager does with it

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """`work` runs this response (`run`)."""
        self._task = asyncio.create_task(work, name="response")
        return self._task

    def release(self, speech_end: SpeechEnd | None) -> None:
        """The client gets its events from now on. `speech_end`: of the turn that it answers."""
        if self._released.is_set() or self.over:
            return
        self.speech_end = speech_end
        self.writer.begin()
        self._released.set()
        waiting = self._held_events
        self._held_events = []
        for event in waiting:
            self._write(event)

    def cancel(self, reason: Reason) -> bool:
        """End it now; whether there was anything to end. The engine's work ends with the task."""
        if self.over:
            return False
        if self._released.is_set():
            self.log.end("cancelled", reason)
            self.writer.finish("cancelled", self._usage(), self._timings(), reason=reason)
        self.abandon()
        return True

    def abandon(self) -> None:
        """End it without another event."""
        self.over = True
        self.audio_started.set()
        if self._task is not None:
            self._task.cancel()

    def cut(self, item_id: str, played_s: float) -> None:
        """The client says how much of an item it has played."""
        self.cuts[item_id] = played_s

    def closing_log(self) -> AnswerLog:
        """The complete log of the response, once its task is over."""
        log = self.log
        if not self._released.is_set():
            if self.error is not None:
                log.fail(self.error)
            log.end("dropped", "speech_went_on")
        if log.finished is None:
            log.usage = self._engine_usage()
        return log

    async def ended(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def forget_unheard(self) -> None:
        """After a cancel: the conversation keeps only the words that were played, by estimate."""
        if self.conversation is None:
            return
        played = self.playback.played_s
        for id in self.conversation.forgotten():
            await self.conversation.session.remove(id)
        for entry in self._current_entries():
            if entry.speech is not None:
                await self.conversation.truncate(entry, self.cuts.get(entry.id, played))
                played -= entry.speech.seconds
            else:
                await self.conversation.update_engine(entry, _message(entry))

    # -- the task

    async def run(self) -> None:
        try:
            async with self.service.admission.place(self.client) as place:
                self.log.queued = place.waited
                end = await self._generate()
            await self._released.wait()
            await self._end(end)
        except Exception as e:  # noqa: BLE001 - the task's boundary: the client gets the error, the session goes on
            await self._fail(e)
        finally:
            self.audio_started.set()

    async def _generate(self) -> Finished | None:
        """Run the request. Returns its end, or None if it was ended here, after a function call."""
        end: Finished | None = None
        async with aclosing(await self._events()) as events:
            async for event in events:
                self._record_event(event)
                if isinstance(event, Finished):
                    end = event
                elif self._released.is_set():
                    await self._pace(event)
                    self._write(event)
                    if self._is_call_over(event):
                        return None
                else:
                    await self._hold_back(event)
        if end is None:
            raise unfinished()
        return end

    async def _events(self) -> AsyncGenerator[Event]:
        options = self.writer.options
        grammar = await self._grammar()
        spoken = options.has_audio and not grammar  # a call is not read aloud
        return self.engine_session.respond(
            modalities=("text", "audio") if spoken else ("text",),
            voice=options.voice if spoken else None,
            params=options.params(self.service.config.packets, self.writer.info.defaults, grammar),
            tools=options.chat_tools(),
            instructions=options.instructions or None,
            items=self.items,
            remember=self.conversation is not None,
            on_prompt=self._record_prompt,
        )

    async def _grammar(self) -> str:
        options = self.writer.options
        if not options.call_required:
            return ""
        if tools_size(options.tools) <= LONG:
            return options.grammar()
        async with self.service.thread_turns.turn(self.client):
            return await asyncio.to_thread(options.grammar)

    def _is_call_over(self, event: Event) -> bool:
        """Functions were called and the text is over: the rest would be the sound of the calls,
        which is not sent. The end token comes without text, and speech has no more frames than
        text has tokens before the text ends."""
        if self.parser is None or self.parser.inside or not self.parser.num_calls:
            return False
        if isinstance(event, TextDelta):
            return not event.text
        return self.writer.frames_of(self.log.num_samples) > self.log.num_tokens + 1

    def _record_prompt(self, usage: Usage) -> None:
        self.log.usage = usage

    def _record_event(self, event: Event) -> None:
        match event:
            case TextDelta():
                self.log.saw_text(len(event.ids))
            case AudioChunk():
                self.log.saw_audio(len(event.samples))
            case Finished():
                self.log.finish(event)

    async def _hold_back(self, event: Event) -> None:
        self._held_events.append(event)
        if isinstance(event, AudioChunk):
            self._held_samples += len(event.samples)
        if self._held_samples > self.service.config.realtime_lead * self.writer.info.sample_rate:
            await self._released.wait()

    async def _pace(self, event: Event) -> None:
        if isinstance(event, AudioChunk):
            await self.send_queue.wait_for_space()
            while (ahead := self.playback.lead - self.service.config.realtime_lead) > 0:
                await asyncio.sleep(ahead)

    def _write(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._write_text(
                self.parser.feed(event.text) if self.parser is not None else [event.text]
            )
        elif isinstance(event, AudioChunk):
            self._write_audio(event)

    def _write_text(self, parts: list[Any]) -> None:
        for part in parts:
            if isinstance(part, Call):
                self._early_audio.clear()
                self.writer.call(part)
            else:
                self.writer.write_text(part)
        if self.writer.speaking and not self._calling:
            early = self._early_audio
            self._early_audio = []
            for chunk in early:
                self._write_audio(chunk)

    def _write_audio(self, chunk: AudioChunk) -> None:
        if self._calling:
            self._early_audio.clear()  # a call is not read aloud
        elif self.parser is not None and not self.writer.speaking:
            self._early_audio.append(chunk)
        else:
            self.writer.write_audio(chunk.samples)
            self.playback.add(len(chunk.samples) / self.writer.info.sample_rate)
            self._record_first_sent()

    def _record_first_sent(self) -> None:
        if self.audio_started.is_set():
            return
        self.audio_started.set()
        if self.speech_end is not None:
            self.log.speech_to_audio = _rounded(clock() - self.speech_end.at)

    @property
    def _calling(self) -> bool:
        return self.parser is not None and (self.parser.inside or self.parser.num_calls > 0)

    # -- its end

    async def _end(self, end: Finished | None) -> None:
        reason = finish_reason(end) if end is not None else "stop"
        if self.parser is not None:
            self._write_text(self.parser.finish(cut=reason == "length"))
        self.writer.close(reason == "stop")
        await self._store_answer()
        self.over = True
        status: Literal["completed", "incomplete"] = (
            "completed" if reason == "stop" else "incomplete"
        )
        self.log.end(status, reason)
        usage = usage_to_wire(end.usage) if end is not None else self._usage()
        cut = "max_output_tokens" if reason == "length" else None
        self.writer.finish(status, usage, self._timings(end), reason=cut)

    async def _fail(self, error: Exception) -> None:
        self.error = error
        _, failure = describe(error)  # before it is released, which it may never be
        await self._released.wait()
        if self.over:
            return
        self.writer.close(False)
        try:
            await self._store_answer()
        except Exception as e:  # noqa: BLE001 - what failed may fail here too, and the client must know
            describe(e)
        self.over = True
        self.log.fail(error)
        status_error = s.StatusError(failure.error.type, failure.error.code, failure.error.message)
        self.writer.finish("failed", self._usage(), self._timings(), error=status_error)

    async def _store_answer(self) -> None:
        """Store the answer in the engine's conversation, where the client has it."""
        if self.conversation is None:
            return
        self.conversation.release_forgotten()
        made = self.conversation.forgotten()
        entries = self._current_entries()
        last = bool(entries) and self.conversation.entries[-1] is entries[0]
        if len(entries) == len(made) == 1 and last and entries[0].item.type == "message":
            entries[0].engine_id = made[0]  # the engine stored it by itself, token for token
        else:
            for id in made:
                await self.conversation.session.remove(id)
            for entry in entries:
                await self.conversation.update_engine(entry, _message(entry))
        for entry in entries:
            if entry.id in self.cuts and entry.speech is not None:
                await self.conversation.truncate(entry, self.cuts[entry.id])

    def _current_entries(self) -> list[Entry]:
        """Its entries, without those that the client has deleted meanwhile."""
        assert self.conversation is not None
        return [e for e in self.writer.entries if e in self.conversation.entries]

    # -- numbers

    def _usage(self) -> dict[str, Any]:
        return usage_to_wire(self._engine_usage())

    def _engine_usage(self) -> Usage:
        """Usage of the prompt and of the answer so far."""
        samples = self.log.num_samples
        frames = round(self.writer.frames_of(samples))
        return replace(
            self.log.usage, text_tokens=self.log.num_tokens, frames=frames, samples=samples
        )

    def _timings(self, end: Finished | None = None) -> s.Timings:
        log = self.log
        timings = s.Timings(
            seed=end.seed if end else None,
            first_text_s=_rounded(log.first_text),
            first_audio_s=_rounded(log.first_audio),
            total_s=_rounded(log.elapsed()),
            audio_s=round(log.num_samples / log.sample_rate, 6),
            speculative=log.speculative,
        )
        if self.speech_end is not None:
            timings.vad_wait_s = _rounded(self.speech_end.vad_wait)
            timings.speech_to_audio_s = log.speech_to_audio
        if end is not None and self.writer.options.timeline:
            timings.timeline = [
                {
                    "lane": t.lane,
                    "name": t.name,
                    "start": round(t.start, 6),
                    "stop": round(t.stop, 6),
                }
                for t in end.timeline[:MAX_SPANS]
            ]
        return timings


def _message(entry: Entry) -> dict[str, Any] | None:
    item = entry.item
    if item.type == "function_call":
        return call_message(str(item.call_id), str(item.name), str(item.arguments))
    text = "".join(p.text or p.transcript or "" for p in item.content or ())
    return {"role": "assistant", "content": text} if text else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
