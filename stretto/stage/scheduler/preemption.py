"""Who gives up memory for whom when there are too few blocks: preemption. Used by the table, on the
stage's loop thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from stretto.stage.request import BlockId, StageRequest, State
from stretto.stage.scheduler.allocation import Allocation
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.queues import by_order
from stretto.types import RequestId


class Preemption:
    """Its methods return the requests that lost their rows and blocks, whose states the caller
    updates. `step` in the methods is that of the batch being made; `idle`: it is empty so far, and
    nothing is in flight."""

    def __init__(
        self,
        config: SchedulerConfig,
        allocation: Allocation,
        requests: Mapping[RequestId, StageRequest],
    ) -> None:
        self._config = config
        self._allocation = allocation
        self._requests = requests

    def free_blocks_for_row(
        self, request: StageRequest, step: int, idle: bool
    ) -> Sequence[StageRequest]:
        """One more block for a running request, from those that are less urgent."""
        victims = self._victims(request, step, idle, lambda other: other.order > request.order)
        return self._free_blocks(victims, lambda _: 1)[1]

    def free_blocks_for_new(
        self,
        head: StageRequest,
        found: list[BlockId],
        step: int,
        idle: bool,
        new: Collection[StageRequest],
    ) -> tuple[bool, Sequence[StageRequest]]:
        """The blocks that `head` needs to be admitted (`Allocation.num_needed`): running requests
        of a lower priority give theirs up. Whether it can be admitted now."""
        running = {r for r in self._allocation.by_row.values() if r.state is State.RUNNING}
        victims = self._victims(
            head,
            step,
            idle and not running,
            lambda other: other.spec.priority > head.spec.priority and other.order > head.order,
            new,
        )
        return self._free_blocks(
            victims, lambda gone: self._allocation.num_needed(head, found, gone)
        )

    def _free_blocks(
        self, victims: Sequence[StageRequest], need: Callable[[Sequence[StageRequest]], int]
    ) -> tuple[bool, Sequence[StageRequest]]:
        """Preempts as few of `victims` as possible, in order, to have the blocks needed once they
        are gone; nobody, if all of them would not do. False if there is no room, or only when the
        steps in flight have retired."""
        have = self._allocation.pool.num_available + self._allocation.num_deferred
        counts: Counter[BlockId] = Counter()
        for num_gone in range(len(victims) + 1):
            gone = victims[:num_gone]
            if have >= need(gone):
                for victim in gone:
                    self._preempt(victim)
                return self._allocation.pool.num_available >= need(gone), gone
            if num_gone < len(victims):
                for block in victims[num_gone].blocks:
                    counts[block] += 1
                    # the last to hold it
                    have += counts[block] == self._allocation.pool.num_refs(block)
        return False, ()

    def _victims(
        self,
        request: StageRequest,
        step: int,
        stuck: bool,
        may_lose: Callable[[StageRequest], bool],
        new: Collection[StageRequest] = (),
    ) -> list[StageRequest]:
        """Who gives up its blocks for `request`: those that `may_lose` allows, least urgent first.
        If nothing can move before input arrives (`stuck`), then also those that wait for input,
        however urgent they are; but not those that got their row just now (`new`). Never one whose
        span is in the batch being made already."""
        holders = [
            r
            for r in self._requests.values()
            if r.blocks and r is not request and r.last_step != step
        ]
        holders.sort(key=by_order, reverse=True)
        losers = [r for r in holders if may_lose(r)]
        resting = (State.STARVED, State.WAITING)
        last = [
            r for r in holders if stuck and r.state in resting and r not in losers and r not in new
        ]
        return losers + last

    def _preempt(self, victim: StageRequest) -> None:
        """Takes a request's row and blocks. Its steps in flight stand: they still have the blocks
        (in deferred_free) and their tokens count. All confirmed tokens become input to be computed
        again when it is admitted again, which is only when nothing of it is in flight, so that the
        host knows them all."""
        self._allocation.release_row(victim)
        self._allocation.drop(victim)
        if victim.state is State.RUNNING:
            victim.num_preemptions += 1
            victim.refresh_order(self._config.max_preemptions)
