"""When frames of speech leave for the vocoder: early enough that the listener never waits, late enough that many go
together. One `Pace` per request, one `Rhythm` for all, on the loop thread; pure but for the times that they are given.

The first packet goes as soon as it is there, unless frames have lately taken longer than it plays: then it waits for
the difference. After that packets grow: a call of the vocoder for eight frames costs little more than for one. Frames
that wait are sent as soon as what the listener has in hand might run out before more are made; so on a busy device,
where frames come hardly faster than they are played, packets stay small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FRAME_S = 0.08
OPENING_S = 0.024  # of the first frame that the vocoder does not sound
MARGIN_S = 0.03
"""What the way from here to the listener may take longer for one packet than for the first: a call of the vocoder for
many streams, behind another one."""
STALLED_S = 1.0
"""A request that waits for text makes no frame, and nothing else may happen here meanwhile: what it has goes, unless
the listener has so much in hand."""
LOOK_S = 0.01
SMOOTH = 0.25
LATELY_S = 0.15
SLACK_S = 0.003
"""The next frame may take longer than the longest one lately by so much."""


@dataclass(slots=True)
class Rhythm:
    """How long frames take at worst, of any request: what a newcomer has to expect. While many prompts are read, that
    can be longer than the one frame that a first packet holds."""

    worst_s: float = 0.0
    at: float = 0.0  # when that was

    def took(self, seconds: float, now: float) -> None:
        if seconds > 2 * FRAME_S:
            return  # not the device: it waited for text, or for a listener who has enough
        if seconds >= self.worst_s or now - self.at > LATELY_S:
            self.worst_s, self.at = seconds, now

    def hold(self, sound_s: float, now: float) -> float:
        """Seconds that a first packet with so much sound should wait, so that the next one comes in time."""
        return max(0.0, self.worst_s + SLACK_S - sound_s) if now - self.at <= LATELY_S else 0.0


@dataclass(slots=True)
class Pace:
    size: int  # of the next packet, in frames
    each: int  # size that packets grow to
    ramp: int | None  # by this factor; None: at once
    rhythm: Rhythm = field(default_factory=Rhythm)  # of all requests
    begun: float | None = None  # when the first packet left
    sent: int = 0  # frames
    every_s: float = 0.0  # between frames, smoothed
    last: float | None = None  # when the last frame came

    def came(self, now: float) -> None:
        """A frame was made."""
        if self.last is not None:
            took = now - self.last
            self.rhythm.took(took, now)
            # A slow one counts at once, a fast one only when others are fast too.
            self.every_s = max(took, self.every_s + SMOOTH * (took - self.every_s))
        self.last = now

    def lead(self, now: float) -> float:
        """Seconds until the listener has played all that was sent."""
        assert self.begun is not None, "nothing was sent yet"
        return self.begun + FRAME_S * self.sent - OPENING_S - now

    def due(self, waiting: int, stalled: bool, now: float) -> bool:
        """Whether the frames that wait should leave now. `stalled`: no more are on their way."""
        if waiting >= self.size:
            return self.begun is not None or self._may_begin(waiting, now)
        if self.begun is None or not waiting:
            return False
        return self.lead(now) < (STALLED_S if stalled else MARGIN_S + 2 * self.every_s)

    def _may_begin(self, waiting: int, now: float) -> bool:
        assert self.last is not None
        return now >= self.last + self.rhythm.hold(FRAME_S * waiting - OPENING_S, now)

    def may_join(self, waiting: int) -> bool:
        """Whether they may as well leave with others that are due: then all streams go in one call, time after time."""
        return self.begun is not None and 2 * waiting >= self.size

    def left(self, frames: int, now: float) -> None:
        if self.begun is None:
            self.begun = now
        self.sent += frames
        self.size = self.each if self.ramp is None else min(self.each, self.size * self.ramp)


def leaving(waiting: Sequence[tuple[Pace, int, bool]], now: float) -> list[bool]:
    """Which of the requests (how many frames wait, is it stalled) should send now. One that is due takes others along;
    a first packet does not, because it goes alone and at once."""
    due = [pace.due(n, stalled, now) for pace, n, stalled in waiting]
    together = any(d and pace.begun is not None for d, (pace, _, _) in zip(due, waiting, strict=True))
    if not together:
        return due
    return [d or pace.may_join(n) for d, (pace, n, _) in zip(due, waiting, strict=True)]
