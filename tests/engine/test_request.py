"""What a caller sees of a request, from reports alone: text up to the stop string however it was
cut, sound that tiles, one end."""

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stretto.engine.events import AudioChunk, Finished, TextDelta
from stretto.engine.request import RequestState
from stretto.errors import Bug, StageDead
from stretto.family import MediaTokens
from stretto.messages.requests import Cancel, Ended, Finish, Throttle
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.params import Params, RequestOptions
from stretto.preprocess.packed_prompt import PackedPrompt
from stretto.types import RequestId
from tests.pipeline import STAGES

ID = RequestId("r")
ROOM_S = 2.0


class Line:
    """A pipeline that notes what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, stages: tuple[str, ...], message: object, blob: bytes = b"") -> None:
        self.sent.append(message)


class Letters:
    """A text stream whose tokens are characters."""

    def push(self, ids: Iterable[int]) -> str:
        return "".join(map(chr, ids))

    def finish(self) -> str:
        return ""


MODEL: Any = SimpleNamespace(
    pipeline=PIPELINE,
    info=SimpleNamespace(sample_rate=SAMPLE_RATE_OUT, live_text=False),
    media_tokens=MediaTokens(frozenset({1}), frozenset({2, 3})),
)


def new_request(
    stop: tuple[str, ...] = (), stages: tuple[str, ...] = STAGES, least: int = 0
) -> tuple[RequestState, Line]:
    line = Line()
    prompt = PackedPrompt.of_ids((0, 1, 1, 2, 2, 3))
    options = RequestOptions("speech", Params(stop=stop, min_text_tokens=least, seed=7))
    letters: Any = Letters()
    state = RequestState(ID, line, MODEL, stages, prompt, options, letters, 0.0, ROOM_S)  # type: ignore[arg-type]
    return state, line


def events(t: RequestState) -> list[Any]:
    return [t.events.get_nowait() for _ in range(t.events.qsize())]


def read(t: RequestState) -> Any:
    return asyncio.run(t.next_event())


def end(t: RequestState, *stages: str, reason: str = "stop", cached: int = 0) -> None:
    for stage in stages:
        t.end(Ended(ID, stage, reason, 0.0, cached=cached))


def until_stop(text: str, stops: tuple[str, ...], least: int) -> tuple[str, int, str]:
    """The text before the stop string that is complete first behind the first `least` characters
    (of those before the longest), how many characters were made for it, and why it ended; it would
    go on else."""
    for stop in range(least + 1, len(text) + 1):
        whole = [len(s) for s in stops if text[:stop].endswith(s)]
        if whole:
            return text[: stop - max(whole)], stop, "stop"
    return text, len(text), "length"


@given(
    st.text("abc", max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(1, 5), min_size=24, max_size=24),
    st.integers(0, 8),
)
@example(
    "abcdex", ["dex", "bcdex"], [5] * 24, 0
)  # the shorter must not hide what the longer holds back
@example("abcd", ["abcd", "c"], [1] * 24, 0)
@example("abcd", ["abcd", "c"], [4] * 24, 0)
@example("abab", ["b"], [4] * 24, 1)
@example("abab", ["b"], [4] * 24, 2)  # the first one is among the tokens that must come
@example("aab", ["ab"], [1] * 24, 2)  # begun among them, and complete behind them
def test_text_ends_before_the_first_stop_string_however_it_comes(
    text: str, stops: list[str], sizes: list[int], least: int
) -> None:
    """The answer is the tokens up to the one that completes the stop string; those made beyond it,
    before the thinker heard of it, are not told and not counted, and do not say how it ended."""
    t, line = new_request(tuple(stops), ("thinker",), least)
    want, made, reason = until_stop(text, tuple(stops), least)
    shown, rest, ids = "", text, []
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        if piece:
            t.add_text(tuple(map(ord, piece)))
        for e in events(t):
            shown, ids = shown + e.text, ids + list(e.ids)
        assert want.startswith(shown)
    end(t, "thinker", reason="length")
    *deltas, last = events(t)
    assert isinstance(last, Finished)
    assert (last.text, last.usage.text_tokens) == (reason, made)
    assert all(isinstance(e, TextDelta) and not e.ids for e in deltas)
    assert shown + "".join(e.text for e in deltas) == want
    assert ids == list(map(ord, text[:made])), "ids are as sampled"
    assert [type(m) for m in line.sent] == [Finish] * (reason == "stop")


def test_a_slow_consumer_throttles_and_goes_on_at_half() -> None:
    t, line = new_request()
    second = np.zeros(SAMPLE_RATE_OUT, np.float32)
    chunks = [second, second, second, second[:1], second[1:]]
    for chunk in chunks[:2]:
        t.add_sound(t.samples, 12, chunk)
    assert not line.sent
    for chunk in chunks[2:]:
        t.add_sound(t.samples, 12, chunk)
    assert line.sent == [Throttle(ID, True)]
    assert t.buffered_s == 4.0
    taken = [read(t) for _ in range(3)]
    assert line.sent == [Throttle(ID, True)], "half of the room is not free yet"
    taken.append(read(t))
    assert line.sent == [Throttle(ID, True), Throttle(ID, False)]
    starts = [e.start for e in [*taken, *events(t)]]
    assert starts == [0, *np.cumsum([len(c) for c in chunks[:-1]])]


def test_sound_that_does_not_tile_fails_once() -> None:
    t, line = new_request()
    t.add_sound(0, 1, np.zeros(5, np.float32))
    t.add_sound(6, 2, np.zeros(5, np.float32))
    t.fail(StageDead("told by another, too"))
    chunk, error = events(t)
    assert isinstance(chunk, AudioChunk)
    assert isinstance(error, Bug)
    assert line.sent == [Cancel(ID)]
    assert t.samples == 5


def test_it_is_over_when_the_last_stage_is() -> None:
    t, _ = new_request()
    t.add_sound(0, 3, np.zeros(9, np.float32))
    t.add_text((65, 66))
    assert isinstance(events(t)[1], TextDelta)
    end(t, "talker")
    end(t, "thinker", cached=4)
    assert t.unfinished == {"code2wav"}
    assert not any(isinstance(e, Finished) for e in events(t))
    end(t, "code2wav")
    [last] = events(t)
    assert isinstance(last, Finished)
    assert (last.text, last.audio, last.seed) == ("stop", "stop", 7)
    usage = last.usage
    assert (usage.prompt_tokens, usage.audio_prompt_tokens, usage.image_prompt_tokens) == (6, 2, 3)
    assert (usage.text_tokens, usage.frames, usage.samples, usage.cached_tokens) == (2, 3, 9, 4)


@pytest.mark.parametrize(
    ("began", "throttled", "now", "pace"), [(None, False, 9.0, None), (1.0, True, 9.0, None), (1.0,
    False, 2.0, None),
    (1.0, False, 3.0, 0.5)],
)  # fmt: skip
def test_pace_is_told_by_streams_that_are_under_way(
    began: float | None, throttled: bool, now: float, pace: float | None
) -> None:
    t, _ = new_request()
    t.pace_start = None if began is None else (began, 0)
    t.throttled = throttled
    t.samples = SAMPLE_RATE_OUT
    assert t.pace(now) == (float("inf") if pace is None else pace)


def test_a_slow_listener_does_not_slow_the_pace() -> None:
    """Neither while it leaves sound waiting, nor when it comes back, nor when all is made and waits
    to be fetched."""
    t, line = new_request()
    t.add_sound(0, 1, np.zeros(3 * SAMPLE_RATE_OUT, np.float32))
    assert line.sent == [Throttle(ID, True)]
    assert t.pace_start is not None
    began = t.pace_start[0]
    assert t.pace(began + 100) == float("inf")
    read(t)
    since, before = t.pace_start
    assert before == 3 * SAMPLE_RATE_OUT
    t.add_sound(before, 1, np.zeros(SAMPLE_RATE_OUT, np.float32))
    assert t.pace(since + 2) == 0.5
    for stage in STAGES:
        end(t, stage)
    assert t.pace(since + 2) == float("inf")


def test_a_slow_writer_does_not_slow_the_pace() -> None:
    """Neither while its text comes, nor by the time that it took, when all of it is there."""
    t, _ = new_request()
    t.begin_writing()
    t.add_sound(0, 1, np.zeros(SAMPLE_RATE_OUT, np.float32))
    assert t.pace_start is not None
    assert t.pace(t.pace_start[0] + 100) == float("inf")
    t.end_writing()
    since, before = t.pace_start
    assert before == SAMPLE_RATE_OUT
    t.add_sound(before, 1, np.zeros(SAMPLE_RATE_OUT // 2, np.float32))
    assert t.pace(since + 2) == 0.25
