"""Sound that is heard while it is spoken: in the end, the features of the whole, to the last
bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import MediaError
from stretto.preprocess.live_audio import LiveAudio
from stretto.preprocess.mel import HOP, PAD, mel
from stretto.preprocess.prompt import AudioClip

BINS, WINDOW = 20, 30  # frames


def sound(samples: int, seed: int = 0) -> np.ndarray:
    """That comes and goes, so that the loudest moment is anywhere."""
    rng = np.random.default_rng(seed)
    loud = np.repeat(rng.choice([1e-6, 0.01, 0.5], samples // 700 + 1), 700)[:samples]
    return (loud * rng.uniform(-1, 1, samples)).astype(np.float32)


def digests(clip: AudioClip) -> list[bytes]:
    return [p.digest for p in clip.pieces]


@given(
    st.integers(201, 4 * WINDOW * HOP),
    st.lists(st.integers(1, 9000), min_size=1, max_size=6),
    st.integers(0, 9),
)
def test_pieces_are_those_of_the_whole(samples: int, sizes: list[int], seed: int) -> None:
    whole, hearing = sound(samples, seed), LiveAudio(BINS, WINDOW)
    at = 0
    given_out = 0
    while at < samples:
        size = sizes[at % len(sizes)]
        complete = hearing.push(whole[at : at + size])
        at += size
        heard = hearing.num_samples
        frames = (heard - PAD) // HOP + 1 if heard > PAD else 0
        assert complete == (frames // WINDOW > given_out)
        given_out = frames // WINDOW
        if complete:
            # What was heard so far, as if it were loudest now.
            assert [p.shape for p in hearing.clip().pieces] == [(BINS, WINDOW)] * given_out
    expected = AudioClip.of(mel(whole, BINS), WINDOW)
    clip = hearing.finish()
    assert digests(clip) == digests(expected)
    assert np.array_equal(clip.mel, expected.mel)


def test_louder_sound_changes_only_windows_below_its_floor() -> None:
    size = WINDOW * HOP
    rng = np.random.default_rng(1)
    hearing = LiveAudio(BINS, WINDOW)
    steady = (0.1 * rng.uniform(-1, 1, 3 * size)).astype(np.float32)
    steady[size : 2 * size] *= 1e-5  # far below all that may follow
    hearing.push(steady)
    hearing.push(np.zeros(200, np.float32))
    first, quiet, third = digests(hearing.clip())
    assert digests(hearing.clip()) == [first, quiet, third]
    assert hearing.changed == 0
    hearing.push(rng.uniform(-1, 1, 500).astype(np.float32))
    now = digests(hearing.finish())[:3]
    assert (now[0], now[2]) == (first, third)
    assert now[1] != quiet
    assert hearing.changed == 1


def test_too_little_is_refused_and_more_may_come() -> None:
    hearing = LiveAudio(BINS, WINDOW)
    hearing.push(np.zeros(200, np.float32))
    with pytest.raises(MediaError, match="too short"):
        hearing.finish()
    hearing.push(np.zeros(1, np.float32))
    assert digests(hearing.finish()) == digests(AudioClip.of(mel(np.zeros(201), BINS), WINDOW))


@given(st.integers(201, 3 * WINDOW * HOP), st.integers(0, 2 * WINDOW * HOP), st.integers(0, 9))
def test_one_that_is_finished_leaves_its_fork_as_it_was(early: int, more: int, seed: int) -> None:
    whole, hearing = sound(early + more, seed), LiveAudio(BINS, WINDOW)
    hearing.push(whole[:early])
    hearing.clip()
    fork = hearing.fork()
    assert digests(hearing.finish()) == digests(AudioClip.of(mel(whole[:early], BINS), WINDOW))
    fork.push(whole[early:])
    assert fork.num_samples == early + more
    assert digests(fork.finish()) == digests(AudioClip.of(mel(whole, BINS), WINDOW))
