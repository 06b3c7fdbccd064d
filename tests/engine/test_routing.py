"""Requests are refused rather than queued, and sessions are forgotten, the longest unused first."""

from types import SimpleNamespace
from typing import Any

import pytest

from stretto.engine import router as routing
from stretto.engine.router import Router
from stretto.errors import Busy, StageDead

TEXT, SPEECH = ("writer",), ("writer", "speaker")


class Place:
    """A pipeline as far as the router looks."""

    def __init__(self, up: bool = True, speaks: bool = True) -> None:
        self.up = up
        self.speaks = speaks

    def ready(self, stages: tuple[str, ...]) -> bool:
        return self.up and (self.speaks or stages == TEXT)


def stream(place: Place, pace: float = 9.0) -> Any:
    return SimpleNamespace(pipeline=place, pace=lambda now: pace)


def router(*places: Place, min_pace: float = 0.0) -> Router:
    return Router(places, min_pace)  # type: ignore[arg-type]


def test_speech_needs_more_than_text_does() -> None:
    mute, down = Place(speaks=False), Place(up=False)
    r = router(mute, down)
    assert r.choose(TEXT, False, None, []) is mute
    with pytest.raises(StageDead):
        r.choose(SPEECH, True, None, [])


def test_speech_goes_where_streams_keep_pace() -> None:
    slow, fast = Place(), Place()
    r = router(slow, fast, min_pace=1.0)
    running = [stream(slow, 0.9), stream(slow, 5.0), *[stream(fast, 1.0)] * 3]
    assert r.choose(SPEECH, True, None, running) is fast
    assert r.choose(TEXT, False, None, running) is slow, "text does not mind"
    with pytest.raises(Busy):
        r.choose(SPEECH, True, None, [*running, stream(fast, 0.9)])


def test_sessions_are_forgotten_the_longest_unused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_SESSIONS", 2)
    a, b = Place(), Place()
    r = router(a, b)
    for session in ("s", "t", "s", "u"):
        assert r.choose(SPEECH, True, session, [stream(b)]) is a
    running = [stream(a)] * 2 + [stream(b)]
    assert r.choose(SPEECH, True, "s", running) is a
    assert r.choose(SPEECH, True, "t", running) is b


def test_a_session_stays_where_its_prompts_are_cached() -> None:
    """Least loaded first; a session goes back to where it was, unless that one is down."""
    a, b, c = Place(), Place(), Place()
    r = router(a, b, c)
    running = [stream(a)] * 2 + [stream(c)]
    assert r.choose(SPEECH, True, "s", running) is b
    running += [stream(b)] * 9
    assert r.choose(SPEECH, True, "s", running) is b
    assert r.choose(SPEECH, True, "other", running) is c
    assert r.choose(SPEECH, True, None, running) is c
    b.up = False
    assert r.choose(SPEECH, True, "s", running) is c
    b.up = True
    assert r.choose(SPEECH, True, "s", running) is c
