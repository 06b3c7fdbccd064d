"""The words of a turn while it is being spoken, for sessions that transcribe. The session owns it,
on the event loop; one task at most.

The model transcribes the turn from its beginning again and again, each time with more of it; the
caches have most of that. Words in which two of these transcripts in a row agree are certain enough
to be sent, since nothing that was sent can be taken back. The transcript of the whole turn is the
one that counts. The task requests the next one when a second or a part of the turn has been added,
so that the work for a turn grows with its length and no faster."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass, field

from prometheus_client import Counter

from stretto.engine.events import TextDelta
from stretto.engine.session import INPUT_RATE, Session
from stretto.errors import StrettoError
from stretto.server.realtime import server_events as s
from stretto.server.realtime.send_queue import SendQueue
from stretto.server.realtime.transcribe import PRIORITY, TranscriptionOptions

log = logging.getLogger("stretto.realtime")

STEP_S = 1.0
STEP_SHARE = 0.15  # of what was spoken so far


@dataclass(slots=True, eq=False)
class PartialTranscripts:
    engine_session: Session
    send_queue: SendQueue
    count: Counter
    item_id: str | None = None  # of the turn that is being spoken
    sent: str = ""
    _more: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def begin(self, item_id: str, options: TranscriptionOptions) -> None:
        """A turn has begun."""
        if self._task is not None:
            self._task.cancel()
        self.item_id = item_id
        self.sent = ""
        self._task = asyncio.create_task(self._run(item_id, options), name="partial transcripts")

    def wake(self) -> None:
        """The engine has more of the turn."""
        self._more.set()

    async def end(self) -> str:
        """The turn is over: nothing more of it is sent from here. Returns what was."""
        self.item_id = None
        if (task := self._task) is not None:
            self._task = None
            task.cancel()
            await asyncio.wait([task])
        return self.sent

    async def _run(self, item_id: str, options: TranscriptionOptions) -> None:
        before = ""
        next_size = STEP_S * INPUT_RATE
        while True:
            while self.engine_session.pending < next_size:
                self._more.clear()
                await self._more.wait()
            size = self.engine_session.pending
            try:
                text = await self._transcript(options, size / INPUT_RATE)
            except Exception as e:
                level = logging.DEBUG if isinstance(e, StrettoError) else logging.ERROR
                log.log(level, "no partial transcript: %s", e, exc_info=level > logging.DEBUG)
                text = before
            self.count.inc()
            certain = agreed(before, text)
            if certain.startswith(self.sent) and len(certain) > len(self.sent):
                new = certain[len(self.sent) :]
                self.sent = certain
                self.send_queue.put(
                    s.TranscriptionDelta(item_id=item_id, content_index=0, delta=new)
                )
            before = text
            next_size = size + max(STEP_S * INPUT_RATE, STEP_SHARE * size)

    async def _transcript(self, options: TranscriptionOptions, seconds: float) -> str:
        draft = await self.engine_session.draft()
        events = options.respond(self.engine_session, draft, seconds, PRIORITY)
        async with aclosing(events):
            return "".join([e.text async for e in events if isinstance(e, TextDelta)])


def agreed(one: str, two: str) -> str:
    """The whole words with which both begin. The last word of either may be a part of one."""
    size = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    common = one[: min(len(one), len(two)) if size is None else size]
    end = len(common)
    while end and _within_a_word(common, one, two, end):
        end -= 1
    return common[:end].rstrip()


def _within_a_word(common: str, one: str, two: str, end: int) -> bool:
    if not _joins(common[end - 1]):
        return False
    if end < len(common):
        return _joins(common[end])
    following = one[end : end + 1], two[end : end + 1]
    return any(_joins(c) or not c for c in following)


def _joins(letter: str) -> bool:
    """Part of a word that may go on: scripts without blanks have words of one letter here."""
    return letter.isalnum() and not "\u2e80" <= letter <= "\uffdc"
