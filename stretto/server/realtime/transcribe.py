"""The words of what the user said, by the model itself: a request of its own, for text alone.

In a conversation it waits behind answers, so that it does not delay them: it begins when the
answer's first sound is made. In a session that only transcribes, it begins at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

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
class Dictation:
    """How the words are asked for."""

    info: ModelInfo
    settings: Transcription
    logprobs: bool = False

    @property
    def text(self) -> str:
        how = self.info.transcription
        if how is None:
            raise Invalid(CANNOT, "model")
        stated = self.settings.language or next(iter(self.settings.languages or ()), "")
        return how.prompt(stated.partition("-")[0].lower(), self.settings.prompt)

    def ask(
        self, session: Session, item: Item, seconds: float, priority: int
    ) -> AsyncGenerator[Event]:
        """The model's answer about this item's sound, which lasts so many seconds."""
        content = [*item.message["content"], {"type": "text", "text": self.text}]
        most = LEAST_TOKENS + int(TOKENS_A_SECOND * seconds)
        return session.respond(
            modalities=("text",),
            params=Params(
                priority=priority, max_text_tokens=most, logprobs=0 if self.logprobs else None
            ),
            items=[Item(item.id, {**item.message, "content": content})],
            remember=False,
        )


async def transcribe(
    ask: Callable[[], AsyncGenerator[Event]],
    entry: Entry,
    put: Callable[[s.ServerEvent], None],
    answer: AnswerLog,
    logprobs: bool = False,
    sent: str = "",
) -> None:
    """The client is told whether it worked. `sent`: the words that it has already."""
    found: list[s.TranscriptLogprob] = []
    text = why = ""
    try:
        async with aclosing(ask()) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    answer.saw_text(len(event.ids))
                    new = [
                        s.TranscriptLogprob(t.token, t.logprob, list(t.said))
                        for t in event.logprobs
                        if t.said
                    ]
                    found += new
                    before = max(len(text), len(sent))
                    text += event.text
                    if text.startswith(sent) and len(text) > before:
                        delta = s.TranscriptionDelta(
                            item_id=entry.id, content_index=0, delta=text[before:]
                        )
                        delta.logprobs = new if logprobs else UNSET
                        put(delta)
                elif isinstance(event, Finished):
                    answer.finished = event
                    answer.usage = event.usage
                    why = finish_reason(event)
        if answer.finished is None:
            raise unfinished()
    except Exception as e:  # noqa: BLE001 - the task's boundary: the client is told, the session goes on
        _, failure = describe(e)
        error = s.ErrorInfo(failure.error.type, failure.error.message, failure.error.code)
        put(s.TranscriptionFailed(item_id=entry.id, content_index=0, error=error))
        answer.fail(e)
        return
    for part in entry.item.content or ():
        part.transcript = text
    completed = s.TranscriptionCompleted(
        item_id=entry.id, content_index=0, transcript=text, usage=_to_wire(answer.usage)
    )
    completed.logprobs = found if logprobs else UNSET
    put(completed)
    answer.end("completed", why)


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


async def after_first_sound(
    audio_started: Callable[[], asyncio.Event | None], grace: float
) -> None:
    """Until the answer has its first sound. If none is under way, one may come within the
    `grace`."""
    if audio_started() is None:
        await asyncio.sleep(grace)
    if (event := audio_started()) is not None:
        await event.wait()


@dataclass(slots=True, eq=False)
class Transcriber:
    """The transcriptions of one session, each a task."""

    engine_session: Session
    put: Callable[[s.ServerEvent], None]
    audio_started: Callable[[], asyncio.Event | None]  # of the answer that is being made
    recorder: AnswerRecorder
    held_bytes: int = 0  # of the sounds that wait, where the conversation does not have them
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by item
    _answers: dict[str, AnswerLog] = field(default_factory=dict)  # of these

    def begin(self, dictation: Dictation, entry: Entry, item: Item, seconds: float) -> None:
        """Write down an item of the conversation, when the answer to it is heard."""
        if dictation.info.transcription is None:
            self._tell_spoken(entry)
            return

        async def run(answer: AnswerLog) -> None:
            await after_first_sound(self.audio_started, GRACE_S)
            ask = partial(dictation.ask, self.engine_session, item, seconds, PRIORITY)
            await transcribe(ask, entry, self.put, answer, dictation.logprobs)

        self._run(run, entry, 0)

    def begin_alone(
        self, dictation: Dictation, entry: Entry, item: Item, seconds: float, sent: str
    ) -> None:
        """Write down a sound that is part of no conversation, now. `sent`: the words that the
        client has already."""

        async def run(answer: AnswerLog) -> None:
            ask = partial(dictation.ask, self.engine_session, item, seconds, 0)
            await transcribe(ask, entry, self.put, answer, dictation.logprobs, sent)

        self._run(run, entry, media_bytes(item.message))

    def _run(
        self,
        work: Callable[[AnswerLog], Coroutine[None, None, None]],
        entry: Entry,
        size: int,
    ) -> None:
        answer = AnswerLog("transcription", entry.id)
        if len(self._tasks) >= MAX_WAITING:
            words = "too many transcriptions are waiting"
            error = s.ErrorInfo("server_error", words, "server_busy")
            self.put(s.TranscriptionFailed(item_id=entry.id, content_index=0, error=error))
            answer.fail(Busy(words))
            self.recorder.record(answer, None)
            return

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.pop(entry.id, None)
            self._answers.pop(entry.id, None)
            self.held_bytes -= size
            self.recorder.record(answer, task)

        task = self._tasks[entry.id] = asyncio.create_task(work(answer), name="transcription")
        self._answers[entry.id] = answer
        self.held_bytes += size
        # Not in `run`: a task that is cancelled before its first step never runs.
        task.add_done_callback(end)

    def _tell_spoken(self, entry: Entry) -> None:
        """The client shows that something was said; the item's transcript stays empty."""
        self.put(s.TranscriptionDelta(item_id=entry.id, content_index=0, delta=SPOKEN))
        self.put(
            s.TranscriptionCompleted(
                item_id=entry.id,
                content_index=0,
                transcript=SPOKEN,
                usage=_to_wire(Usage(0, 0, 0, 0)),
            )
        )

    def cancel(self, id: str) -> None:
        if (task := self._tasks.get(id)) is not None:
            self._answers[id].end("cancelled", "item_deleted")
            task.cancel()

    async def close(self) -> None:
        tasks = set(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
