"""Requests are refused rather than queued, and sessions are forgotten, the longest unused first."""

from types import SimpleNamespace
from typing import Any

import pytest

from stretto.engine import router as routing
from stretto.engine.router import Router
from stretto.errors import Busy, StageDead
from stretto.params import RequestOptions

TEXT, SPEECH = ("writer",), ("writer", "speaker")


class Place:
    """A pipeline as far as the router looks."""

    def __init__(self, up: bool = True, speaks: bool = True, name: str = "p") -> None:
        self.name = name
        self.up = up
        self.speaks = speaks

    def ready(self, stages: tuple[str, ...]) -> bool:
        return self.up and (self.speaks or stages == TEXT)


def stream(
    place: Place, pace: float = 9.0, client: str = "others", session: str | None = None
) -> Any:
    options = RequestOptions("tts", client=client, session=session)
    return SimpleNamespace(pipeline=place, pace=lambda now: pace, options=options)


def spoken(session: str | None = None, client: str = "me") -> RequestOptions:
    return RequestOptions("speech", session=session, client=client)


WRITTEN = RequestOptions("text")


def router(*places: Place, min_pace: float = 0.0) -> Router:
    return Router(places, min_pace)  # type: ignore[arg-type]


def test_speech_needs_more_than_text_does() -> None:
    mute, down = Place(speaks=False), Place(up=False)
    r = router(mute, down)
    assert r.choose(TEXT, WRITTEN, []) is mute
    with pytest.raises(StageDead):
        r.choose(SPEECH, spoken(), [])


def test_a_request_that_names_its_pipeline_goes_there() -> None:
    first, slow = Place(name="p0"), Place(up=False, name="p1")
    r = router(first, slow, min_pace=1.0)
    named = RequestOptions("speech", pipeline="p1")
    assert r.choose(SPEECH, named, [stream(slow, 0.5)]) is slow


def test_speech_goes_where_streams_keep_pace() -> None:
    slow, fast = Place(), Place()
    r = router(slow, fast, min_pace=1.0)
    running = [stream(slow, 0.9), stream(slow, 5.0), *[stream(fast, 1.0)] * 3]
    assert r.choose(SPEECH, spoken(), running) is fast
    assert r.choose(TEXT, WRITTEN, running) is slow, "text does not mind"
    with pytest.raises(Busy):
        r.choose(SPEECH, spoken(), [*running, stream(fast, 0.9)])


def test_nobody_is_refused_because_of_his_own_stream() -> None:
    only = Place()
    r = router(only, min_pace=1.0)
    slow = stream(only, 0.5, client="me")
    assert r.choose(SPEECH, spoken(), [slow]) is only
    assert r.choose(SPEECH, spoken(), [slow, stream(only, 2.0)]) is only
    with pytest.raises(Busy, match=r"made at 0\.50 times"):
        r.choose(SPEECH, spoken(client="somebody"), [slow])
    with pytest.raises(Busy, match=r"made at 0\.75 times"):
        r.choose(SPEECH, spoken(), [slow, stream(only, 0.75)])


def test_an_application_with_many_listeners_is_refused_because_of_them() -> None:
    """All of its requests have one API key."""
    only = Place()
    r = router(only, min_pace=1.0)
    two = [stream(only, 0.5, client="app"), stream(only, 2.0, client="app")]
    with pytest.raises(Busy):
        r.choose(SPEECH, spoken(client="app"), two)
    words = RequestOptions("text", client="app")
    beside = SimpleNamespace(pipeline=only, pace=lambda now: float("inf"), options=words)
    assert r.choose(SPEECH, spoken(client="app"), [two[0], beside]) is only, "text is no stream"


def test_the_streams_of_a_session_do_not_count_against_it() -> None:
    only = Place()
    r = router(only, min_pace=1.0)
    own = [stream(only, 0.5, client="app", session="app/anna")] * 2
    assert r.choose(SPEECH, spoken("app/anna", "app"), own) is only
    for others in (spoken("app/bert", "app"), spoken(None, "app")):
        with pytest.raises(Busy):
            r.choose(SPEECH, others, own)
    busy = [*own, *[stream(only, 0.5, client="app", session="app/bert")] * 2]
    with pytest.raises(Busy):
        r.choose(SPEECH, spoken("app/anna", "app"), busy)


def test_sessions_are_forgotten_the_longest_unused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_SESSIONS", 2)
    a, b = Place(), Place()
    r = router(a, b)
    for session in ("s", "t", "s", "u"):
        assert r.choose(SPEECH, spoken(session), [stream(b)]) is a
    running = [stream(a)] * 2 + [stream(b)]
    assert r.choose(SPEECH, spoken("s"), running) is a
    assert r.choose(SPEECH, spoken("t"), running) is b


def test_a_session_stays_where_its_prompts_are_cached() -> None:
    """Least loaded first; a session goes back to where it was, unless that one is down."""
    a, b, c = Place(), Place(), Place()
    r = router(a, b, c)
    running = [stream(a)] * 2 + [stream(c)]
    assert r.choose(SPEECH, spoken("s"), running) is b
    running += [stream(b)] * 9
    assert r.choose(SPEECH, spoken("s"), running) is b
    assert r.choose(SPEECH, spoken("other"), running) is c
    assert r.choose(SPEECH, spoken(), running) is c
    b.up = False
    assert r.choose(SPEECH, spoken("s"), running) is c
    b.up = True
    assert r.choose(SPEECH, spoken("s"), running) is c
