"""Speech at another speed: as long as asked, at the same pitch, and the same however it is cut into
pieces."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator

import numpy as np
import pytest

from stretto.engine.events import AudioChunk, CodeFrames, Event, Finished, TextDelta, Usage
from stretto.engine.time_scaling import Samples, TimeScaler, at_speed
from tests.server.realtime.sounds import speech

RATE = 24_000
SPEEDS = (0.25, 0.5, 0.8, 1.1, 1.5, 2.0, 3.3, 4.0)


def voice(seconds: float, pitch: float = 140.0) -> Samples:
    """A vowel of a constant pitch."""
    t = np.arange(int(seconds * RATE)) / RATE
    waves = (np.sin(2 * np.pi * pitch * h * t + h) / h for h in range(1, 12))
    return (0.2 * sum(waves)).astype(np.float32)


def scaled(samples: Samples, speed: float, sizes: list[int] | None = None) -> Samples:
    scaler = TimeScaler(speed, RATE)
    cuts = np.cumsum(sizes or [len(samples)])[:-1]
    return np.concatenate([*map(scaler.feed, np.split(samples, cuts)), scaler.finish()])


def pitch_of(samples: Samples) -> float:
    """By autocorrelation: the period after which the sound is most like itself."""
    middle = samples[len(samples) // 4 : 3 * len(samples) // 4].astype(np.float64)
    likeness = np.fft.irfft(np.abs(np.fft.rfft(middle, 2 * len(middle))) ** 2)
    shortest, longest = RATE // 400, RATE // 60
    return RATE / (shortest + int(np.argmax(likeness[shortest:longest])))


@pytest.mark.parametrize("speed", SPEEDS)
def test_length_changes_and_pitch_stays(speed: float) -> None:
    sound = voice(3.0)
    faster = scaled(sound, speed)
    assert len(faster) == round(len(sound) / speed)
    assert pitch_of(faster) == pytest.approx(pitch_of(sound), rel=0.01)
    middle = slice(len(faster) // 4, 3 * len(faster) // 4)
    assert np.sqrt(np.mean(faster[middle] ** 2)) == pytest.approx(
        np.sqrt(np.mean(sound**2)), rel=0.05
    ), "periods fit together: blocks that do not would cancel out"


@pytest.mark.parametrize("speed", SPEEDS)
def test_however_it_is_cut_it_is_the_same(speed: float) -> None:
    rng = np.random.default_rng(0)
    for most, seconds in ((1, 0.2), (300, 2.0), (20_000, 2.0)):
        sound = speech(seconds, RATE)
        whole = scaled(sound, speed)
        sizes = []
        while sum(sizes) < len(sound):
            sizes.append(min(int(rng.integers(1, most + 1)) + most // 2, len(sound) - sum(sizes)))
        assert np.array_equal(scaled(sound, speed, sizes), whole)


@pytest.mark.parametrize("speed", SPEEDS)
def test_the_first_packet_yields_sound_at_every_speed(speed: float) -> None:
    """A vocoder's first packet has 1,365 samples: of these all that the next packet cannot change
    is played."""
    first = TimeScaler(speed, RATE).feed(voice(1.0)[:1365])
    assert len(first) >= min(1365 / speed - 1200, 600) or speed > 2
    assert len(first) > 0


@pytest.mark.parametrize("samples", [0, 1, 299, 300, 301, 1365, 5000])
@pytest.mark.parametrize("speed", [0.25, 1.5, 4.0])
def test_short_sounds(samples: int, speed: float) -> None:
    assert len(scaled(voice(1.0)[:samples], speed)) == round(samples / speed)


def test_what_is_long_is_not_held() -> None:
    scaler = TimeScaler(1.3, RATE)
    for _ in range(100):
        scaler.feed(voice(0.5))
    assert len(pickle.dumps(scaler)) < 8 * 0.2 * RATE + 4096, "a fifth of a second, in float64"


def test_silence_stays_silence_and_sound_is_not_skipped() -> None:
    sound = np.concatenate([np.zeros(RATE, np.float32), voice(1.0), np.zeros(RATE, np.float32)])
    slow = scaled(sound, 0.5)
    loud = np.flatnonzero(np.abs(slow) > 0.05) / RATE
    assert loud[0] == pytest.approx(2.0, abs=0.03)
    assert loud[-1] == pytest.approx(4.0, abs=0.03)


# ---- of an answer


def answer(sound: Samples) -> list[Event]:
    half = len(sound) // 2
    return [
        TextDelta((1,), "Hello"),
        AudioChunk(0, sound[:half]),
        CodeFrames(0, np.zeros((1, 16), np.int32)),
        AudioChunk(half, sound[half:]),
        Finished("stop", "stop", Usage(1, 1, 12, len(sound)), 7),
    ]


def heard(events: list[Event]) -> list[Event]:
    closed = []

    async def source() -> AsyncIterator[Event]:
        try:
            for event in events:
                yield event
        finally:
            closed.append(True)

    async def collect() -> list[Event]:
        return [e async for e in at_speed(source(), 1.5, RATE)]

    found = asyncio.run(collect())
    assert closed
    return found


def test_the_sound_of_an_answer_and_nothing_else_changes() -> None:
    sound = speech(1.0, RATE)
    given = answer(sound)
    events = heard(given)
    chunks = [e for e in events if isinstance(e, AudioChunk)]
    assert np.array_equal(np.concatenate([c.samples for c in chunks]), scaled(sound, 1.5))
    ends = np.cumsum([len(c.samples) for c in chunks]).tolist()
    assert [c.start for c in chunks] == [0, *ends[:-1]], "chunks tile the stream"
    assert [e for e in events if isinstance(e, TextDelta | CodeFrames)] == [given[0], given[2]]
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.usage.frames, end.usage.samples) == (12, ends[-1])


def test_speed_1_costs_nothing() -> None:
    async def source() -> AsyncIterator[Event]:
        yield TextDelta((1,), "Hello")

    events = source()
    assert at_speed(events, 1.0, RATE) is events


def test_closing_it_closes_the_answer() -> None:
    closed = []

    async def source() -> AsyncIterator[Event]:
        try:
            yield TextDelta((1,), "Hello")
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def leave() -> None:
        events = at_speed(source(), 2.0, RATE)
        assert await anext(events)
        await events.aclose()  # type: ignore[attr-defined]
        assert closed

    asyncio.run(leave())
