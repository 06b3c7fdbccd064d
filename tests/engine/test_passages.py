"""Passages read one after another as one answer, by a scripted engine: their order, their sound,
their limits, and what happens when somebody stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from stretto.engine.events import AudioChunk, CodeFrames, Event, Finished, FinishReason, Usage
from stretto.engine.passages import (
    FADE_S,
    LEAD_S,
    PAUSE_S,
    RETRY_S,
    TRIES,
    FrameLimits,
    PassageReader,
    Seam,
    one_ahead,
    with_lead,
)
from stretto.engine.tts import iterate
from stretto.errors import Busy, Invalid, StageDead
from stretto.params import Params
from tests.engine.common import run
from tests.virtual import Virtual, run_virtual

RATE = 24_000
FRAME = 1920
FADE, PAUSE = int(FADE_S * RATE), int(PAUSE_S * RATE)


@dataclass
class Speaker:
    """Says a passage, the number of its frames, in packets of one frame."""

    level: float = 0.5
    said: list[int] = field(default_factory=list)  # begun
    closed: int = 0
    params: list[Params] = field(default_factory=list)
    # raised before a passage of this number is begun, in turn
    wrong: dict[int, list[Exception]] = field(default_factory=dict)
    tail: int = 0  # frames of silence at the end

    async def __call__(self, passage: int, params: Params) -> AsyncIterator[Event]:
        if wrong := self.wrong.get(len(self.said)):
            raise wrong.pop(0)
        self.said.append(passage)
        self.params.append(params)
        count = min(max(passage, params.min_frames), params.max_frames)
        try:
            for i in range(count):
                await asyncio.sleep(0)
                level = 0.0 if i >= count - self.tail else self.level
                yield CodeFrames(i, np.full((1, 16), passage, np.int32))
                yield AudioChunk(FRAME * i, np.full(FRAME, level, np.float32))
            reason: FinishReason = "length" if count < passage else "stop"
            usage = Usage(10, 0, count, FRAME * count)
            yield Finished("stop", reason, usage, 7, prompt_ids=(passage,))
        finally:
            self.closed += 1


def reader(speak: Any, params: Params | None = None) -> PassageReader[int]:
    given = params or Params()
    return PassageReader(speak, FrameLimits(given, for_whole_text=params is not None), RATE)


def events_of(speak: Any, passages: list[int], params: Params | None = None) -> list[Event]:
    async def main() -> list[Event]:
        return [e async for e in reader(speak, params).read(iterate(passages))]

    return run(main())


def wave(events: list[Event]) -> np.ndarray:
    """The sound, after checking that its chunks tile."""
    found: list[np.ndarray] = []
    for e in events:
        if isinstance(e, AudioChunk):
            assert e.start == sum(map(len, found))
            found.append(e.samples)
    return np.concatenate(found)


def end(events: list[Event]) -> Finished:
    finished = [e for e in events if isinstance(e, Finished)]
    assert finished == events[-1:]
    return finished[0]


def test_one_passage_sounds_as_alone() -> None:
    events = events_of(Speaker(), [3])
    assert np.array_equal(wave(events), np.full(3 * FRAME, 0.5, np.float32))
    assert end(events).usage == Usage(10, 0, 3, 3 * FRAME)


def test_where_passages_meet_there_is_no_step_and_a_pause() -> None:
    sound = wave(events_of(Speaker(), [2, 3]))
    assert len(sound) == 5 * FRAME + PAUSE
    first = 2 * FRAME
    assert np.all(sound[: first - FADE] == 0.5)
    assert np.all(sound[first : first + PAUSE] == 0)
    assert np.all(sound[first + PAUSE + FADE :] == 0.5)
    assert np.abs(np.diff(sound)).max() < 1.1 * 0.5 / FADE


def test_silence_at_a_passage_end_counts_towards_the_pause() -> None:
    sound = wave(events_of(Speaker(tail=1), [2, 2]))
    assert len(sound) == 4 * FRAME + PAUSE - FRAME
    assert len(wave(events_of(Speaker(tail=9), [9, 9]))) == 18 * FRAME


def test_counts_are_added_and_codes_go_on() -> None:
    events = events_of(Speaker(), [2, 3, 1])
    assert [e.start for e in events if isinstance(e, CodeFrames)] == list(range(6))
    usage = end(events).usage
    assert (usage.prompt_tokens, usage.frames) == (30, 6)
    assert usage.samples == len(wave(events))
    assert (end(events).audio, end(events).prompt_ids) == ("stop", (2,))


def test_sound_does_not_depend_on_its_packets() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal(700).astype(np.float32) for _ in range(3)]

    def joined(size: int) -> np.ndarray:
        seam = Seam(RATE)
        chunks: list[AudioChunk | None] = []
        for i, part in enumerate(parts):
            chunks += [seam.join()] if i else []
            chunks += [seam.push(part[j : j + size]) for j in range(0, len(part), size)]
        return np.concatenate([c.samples for c in [*chunks, seam.finish()] if c is not None])

    for size in (1, 50, 333):
        assert np.array_equal(joined(size), joined(700))


# ---- limits


def test_a_callers_limit_is_that_of_the_whole_text() -> None:
    speaker = Speaker()
    events = events_of(speaker, [3, 3, 3], Params(max_frames=5))
    assert (end(events).usage.frames, end(events).audio) == (5, "length")
    assert speaker.said == [3, 3]
    events = events_of(Speaker(), [3, 2, 3], Params(max_frames=5))
    assert (end(events).usage.frames, end(events).audio) == (5, "length"), "a passage was left"
    assert end(events_of(Speaker(), [3, 2], Params(max_frames=5))).audio == "stop"


def test_the_checkpoints_limit_is_that_of_a_passage() -> None:
    speaker = Speaker()

    async def main() -> list[Event]:
        limits = FrameLimits(Params(max_frames=4), for_whole_text=False)
        return [e async for e in PassageReader(speaker, limits, RATE).read(iterate([9, 3]))]

    events = run(main())
    assert (end(events).usage.frames, end(events).audio) == (7, "length")


def test_a_least_length_is_that_of_the_whole_text() -> None:
    speaker = Speaker()
    events = events_of(speaker, [2, 1, 1], Params(min_frames=5, max_frames=9))
    assert [p.min_frames for p in speaker.params] == [5, 0, 0]
    assert end(events).usage.frames == 7


# ---- what goes wrong


def test_a_text_of_which_nothing_can_be_said() -> None:
    with pytest.raises(Invalid, match="nothing in this text"):
        events_of(Speaker(), [])


def test_a_later_passage_waits_for_room_and_the_first_does_not() -> None:
    async def read(clock: Virtual, speaker: Speaker) -> tuple[float, list[Event]]:
        events = [e async for e in reader(speaker).read(iterate([1, 1]))]
        return clock.now - 1000, events

    def refused(passage: int, times: int) -> Speaker:
        return Speaker(wrong={passage: [Busy("full")] * times})

    waited, events = run_virtual(lambda clock: read(clock, refused(1, 3)))
    assert waited == pytest.approx(3 * RETRY_S)
    assert end(events).usage.frames == 2
    for speaker in (refused(0, 1), refused(1, TRIES)):
        with pytest.raises(Busy):
            run_virtual(lambda clock, speaker=speaker: read(clock, speaker))


def test_what_fails_in_its_middle_is_not_begun_again() -> None:
    begun: list[int] = []

    async def fails(passage: int, params: Params) -> AsyncIterator[Event]:
        begun.append(passage)
        yield AudioChunk(0, np.zeros(FRAME, np.float32))
        if passage == 2:
            raise Busy("its listener is too slow")
        yield Finished("stop", "stop", Usage(1, 0, 1, FRAME), 7)

    with pytest.raises(Busy, match="too slow"):
        events_of(fails, [1, 2])
    assert begun == [1, 2]


# ---- ahead of the listener


def led(speaker: Speaker, passages: list[int]) -> AsyncGenerator[Event, None]:
    events = with_lead(reader(speaker).read(iterate(passages)), RATE)
    return cast(AsyncGenerator[Event, None], events)


async def turns(count: int = 200) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_the_next_passage_is_begun_while_there_is_sound_left_to_hear() -> None:
    async def main() -> None:
        speaker = Speaker()
        async with aclosing(led(speaker, [4, 4])) as events:
            async for event in events:
                if isinstance(event, AudioChunk):
                    break
            await turns()
            assert speaker.said == [4, 4], "a second holds all of it"

    run(main())


def test_a_listener_who_stops_stops_the_engine() -> None:
    async def main() -> None:
        speaker = Speaker()
        most = int(LEAD_S * RATE)
        heard = 0
        async with aclosing(led(speaker, [5] * 50)) as events:
            async for event in events:
                if isinstance(event, AudioChunk):
                    heard += len(event.samples)
                    await turns()
                    made = sum(speaker.said) * FRAME
                    assert made <= heard + most + 6 * FRAME
                if heard > 40 * FRAME:
                    break
        assert speaker.closed == len(speaker.said), "and who leaves leaves nothing behind"
        assert len(speaker.said) < 50
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_errors_come_behind_the_events_before_them() -> None:
    found: list[Event] = []

    async def main() -> None:
        async for event in led(Speaker(wrong={1: [StageDead("gone")]}), [2, 2]):
            found.append(event)

    with pytest.raises(StageDead, match="gone"):
        run(main())
    assert len(wave(found)) == 2 * FRAME + PAUSE


def test_what_comes_next_is_made_while_the_last_one_is_used() -> None:
    made: list[int] = []
    closed: list[bool] = []

    async def items() -> AsyncIterator[int]:
        try:
            for i in range(1, 4):
                await asyncio.sleep(0)
                made.append(i)
                yield i
        finally:
            closed.append(True)

    async def main() -> None:
        found: list[int] = []
        async for item in one_ahead(items()):
            await turns(10)
            assert made == list(range(1, min(item + 1, 3) + 1))
            found.append(item)
        assert found == [1, 2, 3]
        made.clear()
        async with aclosing(cast(AsyncGenerator[int, None], one_ahead(items()))) as some:
            assert await anext(some) == 1
        assert closed == [True, True]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
