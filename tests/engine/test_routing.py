"""Requests are refused rather than queued, and sessions are forgotten, the longest unused first."""

from types import SimpleNamespace
from typing import Any

import pytest

from stretto.config.engine import EngineConfig
from stretto.engine import router as routing
from stretto.engine.router import Router
from stretto.errors import Busy, StageDead

TEXT, SPEECH = ("writer",), ("writer", "speaker")


class Place:
    """A pipeline as far as the router looks."""

    def __init__(self, active: int = 0, up: bool = True, speaks: bool = True) -> None:
        self.active, self.up, self.speaks = active, up, speaks

    def ready(self, stages: tuple[str, ...]) -> bool:
        return self.up and (self.speaks or stages == TEXT)


def stream(place: Place, pace: float) -> Any:
    return SimpleNamespace(pipeline=place, pace=lambda now: pace)


def router(*places: Place, **config: Any) -> Router:
    return Router(places, EngineConfig(**config))  # type: ignore[arg-type]


def test_speech_needs_more_than_text_does() -> None:
    mute, down = Place(speaks=False), Place(up=False)
    r = router(mute, down)
    assert r.choose(TEXT, False, None, []) is mute
    with pytest.raises(StageDead):
        r.choose(SPEECH, True, None, [])


def test_speech_goes_where_streams_keep_pace() -> None:
    slow, fast = Place(active=0), Place(active=9)
    r = router(slow, fast, min_pace=1.0)
    running = [stream(slow, 0.9), stream(slow, 5.0), stream(fast, 1.0)]
    assert r.choose(SPEECH, True, None, running) is fast
    assert r.choose(TEXT, False, None, running) is slow, "text does not mind"
    with pytest.raises(Busy):
        r.choose(SPEECH, True, None, [*running, stream(fast, 0.9)])


def test_sessions_are_forgotten_the_longest_unused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_SESSIONS", 2)
    a, b = Place(active=0), Place(active=1)
    r = router(a, b)
    for session in ("s", "t", "s", "u"):
        assert r.choose(SPEECH, True, session, []) is a
    a.active = 2
    assert r.choose(SPEECH, True, "s", []) is a
    assert r.choose(SPEECH, True, "t", []) is b
