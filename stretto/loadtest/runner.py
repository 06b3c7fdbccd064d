"""Measures a server: sends a workload at one load after another and notes when each piece of each
answer came.

Everything runs in one asyncio loop. The clock and the way to send are arguments, so that tests need
neither time nor network. What is measured is what a listener would notice; `report.py` turns it
into tables."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from stretto.loadtest.player import Packet, play
from stretto.loadtest.sse import Piece, RequestFailed, Sound, StreamEnd, Used, Words
from stretto.loadtest.workload import poisson


class SystemClock:
    def now(self) -> float:
        return time.perf_counter()

    async def sleep_until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, at - self.now()))


@dataclass(frozen=True, slots=True)
class Closed:
    """A fixed number of `streams`: each sends its next request when it has its answer."""

    streams: int

    def __str__(self) -> str:
        return f"concurrency {self.streams}"


@dataclass(frozen=True, slots=True)
class Open:
    """Listeners who come by chance, `rate` a second, whether or not the server keeps up."""

    rate: float
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s"


Load = Closed | Open


@dataclass(frozen=True, slots=True)
class Targets:
    """When a level ends: after this many requests, or when no more are started after this many
    seconds."""

    requests: int | None = None
    seconds: float | None = None
    warmup: int = 0
    until_error: bool = False  # no more are started after one that failed


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds: `sent` from the level's start, the others from `sent`."""

    index: int
    sent: float
    words: list[float] = field(default_factory=list)  # when each piece of text came
    packets: list[Packet] = field(default_factory=list)
    end: float | None = None
    finish: str | None = None
    error: str | None = None  # its kind; None: a whole answer
    message: str | None = None
    prompt_tokens: int | None = None
    text_tokens: int | None = None

    @property
    def first_text(self) -> float | None:
        return self.words[0] if self.words else None

    @property
    def first_audio(self) -> float | None:
        return self.packets[0].at if self.packets else None

    @property
    def token_seconds(self) -> float | None:
        """Mean time from one text token to the next (TPOT)."""
        count = self.text_tokens or len(self.words)
        return (
            (self.words[-1] - self.words[0]) / (count - 1)
            if len(self.words) > 1 and count > 1
            else None
        )

    @property
    def audio_seconds(self) -> float:
        return sum(p.seconds for p in self.packets)

    @property
    def rtf(self) -> float | None:
        """Time until the last packet over what all of them sound."""
        return self.packets[-1].at / self.audio_seconds if self.audio_seconds else None

    def take(self, at: float, piece: Piece) -> None:
        match piece:
            case Words():
                self.words.append(at)
            case Sound():
                self.packets.append(Packet(at, piece.seconds()))
            case Used(usage=usage):
                details = usage.get("completion_tokens_details") or {}
                self.prompt_tokens = usage.get("prompt_tokens")
                self.text_tokens = details.get("text_tokens") or usage.get("completion_tokens")
            case StreamEnd(reason=reason):
                self.finish = reason


@dataclass(frozen=True, slots=True)
class Goal:
    """What makes an answer a good one, in seconds: its first sound (or, unspoken, first text) came
    in time, and a player that starts at once waits no longer in all."""

    first: float = 1.0
    wait: float = 0.1

    def met(self, sample: Sample) -> bool:
        first_output = sample.first_audio if sample.packets else sample.first_text
        playback = play(sample.packets)
        return (
            sample.error is None
            and first_output is not None
            and first_output <= self.first
            and (playback is None or playback.wait <= self.wait)
        )


@dataclass(slots=True)
class Level:
    """One load and what came of it."""

    load: Load
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0  # from the first request to the last answer
    interrupted: bool = False
    failed: bool = False  # a request brought no whole answer
    warmup: list[Sample] = field(
        default_factory=list
    )  # sent before the others, and not counted with them

    @property
    def good(self) -> list[Sample]:
        return [s for s in self.samples if s.error is None]

    def skip(self, number: int) -> None:
        """Take the first requests of the level for its warm-up."""
        self.warmup = self.samples[:number]
        self.samples = self.samples[number:]
        if self.samples:
            self.seconds -= self.samples[0].sent


Send = Callable[[int], AsyncIterator[tuple[float, Piece]]]
"""Sends the workload's request of this number and yields its pieces with the clock's time."""
OnSample = Callable[[Sample], None]


def ignore(sample: Sample) -> None:
    pass


@dataclass(slots=True)
class Bench:
    send: Send
    clock: SystemClock
    want_audio: bool = True  # an answer without speech counts as an error
    numbers: Iterator[int] = field(
        default_factory=itertools.count
    )  # no two requests of a run are the same

    async def run(self, load: Load, limits: Targets, on_sample: OnSample = ignore) -> Level:
        """One level; `on_sample` is called with each sample behind the warm-up. If the task is
        cancelled (Ctrl-C) it gives what it has, marked as interrupted."""
        level = Level(load)
        try:
            if limits.warmup:
                streams = limits.warmup
                if isinstance(load, Closed):
                    streams = min(streams, load.streams)
                warmup = Targets(requests=limits.warmup)
                await self.closed(Level(load), streams, warmup)
            start = self.clock.now()
            try:
                match load:
                    case Closed():
                        await self.closed(level, load.streams, limits, on_sample)
                    case Open():
                        await self.open(level, load, limits, on_sample)
            finally:
                level.seconds = self.clock.now() - start
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()  # the interruption is dealt with: what follows may wait again
            level.interrupted = True
        level.samples.sort(key=lambda s: s.sent)
        return level

    async def closed(
        self, level: Level, streams: int, limits: Targets, on_sample: OnSample = ignore
    ) -> None:
        start = self.clock.now()
        numbers = itertools.count()

        async def listener() -> None:
            while not self.over(level, limits, next(numbers), self.clock.now() - start):
                await self.measure(level, start, on_sample)

        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(listener())

    async def open(self, level: Level, load: Open, limits: Targets, on_sample: OnSample) -> None:
        start = self.clock.now()
        async with asyncio.TaskGroup() as group:
            for number, at in enumerate(poisson(load.rate, load.seed)):
                if self.over(level, limits, number, at):
                    break
                await self.clock.sleep_until(start + at)
                group.create_task(self.measure(level, start, on_sample))

    @staticmethod
    def over(level: Level, limits: Targets, num_started: int, elapsed: float) -> bool:
        enough = limits.requests is not None and num_started >= limits.requests
        enough = enough or (limits.until_error and level.failed)
        return enough or (limits.seconds is not None and elapsed >= limits.seconds)

    async def measure(self, level: Level, start: float, on_sample: OnSample) -> None:
        sent = self.clock.now()
        sample = Sample(next(self.numbers), sent - start)
        try:
            async for at, piece in self.send(sample.index):
                sample.take(at - sent, piece)
            if self.want_audio and not sample.packets:
                raise RequestFailed("no audio", "the answer had no speech")
        except RequestFailed as e:
            sample.error = e.reason
            sample.message = str(e)
            level.failed = True
        sample.end = self.clock.now() - sent
        level.samples.append(sample)
        on_sample(sample)
