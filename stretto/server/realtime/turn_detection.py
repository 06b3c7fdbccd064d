"""When someone speaks and when a turn is over, from the probability of speech in each window. Pure;
all times are samples of the sound itself, so nothing here waits or looks at a clock.

A turn goes: started, then any number of times paused and resumed, then stopped. `paused` is the
first short pause: the sound up to there is the turn's, whatever follows; it is where an answer may
begin before the turn is surely over."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

WINDOW = 512
RATE = 16_000
START_WINDOWS = 2  # of speech in a row: a click is not speech
HYSTERESIS = 0.15  # speech goes on until it is this far below the threshold
SHORT_PAUSE_MS = 200


class Signal(Enum):
    STARTED = "started"
    PAUSED = "paused"
    RESUMED = "resumed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Pauses:
    """What ends a turn, in windows; `short` is never longer than `end`."""

    threshold: float
    prefix: int  # samples before the first window of speech that belong to it
    short: int
    end: int

    @classmethod
    def of(cls, threshold: float, prefix_ms: int, silence_ms: int) -> Pauses:
        end = max(1, _windows(silence_ms))
        return cls(threshold, prefix_ms * RATE // 1000, min(end, _windows(SHORT_PAUSE_MS)), end)


def _windows(ms: int) -> int:
    return -(-ms * RATE // (1000 * WINDOW))


@dataclass(slots=True)
class TurnDetector:
    pauses: Pauses
    speaking: bool = False
    paused: bool = False
    _run: int = 0  # windows of speech in a row, while nobody speaks
    _silence: int = 0  # windows of silence in a row, while somebody does

    def feed(self, probability: float) -> list[Signal]:
        """The next window. More than one signal only where the short pause ends the turn."""
        return self._speech(probability) if self.speaking else self._quiet(probability)

    def _quiet(self, probability: float) -> list[Signal]:
        self._run = self._run + 1 if probability >= self.pauses.threshold else 0
        if self._run < START_WINDOWS:
            return []
        self.speaking = True
        self.paused = False
        self._silence = 0
        return [Signal.STARTED]

    def _speech(self, probability: float) -> list[Signal]:
        if probability >= self.pauses.threshold - HYSTERESIS:
            self._silence = 0
            if self.paused:
                self.paused = False
                return [Signal.RESUMED]
            return []
        self._silence += 1
        signals = []
        if self._silence >= self.pauses.short and not self.paused:
            self.paused = True
            signals.append(Signal.PAUSED)
        if self._silence >= self.pauses.end:
            self.reset()
            signals.append(Signal.STOPPED)
        return signals

    def reset(self) -> None:
        """Start again: nobody is speaking."""
        self.speaking = self.paused = False
        self._run = self._silence = 0
