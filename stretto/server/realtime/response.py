"""One response: the engine's events, held back or paced, become the client's. A task of its own on
the event loop.

Until it is released, what the engine makes waits here: a response that was begun at a pause may
turn out to be one too early, and then nobody hears of it. `cancel` ends it at once: the closing
events are written before it returns, and nothing of this response can follow them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stretto.engine.events import AudioChunk, Event, Finished, TextDelta, Usage
from stretto.server.admission import Admission
from stretto.server.openai.error_body import describe
from stretto.server.openai.generating_route import unfinished
from stretto.server.openai.tools import Call, ToolParser
from stretto.server.realtime import server_events as s
from stretto.server.realtime.answer_log import AnswerLog
from stretto.server.realtime.items import Conversation, Entry, call_message
from stretto.server.realtime.playback_estimate import PlaybackClock
from stretto.server.realtime.send_queue import SendQueue
from stretto.server.realtime.writer import ResponseWriter, usage_to_wire
from stretto.server.request_log import finish_reason

Reason = Literal["turn_detected", "client_cancelled"]
MAX_SPANS = 2000
clock = time.perf_counter


@dataclass(slots=True)
class SpeechEnd:
    """When the person stopped speaking, as far as it is known."""

    at: float  # on `clock`
    vad_wait: float | None = None  # seconds of silence that were waited for


@dataclass(slots=True, eq=False)
class ResponseTask:
    writer: ResponseWriter
    start: Callable[
        [Callable[[Usage], None]], Awaitable[AsyncGenerator[Event]]
    ]  # given who is told what is asked
    send_queue: SendQueue
    admission: Admission
    sender: str  # whose turn it is where requests wait
    lead: float  # seconds that sound may be ahead of its playback
    held_bytes: int = 0  # of what it alone was asked with
    parser: ToolParser | None = None
    speculative: bool = False
    started_at: float = field(default_factory=clock)
    speech_end: SpeechEnd | None = None
    playback: PlaybackClock = field(default_factory=lambda: PlaybackClock(clock))
    audio_started: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # its first sound was sent, or it is over
    over: bool = False  # the client was told how it ended, or will never hear of it
    status: s.Status = "in_progress"
    error: Exception | None = None  # why it failed
    log: AnswerLog = field(init=False)
    cuts: dict[str, float] = field(
        default_factory=dict
    )  # by item: seconds of it that were heard, as the client says
    task: asyncio.Task[None] | None = None
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _held_events: list[Event] = field(default_factory=list)
    _held_samples: int = 0
    _early_audio: list[AudioChunk] = field(
        default_factory=list
    )  # sound before it is known whether a call is being written
    _first_text: float | None = None
    _first_audio: float | None = None
    _first_sent: float | None = None
    _prompt_usage: Usage = field(default_factory=lambda: Usage(0, 0, 0, 0))  # its prompt
    _tokens: int = 0
    _samples: int = 0

    def __post_init__(self) -> None:
        self.log = AnswerLog("response", self.id, self.started_at)
        self.log.sample_rate = self.writer.info.sample_rate

    @property
    def id(self) -> str:
        return self.writer.id

    @property
    def conversation(self) -> Conversation | None:
        return self.writer.conversation

    # -- what the session does with it

    def release(self) -> None:
        """The client may hear of it."""
        if self._released.is_set() or self.over:
            return
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
        self.over = True
        self.audio_started.set()
        if self._released.is_set():
            self.status = "cancelled"
            self.log.end("cancelled", reason)
            self.writer.finish(self.status, self._usage_so_far(), self._timings(), reason=reason)
        if self.task is not None:
            self.task.cancel()
        return True

    def closing_log(self) -> AnswerLog:
        """What the log says of it, now that its task is over."""
        log = self.log
        if not self._released.is_set():
            if self.error is not None:
                log.fail(self.error)
            log.end("dropped", "speech_went_on")
        if log.finished is None:
            log.usage = self._engine_usage()
            log.num_tokens = self._tokens
        log.first_text = self._first_text
        log.first_audio = self._first_audio
        log.speech_to_audio = self.speech_to_audio
        log.speculative = self.speculative
        return log

    async def ended(self) -> None:
        if self.task is not None:
            await asyncio.wait([self.task])

    async def forget_unheard(self) -> None:
        """After a cancel: the conversation keeps the words that were heard, as far as can be
        told."""
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
            async with self.admission.place(self.sender) as place:
                self.log.queued = place.waited
                end = await self._generate()
            await self._released.wait()
            await self._end(end)
        except Exception as e:  # noqa: BLE001 - the task's boundary: the client is told, the session goes on
            await self._fail(e)
        finally:
            self.audio_started.set()

    async def _generate(self) -> Finished | None:
        """How it ended; None if it was ended here."""
        end: Finished | None = None
        async with aclosing(await self.start(self._record_prompt)) as events:
            async for event in events:
                self._record_event(event)
                if isinstance(event, Finished):
                    end = event
                    self.log.finished = event
                    self.log.usage = event.usage
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

    def _is_call_over(self, event: Event) -> bool:
        """Functions were called and the text is over: the rest would be the sound of the calls,
        which nobody hears. The end token comes without text, and speech has no more frames than
        text has tokens before the text ends."""
        if self.parser is None or self.parser.inside or not self.parser.num_calls:
            return False
        if isinstance(event, TextDelta):
            return not event.text
        return self.writer.frames_of(self._samples) > self._tokens + 1

    def _record_prompt(self, asked: Usage) -> None:
        self._prompt_usage = asked

    def _record_event(self, event: Event) -> None:
        now = clock() - self.started_at
        if isinstance(event, TextDelta):
            self._first_text = now if self._first_text is None else self._first_text
            self._tokens += len(event.ids)
        elif isinstance(event, AudioChunk):
            self._first_audio = now if self._first_audio is None else self._first_audio
            self._samples += len(event.samples)

    async def _hold_back(self, event: Event) -> None:
        self._held_events.append(event)
        if isinstance(event, AudioChunk):
            self._held_samples += len(event.samples)
        if self._held_samples > self.lead * self.writer.info.sample_rate:
            await self._released.wait()

    async def _pace(self, event: Event) -> None:
        if isinstance(event, AudioChunk):
            await self.send_queue.wait_for_space()
            while (ahead := self.playback.lead - self.lead) > 0:
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
            if self._first_sent is None:
                self._first_sent = clock()
                self.audio_started.set()

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
        self.log.end("completed" if reason == "stop" else "incomplete", reason)
        usage = usage_to_wire(end.usage) if end is not None else self._usage_so_far()
        timings = self._timings(end)
        self.status = "completed" if reason == "stop" else "incomplete"
        self.writer.finish(
            self.status, usage, timings, reason="max_output_tokens" if reason == "length" else None
        )

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
        self.status = "failed"
        self.log.fail(error)
        status_error = s.StatusError(failure.error.type, failure.error.code, failure.error.message)
        self.writer.finish(self.status, self._usage_so_far(), self._timings(), error=status_error)

    async def _store_answer(self) -> None:
        """What was said becomes part of the engine's conversation, where the client has it."""
        if self.conversation is None:
            return
        self.conversation.release_forgotten()
        made = self.conversation.forgotten()
        entries = self._current_entries()
        last = bool(entries) and self.conversation.entries[-1] is entries[0]
        if len(entries) == len(made) == 1 and last and entries[0].item.type == "message":
            entries[0].engine_id = made[0]  # the engine remembers it by itself, token for token
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

    def _usage_so_far(self) -> s.Usage:
        return usage_to_wire(self._engine_usage())

    def _engine_usage(self) -> Usage:
        frames = round(self.writer.frames_of(self._samples))
        return replace(
            self._prompt_usage, text_tokens=self._tokens, frames=frames, samples=self._samples
        )

    def _timings(self, end: Finished | None = None) -> s.Timings:
        timings = s.Timings(
            seed=end.seed if end else None,
            first_text_s=_rounded(self._first_text),
            first_audio_s=_rounded(self._first_audio),
            total_s=_rounded(clock() - self.started_at),
            audio_s=round(self._samples / self.writer.info.sample_rate, 6),
            speculative=self.speculative,
        )
        if self.speech_end is not None:
            timings.vad_wait_s = _rounded(self.speech_end.vad_wait)
            timings.speech_to_audio_s = self.speech_to_audio
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

    @property
    def speech_to_audio(self) -> float | None:
        """From the end of speech to when the first sound was handed over."""
        if self.speech_end is None or self._first_sent is None:
            return None
        return _rounded(self._first_sent - self.speech_end.at)


def _message(entry: Entry) -> dict[str, Any] | None:
    item = entry.item
    if item.type == "function_call":
        return call_message(str(item.call_id), str(item.name), str(item.arguments))
    text = "".join(p.text or p.transcript or "" for p in item.content or ())
    return {"role": "assistant", "content": text} if text else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
