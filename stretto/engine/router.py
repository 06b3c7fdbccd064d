"""Which pipeline a request goes to, or why to none. Called by the request manager on the event
loop; imports no torch."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence

from stretto.engine.pipeline import Pipeline
from stretto.engine.request import RequestState
from stretto.errors import Busy, StageDead
from stretto.params import RequestOptions

MAX_SESSIONS = 4096  # whose last pipeline is remembered


class Router:
    """`min_pace`: new speech is refused where running speech is made slower than this many times
    real time."""

    def __init__(self, pipelines: Sequence[Pipeline], min_pace: float) -> None:
        self._pipelines = pipelines
        self._min_pace = min_pace
        self._sessions: OrderedDict[str, Pipeline] = OrderedDict()

    def choose(
        self, stages: Sequence[str], options: RequestOptions, running: Collection[RequestState]
    ) -> Pipeline:
        """The one that the options name (warm-up does so). Else where the session was last, since
        its prompts are cached there; else the least loaded pipeline that is up, as far as these
        stages go, and keeps pace."""
        if options.pipeline is not None:
            return next(p for p in self._pipelines if p.name == options.pipeline)
        up = [p for p in self._pipelines if p.ready(stages)]
        if not up:
            raise StageDead("no pipeline is up; it is being restarted")
        if options.speaks and self._min_pace > 0:
            up = self._keeping_pace(up, of_others(running, options))
        session = options.session
        known = self._sessions.get(session) if session is not None else None
        load = Counter(r.pipeline for r in running)
        chosen = known if known in up else min(up, key=lambda p: load[p])
        if session is not None:
            self._remember(session, chosen)
        return chosen

    def _keeping_pace(
        self, up: Sequence[Pipeline], running: Collection[RequestState]
    ) -> list[Pipeline]:
        paces = {p: slowest([r for r in running if r.pipeline is p]) for p in up}
        fast = [p for p in up if paces[p] >= self._min_pace]
        if not fast:
            raise Busy(
                f"running speech is made at {max(paces.values()):.2f} times real time; no more "
                f"is taken"
            )
        return fast

    def _remember(self, session: str, pipeline: Pipeline) -> None:
        self._sessions[session] = pipeline
        self._sessions.move_to_end(session)
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)


def of_others(
    running: Collection[RequestState], options: RequestOptions
) -> Collection[RequestState]:
    """The requests by whose pace this one may be refused: not those of its own session. A listener
    without a session is known by the request's client, which may also be an application with many
    listeners: so one speech of this client is left out, and two are not."""
    others = [r for r in running if options.session is None or r.options.session != options.session]
    same_client = [r for r in others if r.options.speaks and r.options.client == options.client]
    return [r for r in others if r is not same_client[0]] if len(same_client) == 1 else others


def slowest(running: Collection[RequestState]) -> float:
    """How fast the slowest stream is made, in times of real time; infinite if there is none."""
    now = time.monotonic()
    return min((r.pace(now) for r in running), default=float("inf"))
