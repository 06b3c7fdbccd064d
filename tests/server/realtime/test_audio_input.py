"""A session's input: however the sound is cut into events, the same turns are found, with the same
sound."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import soxr

from stretto.server.realtime.audio_formats import Float
from stretto.server.realtime.audio_input import AT_ONCE, AudioInput
from stretto.server.realtime.options import TurnSettings
from stretto.server.realtime.turn_detection import WINDOW, Signal
from stretto.server.realtime.vad import Batcher
from tests.server.realtime.loudness_vad import LoudnessVad
from tests.server.realtime.sounds import pcm, silence, speech
from tests.server.scripted_engine import ScriptedEngine
from tests.server.scripted_session import ScriptedSession

Log = list[tuple[str, int, int]]


def sound(seed: int) -> bytes:
    """Speech with short and long pauses; more than is processed in one go."""
    rng = random.Random(seed)
    parts: list[Float] = []
    for i in range(6):
        parts += [speech(rng.uniform(0.1, 0.9), seed=i), silence(rng.choice((0.1, 0.3, 0.45, 0.8)))]
    data = pcm(*parts)
    return data * (1 + 2 * AT_ONCE // len(data))


async def detect(data: bytes, cuts: list[int]) -> tuple[Log, list[Float]]:
    """Signals, each with where it came and how much the engine had by then; and the sound of each
    turn."""
    session: Any = ScriptedSession(ScriptedEngine())
    batcher = Batcher(LoudnessVad)
    audio_input = AudioInput(session, batcher, TurnSettings(), "audio/pcm")
    log: Log = []
    turns: list[Float] = []

    try:
        for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            async for signal in audio_input.append(data[start:stop]):
                assert audio_input.turn is not None
                log.append((signal.value, audio_input.position, session.pending))
                if signal is Signal.STOPPED:
                    item = await session.commit()
                    turns.append(item.message["content"][0]["data"])
                    assert len(turns[-1]) == audio_input.turn.stop - audio_input.turn.start
    finally:
        batcher.close()
    return log, turns


@pytest.mark.parametrize("seed", range(3))
def test_pieces_make_no_difference(seed: int) -> None:
    data, rng = sound(seed), random.Random(seed)
    by_window, sounds = asyncio.run(detect(data, list(range(3 * WINDOW, len(data), 3 * WINDOW))))
    kinds = [kind for kind, _, _ in by_window]
    assert {"started", "paused", "resumed", "stopped"} == set(kinds)
    for cuts in ([], sorted(rng.sample(range(1, len(data)), 20))):
        log, turns = asyncio.run(detect(data, cuts))
        assert log == by_window
        for one, other in zip(turns, sounds, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_handler_that_fails_ends_the_turn_all_the_same() -> None:
    async def run() -> None:
        batcher = Batcher(LoudnessVad)
        session: Any = ScriptedSession(ScriptedEngine())
        audio_input = AudioInput(session, batcher, TurnSettings(), "audio/pcm")

        async def fail_at_stop() -> None:
            async with aclosing(audio_input.append(pcm(speech(0.5), silence(0.8)))) as signals:
                async for signal in signals:
                    if signal is Signal.STOPPED:
                        raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await fail_at_stop()
        assert audio_input.turn is None
        before = audio_input.held_bytes
        assert [s async for s in audio_input.append(pcm(silence(5.0)))] == []
        assert audio_input.held_bytes <= before + 24_000, "silence is not kept"
        batcher.close()

    asyncio.run(run())


def test_detection_goes_off_and_on_again_in_mid_speech() -> None:
    """Nothing of the sound is lost, said twice or out of its order, whichever way its end is
    found."""
    first, second, third = (speech(s, seed=i) for i, s in enumerate((0.71, 0.53, 0.6)))

    async def run() -> tuple[Float, Float, tuple[int, int], int]:
        batcher = Batcher(LoudnessVad)
        session: Any = ScriptedSession(ScriptedEngine())
        audio_input = AudioInput(session, batcher, TurnSettings(), "audio/pcm")
        spans: list[tuple[int, int]] = []

        async def append(sound: bytes) -> None:
            async for signal in audio_input.append(sound):
                if signal is Signal.STOPPED:
                    assert audio_input.turn is not None
                    spans.append((audio_input.turn.start, audio_input.turn.stop))
                    await session.commit()

        await append(pcm(first))
        assert audio_input.turn is not None
        audio_input.configure(None, "audio/pcm")
        assert audio_input.turn is None
        before = audio_input.held_bytes
        await append(b"")
        assert audio_input.held_bytes == before
        await append(pcm(second))
        await audio_input.finish()
        by_hand = await session.commit()
        await audio_input.finish()
        assert session.pending == 0, "what was committed is not there again"
        await append(pcm(second))
        audio_input.configure(TurnSettings(), "audio/pcm")
        await append(pcm(third, silence(0.8)))
        batcher.close()
        item = session.items[-1]
        return (
            by_hand.message["content"][0]["data"],
            item.message["content"][0]["data"],
            spans[0],
            audio_input.position,
        )

    by_hand, by_turn, span, position = asyncio.run(run())
    whole = np.frombuffer(pcm(first) + pcm(second), "<i2").astype(np.float32) / 32768
    expected = soxr.resample(whole, 24_000, 16_000, quality="LQ")
    assert abs(len(by_hand) - len(expected)) <= 1
    size = min(len(by_hand), len(expected))
    np.testing.assert_allclose(by_hand[:size], expected[:size], atol=1e-3)
    assert len(by_turn) == span[1] - span[0], "all of the turn is counted"
    assert len(by_turn) > len(second) + len(third)
    assert span[1] <= position
