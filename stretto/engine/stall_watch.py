"""Looks for requests that make no progress and hosts that do not answer, and asks hosts for their
numbers. Run by the engine, on the event loop; imports no torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from stretto.config.engine import EngineConfig
from stretto.engine.pipeline import Pipeline
from stretto.engine.request import Ticket
from stretto.errors import StageDead
from stretto.types import RequestId

WATCH_S = 0.25
LATE_S = WATCH_S + 0.5
PING_EVERY = 4  # looks
PATIENCE = 4  # times `stall_s` that a request may wait in line for rows that others hold


class Watch:
    def __init__(
        self,
        tickets: Mapping[RequestId, Ticket],
        pipelines: Sequence[Pipeline],
        config: EngineConfig,
    ) -> None:
        self._tickets = tickets
        self._pipelines = pipelines
        self._config = config

    async def run(self) -> None:
        before, looks = time.monotonic(), 0
        while True:
            await asyncio.sleep(WATCH_S)
            before, late = time.monotonic(), time.monotonic() - before > LATE_S
            if late:
                # we stood still ourselves: what the hosts said meanwhile has not been read yet
                continue
            for t in list(self._tickets.values()):
                self.look(t)
            looks += 1
            for p in self._pipelines:
                p.kill_silent(self._config.stall_s)
                if looks % PING_EVERY == 0:
                    p.ping(looks)

    def look(self, t: Ticket) -> None:
        now = time.monotonic()
        rest = now - t.progressed
        if (
            t.over
            or t.failed
            or t.throttled
            or t.written
            or rest <= self._config.stall_s * (PATIENCE if self._in_line(t) else 1)
        ):
            return
        if t.events.empty():  # else its consumer is at rest, not the stages
            waiting = sorted(t.unfinished)
            t.fail(StageDead(f"{t.id}: no progress for {rest:.1f} s in {', '.join(waiting)}"))
        else:
            t.progressed = now

    def _in_line(self, t: Ticket) -> bool:
        """Is it still queued in its last stage while others make progress? Then it may wait
        longer."""
        if t.samples if len(t.stages) > 1 else t.ids:
            return False
        newest = max(o.progressed for o in self._tickets.values() if o.pipeline is t.pipeline)
        return time.monotonic() - newest <= self._config.stall_s
