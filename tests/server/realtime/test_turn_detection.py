"""When a turn begins and ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.server.realtime.options import TurnSettings
from stretto.server.realtime.turn_detection import Pauses, Signal, TurnDetector

S, Q = 0.9, 0.0


def signals(detector: TurnDetector, *probabilities: float) -> list[tuple[int, str]]:
    return [(i, s.value) for i, p in enumerate(probabilities) for s in detector.feed(p)]


def test_a_turn() -> None:
    detector = TurnDetector(Pauses(0.5, 4800, short=3, end=6))
    probabilities = [Q, S, Q, S, S, S, Q, Q, S, Q, Q, Q, Q, S, Q, Q, Q, Q, Q, Q, Q, Q]
    assert signals(detector, *probabilities) == [
        (4, "started"),  # a click at 1 is not speech
        (11, "paused"),
        (13, "resumed"),
        (16, "paused"),
        (19, "stopped"),
    ]
    assert not detector.speaking


def test_speech_goes_on_somewhat_below_the_threshold() -> None:
    detector = TurnDetector(Pauses(0.5, 0, short=2, end=2))
    assert signals(detector, 0.5, 0.5, 0.36, 0.36, 0.36, 0.34, 0.34) == [
        (1, "started"), (6, "paused"), (6, "stopped"),
    ]  # fmt: skip
    assert signals(detector, 0.49, 0.49, 0.49) == []


def test_pauses_of_settings() -> None:
    pauses = TurnSettings().pauses
    assert (pauses.threshold, pauses.prefix, pauses.short, pauses.end) == (0.5, 4800, 7, 16)
    assert TurnSettings(silence_duration_ms=0).pauses.end == 1
    assert (
        TurnSettings(silence_duration_ms=100).pauses.short
        == TurnSettings(silence_duration_ms=100).pauses.end
        == 4
    )
    ends = [
        TurnSettings("semantic_vad", eagerness=e).pauses.end
        for e in ("high", "auto", "medium", "low")
    ]  # type: ignore[arg-type]
    assert ends == [13, 25, 25, 50]


@given(st.lists(st.floats(0, 1), max_size=200), st.integers(1, 5), st.integers(0, 5))
def test_every_sequence_is_a_sequence_of_turns(
    probabilities: list[float], short: int, more: int
) -> None:
    allowed = {
        None: {Signal.STARTED},
        Signal.STARTED: {Signal.PAUSED},
        Signal.PAUSED: {Signal.RESUMED, Signal.STOPPED},
        Signal.RESUMED: {Signal.PAUSED},
        Signal.STOPPED: {Signal.STARTED},
    }
    detector, last = TurnDetector(Pauses(0.5, 0, short, short + more)), None
    for probability in probabilities:
        for signal in detector.feed(probability):
            assert signal in allowed[last]
            last = signal
        assert detector.speaking == (last not in (None, Signal.STOPPED))


def test_reset() -> None:
    detector = TurnDetector(Pauses(0.5, 0, 2, 4))
    assert signals(detector, S, S)
    detector.reset()
    assert signals(detector, S) == []
    assert signals(detector, S) == [(0, "started")]


def test_a_pause_that_is_cut_short_while_it_lasts() -> None:
    detector = TurnDetector(Pauses(0.5, 0, short=7, end=20))
    assert signals(detector, S, S, Q, Q, Q) == [(1, "started")]
    detector.pauses = Pauses(0.5, 0, short=2, end=5)
    assert signals(detector, Q, Q) == [(0, "paused"), (1, "stopped")]


@pytest.mark.parametrize("end", [1, 2, 9])
def test_a_turn_always_pauses_before_it_stops(end: int) -> None:
    detector = TurnDetector(Pauses(0.5, 0, min(7, end), end))
    assert [s for _, s in signals(detector, S, S, *[Q] * 10)] == ["started", "paused", "stopped"]
