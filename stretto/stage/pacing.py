"""When frames of speech leave for the vocoder: early enough that the listener never waits, late
enough that many go together. One `Pace` per request, one `Rhythm` for all, on the loop thread; pure
but for the times that they are given.

The first packet goes as soon as it is there, unless frames have lately taken longer than it plays:
then it waits for the difference. It waits too, for the second frame as a rule, on a device that is
slow at best (a CPU), where the least disturbance would be heard. After that packets grow: a call of
the vocoder for eight frames costs little more than for one. Frames that wait are sent as soon as
what the listener has in hand might run out before more are made; so on a busy device, where frames
come hardly faster than they are played, packets stay small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARGIN_S = 0.03
"""What the way from here to the listener may take longer for one packet than for the first: a call
of the vocoder for many streams, behind another one."""
STALLED_S = 1.0
"""A request that waits for text makes no frame, and nothing else may happen here meanwhile: what it
has goes, unless the listener has this much in hand."""
LOOK_S = 0.01
SMOOTH = 0.25
LATELY_S = 0.15
SLACK_S = 0.003
"""By this much the next frame may take longer than the longest one lately."""
ROOM = 2.5
"""How many times the time of the quickest frame a first packet should play: disturbances grow with
that time."""
FORGET_S = 60.0
"""After this time of frames none of which was as quick, the quickest one counts as about three
times as long."""


@dataclass(slots=True)
class Rhythm:
    """How long frames take at worst, of any request: what a newcomer has to expect. While many
    prompts are read, that can be longer than the one frame that a first packet holds."""

    frame_s: float  # that a frame plays
    opening_s: float  # of the first one that the vocoder does not sound
    quick_s: float = 0.0  # the quickest frame of late; 0: not known yet
    room: float = ROOM
    worst_s: float = 0.0
    at: float = 0.0  # when that was
    # prompts went first, all having enough : a frame made across that says nothing
    rested: float = 0.0
    _last: float = 0.0

    @classmethod
    def on_cpu(cls, frame_s: float, opening_s: float) -> Rhythm:
        """Of a device that other programs use too, taken for slow until a frame has shown
        otherwise."""
        return cls(frame_s, opening_s, quick_s=frame_s / 2, room=2 * ROOM)

    def took(self, seconds: float, now: float) -> None:
        if seconds > 2 * self.frame_s:
            return  # not the device: it waited for text, or for a listener who has enough
        aged_s = self.quick_s * (1 + min(seconds, now - self._last) / FORGET_S)
        self.quick_s = min(seconds, aged_s or seconds)
        self._last = now
        if seconds >= self.worst_s or now - self.at > LATELY_S:
            self.worst_s = seconds
            self.at = now

    def hold(self, sound_s: float, now: float) -> float:
        """Seconds that a first packet with `sound_s` of sound should wait, so that the next one
        comes in time."""
        lately_s = self.worst_s + SLACK_S if now - self.at <= LATELY_S else 0.0
        return max(0.0, self.room * self.quick_s - sound_s, lately_s - sound_s)


@dataclass(slots=True)
class Pace:
    size: int  # of the next packet, in frames
    each: int  # size that packets grow to
    ramp: int | None  # by this factor; None: at once
    rhythm: Rhythm  # of all requests
    begun: float | None = None  # when the first packet left
    sent: int = 0  # frames
    every_s: float = 0.0  # between frames, smoothed
    last: float | None = None  # when the last frame came

    def came(self, now: float) -> None:
        """A frame was made."""
        if self.last is not None:
            took = now - self.last
            if self.last >= self.rhythm.rested:
                self.rhythm.took(took, now)
            # A slow one counts at once, a fast one only when others are fast too.
            self.every_s = max(took, self.every_s + SMOOTH * (took - self.every_s))
        self.last = now

    def lead(self, now: float) -> float:
        """Seconds until the listener has played all that was sent."""
        assert self.begun is not None, "nothing was sent yet"
        return self.begun + self.rhythm.frame_s * self.sent - self.rhythm.opening_s - now

    def due(self, waiting: int, stalled: bool, now: float) -> bool:
        """Whether the frames that wait should leave now. `stalled`: no more are on their way."""
        if waiting >= self.size:
            return self.begun is not None or self._may_begin(waiting, now)
        if self.begun is None or not waiting:
            return False
        return self.lead(now) < (STALLED_S if stalled else MARGIN_S + 2 * self.every_s)

    def _may_begin(self, waiting: int, now: float) -> bool:
        assert self.last is not None
        sound_s = self.rhythm.frame_s * waiting - self.rhythm.opening_s
        return now >= self.last + self.rhythm.hold(sound_s, now)

    def may_join(self, waiting: int) -> bool:
        """Whether they may as well leave with others that are due: then all streams go in one call,
        time after time."""
        return self.begun is not None and 2 * waiting >= self.size

    @property
    def deadline(self) -> float:
        """When the listener has played all that was sent."""
        assert self.begun is not None, "nothing was sent yet"
        return self.begun + self.rhythm.frame_s * self.sent

    def left(self, frames: int, now: float) -> None:
        if self.begun is None:
            self.begun = now
        self.sent += frames
        self.size = self.each if self.ramp is None else min(self.each, self.size * self.ramp)


def leaving(waiting: Sequence[tuple[Pace, int, bool]], now: float) -> list[bool]:
    """Which of the requests (how many frames wait, is it stalled) should send now. One that is due
    takes others along; a first packet does not, because it goes alone and at once."""
    due = [pace.due(n, stalled, now) for pace, n, stalled in waiting]
    together = any(
        d and pace.begun is not None for d, (pace, _, _) in zip(due, waiting, strict=True)
    )
    if not together:
        return due
    return [d or pace.may_join(n) for d, (pace, n, _) in zip(due, waiting, strict=True)]
