"""Frames give way to prompts, on a device that both stages share.

Beside steps for frames, a step that reads prompts takes two to ten times as long as alone, and
little is gained by running both at once. A newcomer waits for every millisecond of that, while the
others have seconds of speech in hand. So no step for frames is launched while prompts are read,
unless somebody needs one: a listener who has heard nothing yet, or who has little left. Made for
the stage that gives way, and asked on the loop thread; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from stretto.stage.host.loop import TICK_NS
from stretto.stage.pacing import Pace, Rhythm
from stretto.stage.request import StageRequest, State

if TYPE_CHECKING:
    from stretto.stage.ar import StageCore

SPARE_S = 0.5
"""A listener who has more in hand can do without frames for a while."""
MOST_S = 1.0  # of waiting, before it is looked at again


class HasPace(Protocol):
    """A request whose frames are made: what `models/speech` keeps of it, in a layer above this
    one."""

    @property
    def request(self) -> StageRequest: ...

    @property
    def pace(self) -> Pace: ...


def spare_s(requests: Iterable[HasPace], now: float) -> float:
    """How long all who could have frames in the next step can do without. Those who have heard
    nothing yet cannot."""
    least = MOST_S
    for speech in requests:
        if speech.request.state is not State.RUNNING or not speech.request.closed:
            continue
        if speech.pace.begun is None:
            return 0.0
        least = min(least, speech.pace.lead(now) - SPARE_S)
    return least


class DecodeHold:
    """Says before each launch until when it should wait."""

    def __init__(
        self, prefill: StageCore, clock: Callable[[], float], stage_clock: Callable[[], int]
    ) -> None:
        """`prefill`: the stage that reads prompts; `clock` is that of the requests' pace."""
        self.prefill = prefill
        self.clock = clock
        self.stage_clock = stage_clock

    def until_ns(self, requests: Iterable[HasPace], rhythm: Rhythm) -> int | None:
        """By the stage's clock. None: it should not wait. `requests`: those whose frames are made,
        in this rhythm."""
        if not self.prefill.prefill_in_flight:
            return None
        now = self.clock()
        wait_ns = int(1e9 * spare_s(requests, now))
        if wait_ns < TICK_NS:
            return None
        rhythm.rested = now
        return self.stage_clock() + wait_ns
