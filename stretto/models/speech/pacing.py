"""When frames of speech leave for the vocoder: early enough that the listener never waits, late
enough that many go together. One `PacketPacing` per request, one `FrameTiming` for all, on the loop
thread; neither reads a clock.

The first packet goes as soon as its frames are made, unless recent frames took longer than it
plays: then it waits for the difference. On a CPU it usually waits for the second frame, because one
late frame would be audible. After that packets grow: a call of the vocoder for eight frames costs
little more than for one. Frames that wait are sent as soon as the listener's buffer might run out
before more are made; so on a busy device, which makes frames hardly faster than they are played,
packets stay small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARGIN_S = 0.03
"""By how much longer one packet may travel to the listener than the first did: a call of the
vocoder for many streams, behind another one."""
STALLED_S = 1.0
"""A request that waits for text makes no frames, and nothing else may wake the stage meanwhile: its
frames are sent unless the listener has buffered more than this."""
CHECK_INTERVAL_S = 0.01
SMOOTHING = 0.25
RECENT_S = 0.15
SLACK_S = 0.003
"""By how much longer the next frame may take than the slowest recent one."""
MIN_FIRST_PACKET = 2.5
"""Minimum length of the first packet, in multiples of the fastest frame time: delays grow with that
time."""
FORGET_AFTER_S = 60.0
"""After so many seconds of slower frames the fastest frame time has about tripled."""


@dataclass(slots=True)
class FrameTiming:
    """How long frames take, of all requests: what a new one has to expect. During long prefills the
    slowest can take longer than the one frame of a first packet plays."""

    frame_s: float  # sound of a frame
    opening_s: float  # of the first frame that the vocoder does not sound
    fastest_s: float = 0.0  # the fastest frame, ageing; 0: not known yet
    min_first_packet: float = MIN_FIRST_PACKET
    slowest_s: float = 0.0  # the slowest recent frame
    slowest_at: float = 0.0
    # when decode was last held for a prefill: a frame made across that is not counted
    held_at: float = 0.0
    _last: float = 0.0

    @classmethod
    def on_cpu(cls, frame_s: float, opening_s: float) -> FrameTiming:
        """Other programs use a CPU too: it counts as slow until a frame was fast."""
        return cls(frame_s, opening_s, fastest_s=frame_s / 2, min_first_packet=2 * MIN_FIRST_PACKET)

    def observe(self, seconds: float, now: float) -> None:
        if seconds > 2 * self.frame_s:
            return  # not the device: it waited for text, or for a throttled listener
        aged_s = self.fastest_s * (1 + min(seconds, now - self._last) / FORGET_AFTER_S)
        self.fastest_s = min(seconds, aged_s or seconds)
        self._last = now
        if seconds >= self.slowest_s or now - self.slowest_at > RECENT_S:
            self.slowest_s = seconds
            self.slowest_at = now

    def first_packet_delay(self, sound_s: float, now: float) -> float:
        """Seconds that a first packet with `sound_s` of sound should wait, so that the next one
        comes in time."""
        least_s = self.min_first_packet * self.fastest_s
        if now - self.slowest_at <= RECENT_S:
            least_s = max(least_s, self.slowest_s + SLACK_S)
        return max(0.0, least_s - sound_s)


@dataclass(slots=True)
class PacketPacing:
    """One request's packets: how many frames the next one should have, and when it is due."""

    size: int  # of the next packet, in frames
    max_size: int  # that packets grow to
    ramp: int | None  # by this factor per packet; None: at once
    timing: FrameTiming  # of all requests
    first_sent: float | None = None  # when the first packet left
    sent: int = 0  # frames
    interval_s: float = 0.0  # between frames, smoothed
    last: float | None = None  # when the last frame was made

    def frame_made(self, now: float) -> None:
        """A frame was made."""
        if self.last is not None:
            took = now - self.last
            if self.last >= self.timing.held_at:
                self.timing.observe(took, now)
            # A slow one counts at once, a fast one only when others are fast too.
            self.interval_s = max(took, self.interval_s + SMOOTHING * (took - self.interval_s))
        self.last = now

    def buffered_s(self, now: float) -> float:
        """Seconds until the listener has played all that was sent."""
        assert self.first_sent is not None, "nothing was sent yet"
        return self.deadline - self.timing.opening_s - now

    def is_due(self, waiting: int, stalled: bool, now: float) -> bool:
        """Whether the waiting frames should be sent now. `stalled`: no more are on their way."""
        if waiting >= self.size:
            return self.first_sent is not None or self._may_begin(waiting, now)
        if self.first_sent is None or not waiting:
            return False
        return self.buffered_s(now) < (STALLED_S if stalled else MARGIN_S + 2 * self.interval_s)

    def _may_begin(self, waiting: int, now: float) -> bool:
        assert self.last is not None
        sound_s = self.timing.frame_s * waiting - self.timing.opening_s
        return now >= self.last + self.timing.first_packet_delay(sound_s, now)

    def may_join(self, waiting: int) -> bool:
        """Whether they should go with others that are due: then the vocoder takes all streams in
        one call, time after time."""
        return self.first_sent is not None and 2 * waiting >= self.size

    @property
    def deadline(self) -> float:
        """When the listener has played all that was sent."""
        assert self.first_sent is not None, "nothing was sent yet"
        return self.first_sent + self.timing.frame_s * self.sent

    def packet_sent(self, frames: int, now: float) -> None:
        if self.first_sent is None:
            self.first_sent = now
        self.sent += frames
        if self.ramp is None:
            self.size = self.max_size
        else:
            self.size = min(self.max_size, self.size * self.ramp)


def select_due(waiting: Sequence[tuple[PacketPacing, int, bool]], now: float) -> list[bool]:
    """Which requests (pacing, number of waiting frames, whether stalled) should send now. One that
    is due takes others along; a first packet does not, because it goes alone and at once."""
    due = [pace.is_due(n, stalled, now) for pace, n, stalled in waiting]
    together = any(
        d and pace.first_sent is not None for d, (pace, _, _) in zip(due, waiting, strict=True)
    )
    if not together:
        return due
    return [d or pace.may_join(n) for d, (pace, n, _) in zip(due, waiting, strict=True)]
