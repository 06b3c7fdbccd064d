"""How much of a spoken answer the client has played, and which words that is. Pure, but for a clock
that its caller passes.

The model gives no alignment of words and sound, so this is an estimate: a share of the sound is the
same share of the text. While an answer is being made its text runs ahead of its sound, so the share
is taken of the longer of two: the sound that was made, and the time that reading the text aloud
takes at a common pace."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

SECONDS_A_LETTER = 0.065  # about 15 letters and spaces a second
SECONDS_A_SIGN = 0.22  # signs that are a syllable: Chinese, Japanese, Korean
_SIGN = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")


def played_text(text: str, played_s: float, generated_s: float, complete: bool) -> str:
    """The words of `text` that are whole within `played_s` seconds. `generated_s`: seconds of sound
    there are, all of the answer's if `complete`."""
    total_s = generated_s if complete else max(generated_s, reading_time(text))
    if total_s <= 0 or played_s <= 0:
        return ""
    if played_s >= total_s:
        return text
    budget = reading_time(text) * played_s / total_s + 1e-9
    end = 0
    for word_end in _word_ends(text):
        budget -= reading_time(text[end:word_end])
        if budget < 0:
            break
        end = word_end
    return text[:end]


def reading_time(text: str) -> float:
    signs = len(_SIGN.findall(text))
    return signs * SECONDS_A_SIGN + (len(text) - signs) * SECONDS_A_LETTER


def _word_ends(text: str) -> list[int]:
    """The positions at which words end: before white space, after each sign, at the end."""
    return [m.end() for m in re.finditer(rf"{_SIGN.pattern}|[^\s{_SIGN.pattern[1:]}+", text)]


@dataclass(slots=True)
class Speech:
    """The speech of an assistant's item, to estimate later how much of it was played."""

    text: str
    seconds: float  # of sound that was sent
    complete: bool  # that was all of it
    speed: float = 1.0

    def played_text(self, played_s: float) -> str:
        """The words up to this time of the sound."""
        times = played_s * self.speed, self.seconds * self.speed
        return played_text(self.text, *times, self.complete)


@dataclass(slots=True)
class PlaybackClock:
    """The clock of a player that plays what it gets at once, and waits when it has nothing."""

    clock: Callable[[], float]
    sent: float = 0.0  # seconds of sound
    _started: float | None = None  # when it would have begun, had it never waited

    def add(self, seconds: float) -> None:
        now = self.clock()
        if self._started is None:
            self._started = now
        self._started += max(0.0, now - self._started - self.sent)  # the player had nothing to play
        self.sent += seconds

    @property
    def played_s(self) -> float:
        return 0.0 if self._started is None else min(self.sent, self.clock() - self._started)

    @property
    def lead(self) -> float:
        """Seconds of sound that the player has not played yet."""
        return self.sent - self.played_s
