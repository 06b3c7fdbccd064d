"""The words of what the user said, by the model itself: a request of its own beside the
conversation, for text alone and behind all others in line. It does not delay the answer: it begins
when the answer's first sound is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET
from prometheus_client import Counter

from stretto.engine.events import Finished, TextDelta, Usage
from stretto.engine.session import Item, Session
from stretto.family import Transcription as TranscriptionPrompts
from stretto.params import Params
from stretto.server.openai.error_body import describe
from stretto.server.realtime import server_events as s
from stretto.server.realtime.client_events import Transcription
from stretto.server.realtime.items import Entry

PRIORITY = 10  # behind answers
TOKENS_A_SECOND, LEAST_TOKENS = 12, 32  # far more than anybody says
MAX_WAITING = 8  # or under way, of one session
GRACE_S = 0.25  # a client that ends its turns itself asks for the answer in a second message
SPOKEN = "(spoken)"
"""The transcript that clients show where the model cannot transcribe."""


def with_prompt(item: Item, prompt: str) -> Item:
    """What the user said, and what is to be done with it."""
    content = [*item.message["content"], {"type": "text", "text": prompt}]
    return Item(item.id, {**item.message, "content": content})


def not_transcribed(entry: Entry, put: Callable[[s.ServerEvent], None]) -> None:
    """The client shows that something was said; the item's transcript stays empty."""
    put(s.TranscriptionDelta(item_id=entry.id, content_index=0, delta=SPOKEN))
    usage = usage_of(Usage(0, 0, 0, 0))
    put(s.TranscriptionCompleted(item_id=entry.id, content_index=0, transcript=SPOKEN, usage=usage))


async def transcribe(
    session: Session,
    prompt: str,
    entry: Entry,
    item: Item,
    seconds: float,
    put: Callable[[s.ServerEvent], None],
    logprobs: bool = False,
) -> bool:
    """Whether it worked; the client is told either way."""
    logprobs_found: list[s.TranscriptLogprob] = []
    texts: list[str] = []
    usage: Usage | None = None
    most = LEAST_TOKENS + int(TOKENS_A_SECOND * seconds)
    params = Params(priority=PRIORITY, max_text_tokens=most, logprobs=0 if logprobs else None)
    try:
        events = session.respond(
            modalities=("text",),
            params=params,
            items=[with_prompt(item, prompt)],
            remember=False,
        )
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TextDelta):
                    new = [
                        s.TranscriptLogprob(t.token, t.logprob, list(t.said))
                        for t in event.logprobs
                        if t.said
                    ]
                    logprobs_found += new
                    if event.text:
                        texts.append(event.text)
                        delta = s.TranscriptionDelta(
                            item_id=entry.id, content_index=0, delta=event.text
                        )
                        delta.logprobs = new if logprobs else UNSET
                        put(delta)
                elif isinstance(event, Finished):
                    usage = event.usage
    except Exception as e:  # noqa: BLE001 - the task's boundary: the client is told, the session goes on
        _, failure = describe(e)
        error = s.ErrorInfo(failure.error.type, failure.error.message, failure.error.code)
        put(s.TranscriptionFailed(item_id=entry.id, content_index=0, error=error))
        return False
    text = "".join(texts)
    for part in entry.item.content or ():
        part.transcript = text
    completed = s.TranscriptionCompleted(
        item_id=entry.id,
        content_index=0,
        transcript=text,
        usage=usage_of(usage or Usage(0, 0, 0, 0)),
    )
    completed.logprobs = logprobs_found if logprobs else UNSET
    put(completed)
    return True


def usage_of(usage: Usage) -> dict[str, Any]:
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
    """The transcriptions of one session, each a task. `how`: None where the model cannot."""

    engine_session: Session
    how: TranscriptionPrompts | None
    put: Callable[[s.ServerEvent], None]
    audio_started: Callable[[], asyncio.Event | None]  # of the answer that is being made
    count: Counter  # by how they ended
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by item

    def begin(
        self,
        settings: Transcription | None,
        entry: Entry,
        item: Item,
        seconds: float,
        logprobs: bool = False,
    ) -> None:
        """If the client wants the words of this item."""
        if settings is None:
            return
        if (how := self.how) is None:
            not_transcribed(entry, self.put)
            return
        prompt = how.prompt(settings.language, settings.prompt)
        if len(self._tasks) >= MAX_WAITING:
            error = s.ErrorInfo(
                "server_error", "too many transcriptions are waiting", "server_busy"
            )
            self.put(s.TranscriptionFailed(item_id=entry.id, content_index=0, error=error))
            return

        async def run() -> None:
            outcome = "cancelled"
            try:
                await after_first_sound(self.audio_started, GRACE_S)
                succeeded = await transcribe(
                    self.engine_session, prompt, entry, item, seconds, self.put, logprobs
                )
                outcome = "completed" if succeeded else "failed"
            finally:
                self.count.labels(outcome).inc()

        task = self._tasks[entry.id] = asyncio.create_task(run(), name="transcription")
        # Not in `run`: a task that is cancelled before its first step never runs.
        task.add_done_callback(lambda _: self._tasks.pop(entry.id, None))

    def cancel(self, id: str) -> None:
        if (task := self._tasks.get(id)) is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = set(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
