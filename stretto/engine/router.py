"""Which pipeline a request goes to, or why to none. Called by the engine on the event loop; imports
no torch."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence

from stretto.config.engine import EngineConfig
from stretto.engine.pipeline import Pipeline
from stretto.engine.request import Ticket
from stretto.errors import Busy, StageDead

MAX_SESSIONS = 4096  # whose last pipeline is remembered


class Router:
    def __init__(self, pipelines: Sequence[Pipeline], config: EngineConfig) -> None:
        self._pipelines = pipelines
        self._min_pace = config.min_pace
        self._sessions: OrderedDict[str, Pipeline] = OrderedDict()

    def choose(
        self, stages: Sequence[str], speak: bool, session: str | None, running: Collection[Ticket]
    ) -> Pipeline:
        """Where the session was last, since its prompts are cached there; else the least loaded
        pipeline that is up, as far as these stages go, and keeps pace."""
        up = [p for p in self._pipelines if p.ready(stages)]
        if not up:
            raise StageDead("no pipeline is up; it is being restarted")
        if speak and self._min_pace > 0:
            paces = {p: slowest(p, running) for p in up}
            up = [p for p in up if paces[p] >= self._min_pace]
            if not up:
                raise Busy(
                    f"running speech is made at {max(paces.values()):.2f} times real time; no more "
                    f"is taken"
                )
        known = self._sessions.get(session) if session is not None else None
        chosen = known if known in up else min(up, key=lambda p: p.active)
        if session is not None:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen


def slowest(pipeline: Pipeline, running: Collection[Ticket]) -> float:
    """How fast the slowest stream of a pipeline is made, in times of real time."""
    now = time.monotonic()
    return min((t.pace(now) for t in running if t.pipeline is pipeline), default=float("inf"))
