"""The transcripts of what the user says, by the model itself: each a request of its own, for text
alone, in a task of its own on the event loop. The session owns one `Transcriber`.

In a conversation a transcription waits behind answers, so that it does not delay them: it begins
when the answer's first sound is made. In a session that only transcribes, it begins at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import UNSET

from stretto.engine.events import Event, Finished, TextDelta, Usage
from stretto.engine.session import Item, Session
from stretto.errors import Busy, Invalid
from stretto.family import ModelInfo
from stretto.params import Params
from stretto.server.openai.error_body import describe
from stretto.server.openai.generating_route import unfinished
from stretto.server.realtime import server_events as s
from stretto.server.realtime.answer_log import AnswerLog, AnswerRecorder
from stretto.server.realtime.client_events import Transcription
from stretto.server.realtime.items import Entry, media_bytes
from stretto.server.realtime.response_manager import ResponseManager
from stretto.server.realtime.send_queue import SendQueue
from stretto.server.realtime.session_memory import SessionMemory
from stretto.server.request_log import finish_reason

PRIORITY = 10  # behind answers
TOKENS_A_SECOND, LEAST_TOKENS = 12, 32  # far more than anybody says
MAX_WAITING = 8  # or under way, of one session
GRACE_S = 0.25  # a client that ends its turns itself asks for the answer in a second message
CANNOT = "this model cannot transcribe speech"
SPOKEN = "(spoken)"
"""The transcript that clients show in a conversation where the model cannot transcribe."""


def check_transcribes(info: ModelInfo) -> None:
    if info.transcription is None:
        raise Invalid(CANNOT, "model")


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """How a session's transcripts are made."""

    info: ModelInfo
    settings: Transcription
    logprobs: bool = False

    @property
    def prompt(self) -> str:
        family = self.info.transcription
        if family is None:
            raise Invalid(CANNOT, "model")
        language = self.settings.language or next(iter(self.settings.languages or ()), "")
        return family.prompt(language.partition("-")[0].lower(), self.settings.prompt)

    def respond(
        self, session: Session, item: Item, seconds: float, priority: int
    ) -> AsyncGenerator[Event]:
        """The model's transcript of an item, whose sound lasts so many seconds."""
        content = [*item.message["content"], {"type": "text", "text": self.prompt}]
        most = LEAST_TOKENS + int(TOKENS_A_SECOND * seconds)
        return session.respond(
            modalities=("text",),
            params=Params(
                priority=priority, max_text_tokens=most, logprobs=0 if self.logprobs else None
            ),
            items=[Item(item.id, {**item.message, "content": content})],
            remember=False,
        )


@dataclass(slots=True, eq=False)
class TranscriptionTask:
    """The transcription of one item."""

    options: TranscriptionOptions
    entry: Entry
    item: Item
    seconds: float
    in_conversation: bool
    sent: str = ""  # the words that the client has already
    text: str = ""
    logprobs: list[s.TranscriptLogprob] = field(default_factory=list)
    log: AnswerLog = field(init=False)
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.log = AnswerLog("transcription", self.entry.id)

    @property
    def num_bytes(self) -> int:
        """Bytes of the sound, where the conversation does not count them."""
        return 0 if self.in_conversation else media_bytes(self.item.message)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """`work` runs this transcription (`run`)."""
        self._task = asyncio.create_task(work, name="transcription")
        return self._task

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def run(self, session: Session, send_queue: SendQueue) -> None:
        """Send the transcript, or why there is none."""
        priority = PRIORITY if self.in_conversation else 0
        why = ""
        try:
            events = self.options.respond(session, self.item, self.seconds, priority)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, TextDelta):
                        self._send_delta(event, send_queue)
                    elif isinstance(event, Finished):
                        self.log.finish(event)
                        why = finish_reason(event)
            if self.log.finished is None:
                raise unfinished()
        except Exception as e:  # noqa: BLE001 - the task's boundary: the client gets the error, the session goes on
            self._fail(e, send_queue)
            return
        for part in self.entry.item.content or ():
            part.transcript = self.text
        completed = s.TranscriptionCompleted(
            item_id=self.entry.id,
            content_index=0,
            transcript=self.text,
            usage=_to_wire(self.log.usage),
        )
        completed.logprobs = self.logprobs if self.options.logprobs else UNSET
        send_queue.put(completed)
        self.log.end("completed", why)

    def _send_delta(self, event: TextDelta, send_queue: SendQueue) -> None:
        self.log.saw_text(len(event.ids))
        new = [
            s.TranscriptLogprob(t.token, t.logprob, list(t.text_bytes))
            for t in event.logprobs
            if t.text_bytes
        ]
        self.logprobs += new
        before = max(len(self.text), len(self.sent))
        self.text += event.text
        if self.text.startswith(self.sent) and len(self.text) > before:
            delta = s.TranscriptionDelta(
                item_id=self.entry.id, content_index=0, delta=self.text[before:]
            )
            delta.logprobs = new if self.options.logprobs else UNSET
            send_queue.put(delta)

    def _fail(self, error: Exception, send_queue: SendQueue) -> None:
        _, failure = describe(error)
        info = s.ErrorInfo(failure.error.type, failure.error.message, failure.error.code)
        self.log.fail(error)
        send_queue.put(s.TranscriptionFailed(item_id=self.entry.id, content_index=0, error=info))

    def refuse(self, send_queue: SendQueue) -> None:
        words = "too many transcriptions are waiting"
        info = s.ErrorInfo("server_error", words, "server_busy")
        self.log.fail(Busy(words))
        send_queue.put(s.TranscriptionFailed(item_id=self.entry.id, content_index=0, error=info))


def _to_wire(usage: Usage) -> dict[str, object]:
    return {
        "type": "tokens",
        "total_tokens": usage.prompt_tokens + usage.text_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.text_tokens,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens - usage.audio_prompt_tokens,
            "audio_tokens": usage.audio_prompt_tokens,
        },
    }


@dataclass(slots=True, eq=False)
class Transcriber:
    """The transcriptions of one session, each a task."""

    engine_session: Session
    send_queue: SendQueue
    responses: ResponseManager
    recorder: AnswerRecorder
    memory: SessionMemory
    _tasks: dict[str, TranscriptionTask] = field(default_factory=dict)  # by item

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def begin(self, task: TranscriptionTask) -> None:
        """Begin it now or, in a conversation, when the answer to it has its first sound."""
        if task.in_conversation and task.options.info.transcription is None:
            self._send_spoken(task.entry)
            return
        if len(self._tasks) >= MAX_WAITING:
            task.refuse(self.send_queue)
            self.recorder.record(task.log, None)
            return
        self._tasks[task.entry.id] = task
        self.memory.add_task(task.num_bytes)
        # Not in `_run`: a task that is cancelled before its first step never runs.
        task.start(self._run(task)).add_done_callback(partial(self._record, task))

    async def _run(self, task: TranscriptionTask) -> None:
        if task.in_conversation:
            await self.responses.wait_for_audio(GRACE_S)
        await task.run(self.engine_session, self.send_queue)

    def _record(self, task: TranscriptionTask, ended: asyncio.Task[None]) -> None:
        del self._tasks[task.entry.id]
        self.recorder.record(task.log, ended)
        self.memory.remove_task(task.num_bytes)

    def _send_spoken(self, entry: Entry) -> None:
        """The client shows that the user spoke; the item's transcript stays empty."""
        self.send_queue.put(s.TranscriptionDelta(item_id=entry.id, content_index=0, delta=SPOKEN))
        self.send_queue.put(
            s.TranscriptionCompleted(
                item_id=entry.id,
                content_index=0,
                transcript=SPOKEN,
                usage=_to_wire(Usage(0, 0, 0, 0)),
            )
        )

    def cancel(self, id: str) -> None:
        if (task := self._tasks.get(id)) is not None:
            task.log.end("cancelled", "item_deleted")
            task.cancel()

    async def close(self) -> None:
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*(task.ended() for task in tasks))
