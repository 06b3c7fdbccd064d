"""Which words were heard, and the clock of a player."""

from hypothesis import given
from hypothesis import strategies as st

from stretto.server.realtime.playback_estimate import (
    PlaybackClock,
    Speech,
    played_text,
    reading_time,
)

TEXT = "one two three four five six seven eight nine ten"


def test_played_text_is_the_share_of_sound_in_whole_words() -> None:
    assert played_text(TEXT, 0.0, 10.0, True) == ""
    assert played_text(TEXT, 10.0, 10.0, True) == TEXT
    assert played_text(TEXT, 99.0, 10.0, True) == TEXT
    half = played_text(TEXT, 5.0, 10.0, True)
    assert half == "one two three four five"
    assert played_text(TEXT, 0.5, 10.0, True) == ""  # not one whole word


def test_text_that_runs_ahead_of_its_sound_was_not_heard() -> None:
    # All the text is there, and half a second of its sound: not all of it was heard.
    played = played_text(TEXT, 0.5, 0.5, False)
    assert played == "one two"
    assert reading_time(played) <= 0.5
    # Slow speech: more sound than the text should take. The share is of what was made.
    assert played_text("one two", 3.0, 6.0, False) == "one"


def test_fast_speech_has_more_words_in_the_same_time() -> None:
    assert Speech(TEXT, 5.0, True, speed=2.0).played_text(2.5) == "one two three four five"
    # Not all of its sound was sent: at twice the speed, half a second is a second of reading.
    fast = Speech(TEXT, 0.5, False, speed=2.0)
    assert fast.played_text(0.5) == played_text(TEXT, 1.0, 1.0, False)


def test_signs_count_one_by_one() -> None:
    assert played_text("你好世界", 1.0, 2.0, True) == "你好"
    assert played_text("你好, hello there", 10.0, 10.0, True) == "你好, hello there"


@given(st.text(max_size=200), st.floats(0, 30), st.floats(0, 30), st.booleans())
def test_always_a_beginning_and_more_with_time(
    text: str, a: float, b: float, complete: bool
) -> None:
    short, long = sorted((a, b))
    first, second = (
        played_text(text, short, 20.0, complete),
        played_text(text, long, 20.0, complete),
    )
    assert text.startswith(second)
    assert second.startswith(first)


def test_player_waits_when_it_has_nothing() -> None:
    now = 100.0
    player = PlaybackClock(lambda: now)
    assert (player.played_s, player.lead) == (0.0, 0.0)
    player.add(1.0)
    now = 100.4
    assert round(player.played_s, 6) == 0.4
    now = 103.0  # dry for two seconds
    assert player.played_s == 1.0
    player.add(2.0)
    now = 103.5
    assert round(player.played_s, 6) == 1.5
    assert round(player.lead, 6) == 1.5
