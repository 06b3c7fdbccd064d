"""What every detector of speech promises, and the thread that runs one for all sessions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from stretto.errors import StrettoError
from stretto.server.realtime import vad as module
from stretto.server.realtime.vad import WINDOW, Batcher, Float, Silero, VadState
from tests.server.realtime.loudness_vad import LoudnessVad
from tests.server.realtime.sounds import silence, speech

Make = Callable[[], Silero]


@pytest.fixture(params=[Silero, LoudnessVad], scope="module")
def model(request: pytest.FixtureRequest) -> Silero:
    made: Silero = request.param()
    return made


def windows(sound: Float) -> Float:
    count = len(sound) // WINDOW
    return sound[: count * WINDOW].reshape(count, WINDOW)


def listen(model: Silero, sound: Float) -> Float:
    state = VadState()
    return np.concatenate([model.run(w[None], [state]) for w in windows(sound)])


def test_speech_is_speech_and_silence_is_not(model: Silero) -> None:
    found = listen(model, np.concatenate([silence(0.512), speech(1.024), silence(1.024)]))
    assert (found[:15] < 0.35).all()
    assert (found[18:46] > 0.5).all()
    assert (found[52:] < 0.35).all()


def test_noise_that_is_not_loud_is_not_speech(model: Silero) -> None:
    noise = np.random.default_rng(0).normal(0, 0.005, 16_000).astype(np.float32)
    assert (listen(model, noise)[4:] < 0.35).all()


def test_streams_side_by_side_do_not_hear_each_other(model: Silero) -> None:
    sounds = [
        speech(0.8, seed=1),
        silence(0.8),
        np.concatenate([silence(0.4), speech(0.4, seed=2)]),
    ]
    alone = [listen(model, s) for s in sounds]
    states = [VadState() for _ in sounds]
    cut = [windows(s) for s in sounds]
    together = np.stack(
        [model.run(np.stack([c[i] for c in cut]), states) for i in range(len(cut[0]))], axis=1
    )
    for one, among_others in zip(alone, together, strict=True):
        assert np.allclose(one, among_others, atol=1e-4)


def test_a_forgotten_stream_is_a_new_one(model: Silero) -> None:
    state = VadState()
    for w in windows(speech(0.5)):
        model.run(w[None], [state])
    state.forget()
    sound = windows(speech(0.3, seed=3))
    again = np.concatenate([model.run(w[None], [state]) for w in sound])
    assert np.allclose(again, listen(model, speech(0.3, seed=3)), atol=1e-5)


def test_long_silence_is_forgotten() -> None:
    model, state = Silero(), VadState()
    for w in windows(silence(2.0)):
        model.run(w[None], [state])
    assert state.memory.any()
    model.run(windows(silence(0.032)), [state])
    assert not state.memory.any()
    assert state.silence == 0


def test_torch_stays_out() -> None:
    code = (
        "import sys; from stretto.server.realtime.vad import Silero; Silero(); assert 'torch' not "
        "in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_batcher_gives_what_the_model_gives() -> None:
    async def main() -> None:
        batcher = Batcher(LoudnessVad)
        sounds = [windows(np.concatenate([silence(0.1 * i), speech(0.5)])) for i in range(5)]
        got = await asyncio.gather(*(batcher.run(VadState(), s) for s in sounds))
        for one, sound in zip(got, sounds, strict=True):
            assert np.array_equal(one, LoudnessVad().run(sound, [VadState()] * len(sound)))
        assert len(await batcher.run(VadState(), windows(silence(0)))) == 0
        batcher.close()

    asyncio.run(main())


def test_long_sounds_do_not_keep_short_ones_waiting() -> None:
    order: list[str] = []

    class Slow(LoudnessVad):
        def run(self, windows: Float, states: Sequence[VadState]) -> Float:
            started.wait()
            return super().run(windows, states)

    started = threading.Event()

    async def main() -> None:
        batcher = Batcher(Slow)

        async def one(name: str, count: int) -> None:
            await batcher.run(VadState(), np.zeros((count, WINDOW), np.float32))
            order.append(name)

        long = asyncio.create_task(one("long", 2000))
        await asyncio.sleep(0)
        short = asyncio.create_task(one("short", 1))
        await asyncio.sleep(0)
        started.set()
        await asyncio.gather(long, short)
        assert batcher.rounds == 2000  # the short one came along
        batcher.close()

    asyncio.run(main())
    assert order == ["short", "long"]


def test_turns_are_taken_when_there_are_more_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BATCH", 2)
    order: list[str] = []
    go = threading.Event()

    class Slow(LoudnessVad):
        def run(self, windows: Float, states: Sequence[VadState]) -> Float:
            go.wait()
            return super().run(windows, states)

    async def main() -> None:
        batcher = Batcher(Slow)

        async def one(name: str, count: int) -> None:
            await batcher.run(VadState(), np.zeros((count, WINDOW), np.float32))
            order.append(name)

        work = [
            asyncio.create_task(one(n, c))
            for n, c in (("long", 500), ("long", 500), ("short", 2), ("short", 2))
        ]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*work)
        batcher.close()

    asyncio.run(main())
    assert order == ["short", "short", "long", "long"]


def test_what_fails_is_told_and_the_thread_goes_on() -> None:
    async def main() -> None:
        calls = 0

        def load() -> Silero:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise OSError("no such file")
            return LoudnessVad()

        batcher = Batcher(load)
        with pytest.raises(StrettoError, match="no such file"):
            await batcher.run(VadState(), np.zeros((1, WINDOW), np.float32))
        assert len(await batcher.run(VadState(), np.zeros((1, WINDOW), np.float32))) == 1
        batcher.close()

    asyncio.run(main())
