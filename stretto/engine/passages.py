"""A text that is read in passages, as one answer: each passage a request of its own, started before
its listener has heard the one before; their sound joined without a click, their counts added.
Asyncio; called by `tts.py`; imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from stretto.engine.events import AudioChunk, CodeFrames, Event, Finished, Usage
from stretto.errors import Busy, Invalid
from stretto.params import Params

RETRY_S, TRIES = 0.1, 50
"""A passage behind the first one may have to wait while other speech is made too slowly."""
LEAD_S = 1.0
"""Sound that is taken from the engine before its listener asks for it. So the next passage is begun
while there is something left to listen to, and a listener who stops stops the engine."""
FADE_S = 0.005
"""Where two passages meet, the sound goes to nothing and comes back, so that there is no step."""
PAUSE_S = 0.25
"""Silence between two passages, at least."""
QUIET = 0.003
"""Below this (-50 dB), a sample counts as silence."""

T = TypeVar("T")
Samples = npt.NDArray[np.float32]


@dataclass(slots=True)
class FrameLimits:
    """The limit of frames: of the whole text if its caller set one, else the checkpoint's, which is
    that of a passage."""

    params: Params
    for_whole_text: bool
    frames: int = 0  # made so far

    @property
    def reached(self) -> bool:
        return self.for_whole_text and self.frames >= self.params.max_frames

    def of_next(self) -> Params:
        """What is left of them, for the next passage."""
        max_frames = self.params.max_frames - (self.frames if self.for_whole_text else 0)
        min_frames = min(max(self.params.min_frames - self.frames, 0), max_frames)
        return replace(self.params, max_frames=max_frames, min_frames=min_frames)


Speak = Callable[[T, Params], AsyncIterator[Event]]


@dataclass(slots=True)
class PassageReader(Generic[T]):
    """Reads passages one after another: `speak` makes a request of a passage."""

    speak: Speak[T]
    limits: FrameLimits
    rate: int  # samples per second
    ends: list[Finished] = field(default_factory=list)
    cut: bool = False  # passages are left that were not read

    async def read(self, passages: AsyncIterator[T]) -> AsyncIterator[Event]:
        """Events as of one answer: sound, codes and counts go on from passage to passage."""
        seam = Seam(self.rate)
        async with aclosing(_generator(passages)) as unread:
            async for passage in unread:
                if self.limits.reached:
                    self.cut = True
                    break
                if self.ends and (joint := seam.join()) is not None:
                    yield joint
                async with aclosing(_generator(self._passage(passage, seam))) as events:
                    async for event in events:
                        yield event
        if not self.ends:
            raise Invalid("there is nothing in this text that the model can say", "input")
        if (rest := seam.finish()) is not None:
            yield rest
        yield join_ends(self.ends, seam.sent, self.cut)

    async def _passage(self, passage: T, seam: Seam) -> AsyncIterator[Event]:
        before = self.limits.frames
        async with aclosing(_generator(self._retried(passage))) as events:
            async for event in events:
                if isinstance(event, AudioChunk):
                    if (chunk := seam.push(event.samples)) is not None:
                        yield chunk
                elif isinstance(event, CodeFrames):
                    yield CodeFrames(before + event.start, event.codes)
                elif isinstance(event, Finished):
                    self.ends.append(event)
                    self.limits.frames += event.usage.frames
                else:
                    yield event

    async def _retried(self, passage: T) -> AsyncIterator[Event]:
        """The events of a passage, which is tried again if the engine has no room for it now."""
        params = self.limits.of_next()
        started = False
        for tries in range(TRIES):
            try:
                async with aclosing(_generator(self.speak(passage, params))) as events:
                    async for event in events:
                        started = True
                        yield event
                return
            except Busy:
                if started or not self.ends or tries + 1 == TRIES:
                    raise
                await asyncio.sleep(RETRY_S)


@dataclass(slots=True)
class Seam:
    """The sound of several passages as one stream of chunks. The last samples of a chunk wait until
    it is known whether another passage follows them."""

    rate: int
    sent: int = 0  # samples
    _tail: Samples = field(default_factory=lambda: np.zeros(0, np.float32))
    _quiet: int = 0  # samples of silence at the end
    _fade_in: int = 0  # samples that are still to fade in

    def push(self, samples: Samples) -> AudioChunk | None:
        if self._fade_in:
            samples = self._fade_in_start(samples)
        loud = np.flatnonzero(np.abs(samples) > QUIET)
        self._quiet = len(samples) - 1 - int(loud[-1]) if len(loud) else self._quiet + len(samples)
        unsent = np.concatenate([self._tail, samples])
        cut = max(0, len(unsent) - self._fade)
        self._tail = unsent[cut:]
        return self._chunk(unsent[:cut])

    def join(self) -> AudioChunk | None:
        """Another passage follows: fade out, and rest."""
        ramp = np.linspace(1, 0, len(self._tail), dtype=np.float32)
        pause = max(0, int(PAUSE_S * self.rate) - self._quiet)
        end = np.concatenate([self._tail * ramp, np.zeros(pause, np.float32)])
        self._tail = self._tail[:0]
        self._quiet = 0
        self._fade_in = self._fade
        return self._chunk(end)

    def finish(self) -> AudioChunk | None:
        """No other passage follows."""
        rest = self._tail
        self._tail = rest[:0]
        return self._chunk(rest)

    @property
    def _fade(self) -> int:
        return int(FADE_S * self.rate)

    def _fade_in_start(self, samples: Samples) -> Samples:
        count = min(self._fade_in, len(samples))
        first = self._fade - self._fade_in
        ramp = np.arange(first, first + count, dtype=np.float32) / self._fade
        self._fade_in -= count
        return np.concatenate([samples[:count] * ramp, samples[count:]])

    def _chunk(self, samples: Samples) -> AudioChunk | None:
        if not len(samples):
            return None
        chunk = AudioChunk(self.sent, samples)
        self.sent += len(samples)
        return chunk


def join_ends(ends: Sequence[Finished], samples: int, cut: bool) -> Finished:
    """The end of all passages, whose sound has so many samples."""
    first, last = ends[0], ends[-1]
    used = [e.usage for e in ends]
    total = Usage(
        prompt_tokens=sum(u.prompt_tokens for u in used),
        text_tokens=sum(u.text_tokens for u in used),
        frames=sum(u.frames for u in used),
        samples=samples,
        cached_tokens=sum(u.cached_tokens for u in used),
    )
    reason = "length" if cut or any(e.audio == "length" for e in ends) else last.audio
    return replace(
        last,
        audio=reason,
        usage=total,
        seed=first.seed,
        prompt_ids=first.prompt_ids,
        timeline=first.timeline if len(ends) == 1 else (),
    )


# ---- items and events that are made before the caller asks for them


async def one_ahead(items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same items; each is made while the one before is used."""
    next_item = asyncio.ensure_future(_next(items))
    try:
        while (item := await next_item) is not None:
            next_item = asyncio.ensure_future(_next(items))
            yield item
    finally:
        next_item.cancel()
        await asyncio.wait([next_item])
        await _generator(items).aclose()


async def _next(items: AsyncIterator[T]) -> T | None:
    return await anext(items, None)


async def with_lead(events: AsyncIterator[Event], rate: int) -> AsyncIterator[Event]:
    """The same events, taken up to `LEAD_S` seconds of sound before they are asked for. Closing it
    closes `events`."""
    lead = _Lead(int(LEAD_S * rate))
    filling = asyncio.ensure_future(lead.fill(events))
    try:
        while (event := await lead.take()) is not None:
            yield event
    finally:
        filling.cancel()
        await asyncio.wait([filling])


@dataclass(slots=True, eq=False)
class _Lead:
    max_samples: int
    waiting: int = 0
    events: asyncio.Queue[Event | Exception | None] = field(default_factory=asyncio.Queue)
    room: asyncio.Event = field(default_factory=asyncio.Event)

    async def fill(self, events: AsyncIterator[Event]) -> None:
        try:
            async with aclosing(_generator(events)) as source:
                async for event in source:
                    self.events.put_nowait(event)
                    await self._count(event)
        except Exception as e:  # noqa: BLE001  whatever ends the events is raised where they are read
            self.events.put_nowait(e)
        else:
            self.events.put_nowait(None)

    async def _count(self, event: Event) -> None:
        if not isinstance(event, AudioChunk):
            return
        self.waiting += len(event.samples)
        while self.waiting > self.max_samples:
            self.room.clear()
            await self.room.wait()

    async def take(self) -> Event | None:
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, AudioChunk):
            self.waiting -= len(event.samples)
            self.room.set()
        return event


def _generator(items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The same iterator, which is a generator and so can be closed."""
    return cast(AsyncGenerator[T, None], items)
