"""Faster or slower speech at the same pitch: WSOLA (waveform similarity overlap-add, Verhelst and
Roelands 1993), in numpy.

The sound is put together from blocks of 12.5 ms. Each is a cross-fade from what followed the block
before to a place near the one that the speed asks for: of all places within 7.5 ms, the one whose
samples are most like what would have followed. So periods of the voice fit together and none is
stretched. A block depends on samples around its place alone: however a sound is cut into pieces,
the result is the same. The engine hands its events through `at_speed`; the arithmetic runs on
worker threads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from stretto.engine.events import AudioChunk, Event, Finished

Samples = npt.NDArray[np.float32]
BLOCK_S, REACH_S = 0.0125, 0.0075
_SILENT = 1e-9  # energy of a block in which there is nothing to fit together
_POOL = ThreadPoolExecutor(2, "time-scaling")


class TimeScaler:
    """One sound, piece by piece. At speed 2 it lasts half as long."""

    def __init__(self, speed: float, rate: int) -> None:
        self._speed = speed
        self._block = round(BLOCK_S * rate)
        self._reach = round(REACH_S * rate)
        half = (np.arange(self._block, dtype=np.float64) + 0.5) / self._block
        self._rise = np.square(np.sin(0.5 * np.pi * half))
        self._buffer = np.zeros(0)  # what is still needed of it
        self._buffer_start = 0  # position of its first sample
        self._follows = 0  # position of what followed the block before
        self._num_blocks = 0
        self._num_samples = 0  # that came
        self._num_sent = 0

    def feed(self, samples: Samples) -> Samples:
        self._num_samples += len(samples)
        self._buffer = np.concatenate([self._buffer, samples.astype(np.float64)])
        blocks = []
        while self._needed() <= self._num_samples:
            blocks.append(self._next())
        return self._join(blocks)

    def finish(self) -> Samples:
        """The rest. Behind the sound there is silence."""
        length = round(self._num_samples / self._speed)
        self._buffer = np.concatenate([self._buffer, np.zeros(3 * (self._block + self._reach))])
        blocks = []
        while self._num_blocks * self._block < length:
            blocks.append(self._next())
        before = self._num_sent
        return self._join(blocks)[: max(0, length - before)]

    def _join(self, blocks: list[npt.NDArray[np.float64]]) -> Samples:
        self._forget()
        joined = np.concatenate([*blocks, np.zeros(0)]).astype(np.float32)
        self._num_sent += len(joined)
        return joined

    @property
    def _place(self) -> int:
        """Where the next block should come from at this speed."""
        return round(self._num_blocks * self._block * self._speed)

    def _needed(self) -> int:
        """Samples that must be there for the next block: those that it is chosen from, and as many
        as it stands for, so that no more is made than there will be."""
        stands_for = math.ceil((self._num_blocks + 1) * self._block * self._speed)
        return max(stands_for, max(self._place + self._reach, self._follows) + self._block)

    def _next(self) -> npt.NDArray[np.float64]:
        block, follows = self._block, self._follows - self._buffer_start
        natural = self._buffer[follows : follows + block]
        if self._num_blocks == 0:
            self._follows = block
            self._num_blocks = 1
            return natural
        place = self._place - self._buffer_start
        first = place - min(self._reach, self._place)
        near = self._buffer[first : place + self._reach + block]
        best = first + self._best_match(natural, near, place - first)
        chosen = self._buffer[best : best + block]
        self._follows = self._buffer_start + best + block
        self._num_blocks += 1
        return natural + self._rise * (chosen - natural)

    def _best_match(
        self, natural: npt.NDArray[np.float64], near: npt.NDArray[np.float64], place: int
    ) -> int:
        """Where in `near` samples begin that are most like these, loudness apart. Of two that are
        alike, the one nearer to `place`: which of them does not hang on rounding."""
        natural_energy = natural @ natural
        if natural_energy < _SILENT:
            return place
        total = np.concatenate([np.zeros(1), np.cumsum(np.square(near))])
        energy = np.maximum(total[self._block :] - total[: -self._block], _SILENT)
        likeness = np.correlate(near, natural) / np.sqrt(energy * natural_energy)
        distance = np.abs(np.arange(len(likeness)) - place) / self._reach
        return int(np.argmax(likeness - 1e-3 * distance))

    def _forget(self) -> None:
        """Drop the samples that no later block can need."""
        keep = min(self._follows, max(0, self._place - self._reach))
        if keep > self._buffer_start:
            self._buffer = self._buffer[keep - self._buffer_start :]
            self._buffer_start = keep


def at_speed(events: AsyncIterator[Event], speed: float, rate: int) -> AsyncIterator[Event]:
    """The events of an answer with its sound at this speed. At 1 they are the same objects."""
    return events if speed == 1.0 else _scaled(events, TimeScaler(speed, rate))


async def _scaled(events: AsyncIterator[Event], scaler: TimeScaler) -> AsyncIterator[Event]:
    loop = asyncio.get_running_loop()
    at = 0
    async with aclosing(cast(AsyncGenerator[Event, None], events)) as unscaled:
        async for event in unscaled:
            if not isinstance(event, AudioChunk | Finished):
                yield event
                continue
            if isinstance(event, AudioChunk):
                samples = await loop.run_in_executor(_POOL, scaler.feed, event.samples)
            else:
                samples = await loop.run_in_executor(_POOL, scaler.finish)
            if len(samples):
                yield AudioChunk(at, samples)
                at += len(samples)
            if isinstance(event, Finished):
                yield replace(event, usage=replace(event.usage, samples=at))
