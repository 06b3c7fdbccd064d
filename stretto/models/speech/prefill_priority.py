"""Prefill goes before the talker's decode, on a device that both stages share.

Beside decode steps of the talker, a prefill step takes two to ten times as long as alone, and
little is gained by running both at once. A new request waits for every millisecond of that, while
the others have seconds of speech buffered. So the talker launches no decode step while a prefill is
in flight, unless a listener needs frames: one who has heard nothing yet, or whose buffer is short.
The talker's stage calls `hold_ns` before a launch beside a prefill, on the loop thread."""

from __future__ import annotations

from collections.abc import Iterable

from stretto.models.speech.pacing import FrameTiming, PacketPacing
from stretto.stage.host.loop import TICK_NS
from stretto.stage.request import StageRequest, State

MIN_BUFFER_S = 0.5
"""A listener with more speech buffered needs no frames for now."""
MAX_WAIT_S = 1.0  # until the next check

Paced = tuple[StageRequest, PacketPacing]
"""A request whose frames are being made, and when they leave."""


def slack_s(requests: Iterable[Paced], now: float) -> float:
    """For how long no request of the next step needs a frame. One that has sent nothing needs it
    now."""
    least = MAX_WAIT_S
    for request, pace in requests:
        if request.state is not State.RUNNING or not request.closed:
            continue
        if pace.first_sent is None:
            return 0.0
        least = min(least, pace.buffered_s(now) - MIN_BUFFER_S)
    return least


def hold_ns(requests: Iterable[Paced], timing: FrameTiming, now: float) -> int:
    """How long the next decode step waits for a prefill in flight; 0: it is launched now. Frames of
    `requests` that are made across the wait do not count in `timing`. `now`: by the clock of their
    pacing."""
    wait_ns = int(1e9 * slack_s(requests, now))
    if wait_ns < TICK_NS:
        return 0
    timing.held_at = now
    return wait_ns
