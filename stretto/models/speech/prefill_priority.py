"""Prefill goes before the talker's decode, on a device that both stages share.

Beside decode steps of the talker, a prefill step takes two to ten times as long as alone, and
little is gained by running both at once. A new request waits for every millisecond of that, while
the others have seconds of speech buffered. So the talker launches no decode step while a prefill is
in flight, unless a listener needs frames: one who has heard nothing yet, or whose buffer is short.
Owned by the talker's stage, which calls it before each launch, on the loop thread; imports no
torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from stretto.models.speech.pacing import FrameTiming, PacketPacing
from stretto.stage.host.loop import TICK_NS
from stretto.stage.request import StageRequest, State

if TYPE_CHECKING:
    from stretto.stage.ar import StageCore

MIN_BUFFER_S = 0.5
"""A listener with more speech buffered needs no frames for now."""
MAX_WAIT_S = 1.0  # until the next check


class PacedRequest(Protocol):
    """A request whose frames are being made."""

    @property
    def request(self) -> StageRequest: ...

    @property
    def pace(self) -> PacketPacing: ...


def slack_s(requests: Iterable[PacedRequest], now: float) -> float:
    """For how long no request of the next step needs a frame. One that has sent nothing needs it
    now."""
    least = MAX_WAIT_S
    for speech in requests:
        if speech.request.state is not State.RUNNING or not speech.request.closed:
            continue
        if speech.pace.first_sent is None:
            return 0.0
        least = min(least, speech.pace.buffered_s(now) - MIN_BUFFER_S)
    return least


class DecodeHold:
    """Until when the next decode step should wait for a prefill."""

    def __init__(
        self, prefill: StageCore, clock: Callable[[], float], stage_clock: Callable[[], int]
    ) -> None:
        """`prefill`: the stage whose prompts go first; `clock` is that of the requests' pacing."""
        self.prefill = prefill
        self.clock = clock
        self.stage_clock = stage_clock

    def until_ns(self, requests: Iterable[PacedRequest], timing: FrameTiming) -> int | None:
        """By the stage's clock. None: launch now. Frames of `requests` that are made across the
        wait do not count in `timing`."""
        if not self.prefill.prefill_in_flight:
            return None
        now = self.clock()
        wait_ns = int(1e9 * slack_s(requests, now))
        if wait_ns < TICK_NS:
            return None
        timing.held_at = now
        return self.stage_clock() + wait_ns
