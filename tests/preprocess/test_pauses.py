"""Segments end where speech pauses, and their times are those of what is loud."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from stretto.preprocess.pauses import LONGEST_S, MARGIN_S, Pcm, SpeechSegment, segments
from tests.server.realtime.sounds import speech

RATE = 16_000
NOISE = 30.0


def sound(*parts: tuple[float, float], noise: float = NOISE) -> Pcm:
    """Each part: seconds of speech, and of a pause behind it."""
    pieces = []
    for i, (spoken, pause) in enumerate(parts):
        pieces += [8000 * speech(spoken, RATE, seed=i), np.zeros(round(pause * RATE), np.float32)]
    whole = np.concatenate(pieces)
    return (whole + np.random.default_rng(0).normal(0, noise, len(whole))).astype(np.int16)


def loud(found: list[SpeechSegment]) -> list[tuple[float, float]]:
    return [(s.loud_start / RATE, s.loud_stop / RATE) for s in found]


def check(found: list[SpeechSegment], samples: Pcm) -> None:
    at = 0
    for s in found:
        assert at <= s.start <= s.loud_start < s.loud_stop <= s.stop <= len(samples)
        assert s.loud_start - s.start <= MARGIN_S * RATE
        assert s.stop - s.loud_stop <= MARGIN_S * RATE
        assert s.loud_stop - s.loud_start <= LONGEST_S * RATE
        at = s.stop


def test_sentences() -> None:
    samples = sound((3.5, 0.8), (4.0, 5.0), (3.2, 0.1))
    found = segments(samples, RATE)
    check(found, samples)
    expected = [(0.0, 3.5), (4.3, 8.3), (13.3, 16.5)]
    np.testing.assert_allclose(loud(found), expected, atol=0.12)
    assert found[0].stop == found[1].start == pytest.approx(3.9 * RATE, abs=0.07 * RATE)
    assert found[2].start / RATE == pytest.approx(12.3, abs=0.07), "a long pause is left out"


def test_short_words_stay_together_and_short_pauses_do_not_end_a_sentence() -> None:
    samples = sound((0.6, 0.9), (0.6, 0.9), (2.0, 0.4), (2.0, 1.0), (3.0, 0))
    found = segments(samples, RATE)
    check(found, samples)
    np.testing.assert_allclose(loud(found), [(0, 7.4), (8.4, 11.4)], atol=0.12)


def test_without_a_long_pause_the_longest_one_is_taken() -> None:
    samples = sound((2.5, 0.35), (2.5, 0.5), (2.5, 0.35), (2.5, 0.35), (2.5, 0))
    found = segments(samples, RATE)
    check(found, samples)
    np.testing.assert_allclose(loud(found)[0], (0, 5.35), atol=0.12)


def test_without_any_pause_it_is_cut_where_it_is_quietest() -> None:
    samples = np.random.default_rng(0).normal(0, 5000, 25 * RATE).astype(np.int16)
    samples[9 * RATE : 9 * RATE + RATE // 100] = 0
    found = segments(samples, RATE)
    check(found, samples)
    assert found[0].stop == found[1].start == pytest.approx(9 * RATE, abs=0.02 * RATE)
    assert found[-1].stop == len(samples)
    assert all(a.stop == b.start for a, b in pairwise(found)), "nothing is lost"


@pytest.mark.parametrize("level", [0.02, 1.0, 4.0])
def test_it_does_not_depend_on_loudness(level: float) -> None:
    samples = sound((3.5, 0.8), (4.0, 0.8))
    changed = (level * samples).clip(-32768, 32767).astype(np.int16)
    np.testing.assert_allclose(
        loud(segments(changed, RATE)), loud(segments(samples, RATE)), atol=0.12
    )


def test_pauses_are_found_in_noise() -> None:
    samples = sound((3.5, 0.8), (4.0, 0.8), noise=100)
    np.testing.assert_allclose(loud(segments(samples, RATE)), [(0, 3.5), (4.3, 8.3)], atol=0.2)


@pytest.mark.parametrize("length", [0, 1, 100, RATE])
def test_silence_has_none(length: int) -> None:
    assert segments(np.zeros(length, np.int16), RATE) == []


@pytest.mark.parametrize("pauses", [[1.0], np.arange(0.59, 0.3, -0.01)], ids=["same", "shrinking"])
def test_there_are_not_too_many_for_a_message(pauses: list[float]) -> None:
    """Clicks: a segment stands for three seconds at least, also where each pause is shorter than
    the one before."""
    samples = np.zeros(600 * RATE, np.int16)
    at = 0
    for i in range(2000):
        samples[at : at + 200] = 10_000
        at += round(RATE * pauses[i % len(pauses)])
    assert len(segments(samples, RATE)) <= 200
