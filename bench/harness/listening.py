"""How many listeners a server can have at once: each hears an answer to its end before it asks for
the next; and closed loops whose streams do not begin together.

In a closed loop a stream asks again as soon as its answer is made: long before it has been heard,
where speech is made faster than it is played. Listeners ask at the pace of players, and begin
spread over the length of an answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import ceil

from stretto.loadtest.player import play
from stretto.loadtest.runner import Bench, Closed, Level, OnSample, Targets, ignore


@dataclass(frozen=True, slots=True)
class Listening(Closed):
    """`streams` listeners, each of whom asks again when the answer has been heard."""

    answer_s: float = 0.0  # how long one sounds: the first requests are spread over this time

    def __str__(self) -> str:
        return f"{self.streams} listeners"


@dataclass(frozen=True, slots=True)
class Staggered(Closed):
    """A closed loop whose streams begin one after another. With answers of one length they stay
    apart; streams that begin together send all their prompts together, again and again."""

    over_s: float = 0.0  # from the first stream to where the next one after the last would begin


class Listeners(Bench):
    """A `Bench` that can do this too."""

    async def closed(
        self, level: Level, streams: int, limits: Targets, on_sample: OnSample = ignore
    ) -> None:
        if isinstance(level.load, Staggered):
            await self.staggered(level, level.load, limits, on_sample)
            return
        if not isinstance(level.load, Listening):
            await super().closed(level, streams, limits, on_sample)
            return
        start, over = self.clock.now(), limits.seconds or 0.0

        async def listener(at: float) -> None:
            while at < over:
                await self.clock.sleep_until(start + at)
                sent = self.clock.now() - start
                heard = await self._listen(level, start, on_sample)
                at = max(self.clock.now() - start, sent + heard)

        async with asyncio.TaskGroup() as group:
            for i in range(streams):
                group.create_task(listener(level.load.answer_s * i / streams))

    async def staggered(
        self, level: Level, load: Staggered, limits: Targets, on_sample: OnSample
    ) -> None:
        start, begun = self.clock.now(), itertools.count()

        async def stream(at: float) -> None:
            await self.clock.sleep_until(start + at)
            while not self.over(level, limits, next(begun), self.clock.now() - start):
                await self.measure(level, start, on_sample)

        async with asyncio.TaskGroup() as group:
            for i in range(load.streams):
                group.create_task(stream(load.over_s * i / load.streams))

    async def _listen(self, level: Level, start: float, on_sample: OnSample) -> float:
        """One answer: seconds from the request until its last sample has been played."""
        own = Level(level.load)
        await self.measure(own, start, on_sample)
        level.samples.extend(own.samples)
        heard = play(own.samples[0].packets)
        return heard.stop if heard is not None else 0.0


def smooth(level: Level) -> bool:
    """Every request was answered, and no player that starts at the first packet had an underrun."""
    played = [play(s.packets) for s in level.samples]
    whole = not level.interrupted and bool(level.samples) and len(level.good) == len(level.samples)
    return whole and all(p is not None and not p.underruns for p in played)


async def highest(
    probe: Callable[[int], Awaitable[bool]], known: int, guess: int, probes: int, most: int
) -> int:
    """The highest number found to pass, `known` being known to: from a guess upwards by quarters
    while it passes, else halfway between what passed and what did not, until these are within a
    tenth or there were enough probes."""
    low, high = known, most + 1
    at = min(max(guess, low + 1), most)
    for _ in range(probes):
        if not low < at < high:
            break
        if await probe(at):
            low = at
        else:
            high = at
        if high > most:
            at = min(max(low + 1, ceil(1.25 * low)), most)
        else:
            at = (low + high) // 2 if high > 1.1 * low else low
    return low
