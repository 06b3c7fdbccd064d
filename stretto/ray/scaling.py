"""How many replicas there should be: by what they carry and how fast they make it. Called by
Serve's controller.

A replica reports how many requests it has and how much faster than real time its slowest speech is
made. As long as all keep pace, there should be enough replicas that none has more than its target.
One that is close to real time has more than it can carry, whatever the target says: another one is
wanted at once. Imports neither torch nor Ray."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STREAMS, PACE = "streams", "pace"
SHORT = 1.25
"""Times real time below which a replica has no reserve left."""
NO_PACE = 1e6
"""What a replica reports that makes no speech now: Serve transports no infinity."""


@dataclass(frozen=True, slots=True)
class Load:
    streams: float
    pace: float = NO_PACE


def desired_replicas(loads: Sequence[Load], running: int, target: float) -> float:
    """Replicas, by their loads (of those that have reported any) and how many there are."""
    streams = sum(load.streams for load in loads)
    by_count = streams / target
    behind = [load for load in loads if load.streams and load.pace < SHORT]
    # Those that are behind carry too many: count only as many as would keep the pace.
    carried = sum(
        load.streams * min(load.pace / SHORT, 1.0) if load in behind else load.streams
        for load in loads
    )
    by_pace = running * streams / carried if behind and carried else 0.0
    return max(by_count, by_pace, running + 1 if behind else 0)


def policy(context: Any) -> tuple[float, dict[str, Any]]:
    """Serve's custom policy; it applies its own bounds and delays to what we want."""
    metrics = context.aggregated_metrics or {}
    streams = metrics.get(STREAMS, {})
    paces = metrics.get(PACE, {})
    loads = [Load(n, paces.get(replica, NO_PACE)) for replica, n in streams.items()]
    if not loads:
        loads = [Load(context.total_num_requests)]
    number = desired_replicas(
        loads, max(context.current_num_replicas, 1), context.config.target_ongoing_requests
    )
    return max(math.ceil(number), 1), {}
