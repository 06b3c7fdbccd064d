"""The scheduler's books: every live request and its state. (Who gives up memory for whom:
`preemption.py`.) `Scheduler` is the only caller, on the stage's loop thread. Each public method
leaves states, queue, rows and blocks in agreement (`tests/stage/invariants.py`)."""

from __future__ import annotations

from stretto.stage.request import BlockId, Reason, StageRequest, State
from stretto.stage.scheduler.allocation import Allocation
from stretto.stage.scheduler.blocks import BlockPool
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.preemption import Preemption
from stretto.stage.scheduler.prefix import search
from stretto.stage.scheduler.queues import by_age, next_waiting
from stretto.types import RequestId


class RequestTable:
    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.allocation = Allocation(pool, config.block_size, config.max_rows)
        self.requests: dict[RequestId, StageRequest] = {}
        # those in state WAITING
        self.waiting: dict[RequestId, StageRequest] = {}
        # of the batch being made, or of the next
        self.step = 0
        self._preemption = Preemption(config, self.allocation, self.requests)

    # -- states

    def add(self, request: StageRequest) -> None:
        self.requests[request.id] = request
        self.waiting[request.id] = request
        self.update_state(request)

    def update_state(self, request: StageRequest) -> None:
        """Puts a request into the state that its input and its row call for."""
        request.refresh_limit()
        if request.starved:
            state = State.STARVED
        elif request.row is None:
            state = State.WAITING
        else:
            state = State.RUNNING
        if state is not request.state:
            self._move(request, state)

    def end(self, request: StageRequest, reason: Reason) -> None:
        request.epoch += 1
        request.reason = reason
        self.allocation.release_row(request)
        self.allocation.drop(request)
        self._move(request, State.DONE)
        del self.requests[request.id]

    def _move(self, request: StageRequest, state: State) -> None:
        if request.state is State.WAITING:
            del self.waiting[request.id]
        request.move_to(state, self.step)
        if state is State.WAITING:
            self.waiting[request.id] = request

    # -- rows and blocks

    def admit(self, idle: bool) -> None:
        """Gives rows to waiting requests, strictly in order, while rows and blocks last. `idle`:
        nothing is in flight."""
        new: set[StageRequest] = set()
        # Two that wait for input right behind what was found for them could else take it from each
        # other for ever.
        patience = self.config.patience
        while (head := next_waiting(self.waiting.values(), self.step, patience)) is not None:
            if head.in_flight or not self._has_row():
                return
            reuse = self.config.prefix_cache and not head.blocks
            found = search(self.pool, head, self.config.block_size) if reuse else []
            self.pool.hold(found)
            enough = self.pool.num_available >= self.allocation.num_needed(head, found)
            if not enough and not self._preempt_for(head, found, idle, new):
                self.pool.release(found)
                return
            self.allocation.assign_row(head, found)
            new.add(head)
            self._move(head, State.RUNNING)
            # rows whose input is missing may begin right behind those found
            self.update_state(head)

    def grow(self, request: StageRequest, stop: int, idle: bool) -> int:
        """Blocks for rows up to `stop`, or for as many as there are; others are preempted only if
        not even one more row fits. Returns where the rows with blocks end. `idle`: the batch is
        empty so far, and nothing is in flight."""
        size = self.config.block_size
        want = self.allocation.num_blocks(stop) - len(request.blocks)
        if not self.pool.num_available and request.cursor.filled == len(request.blocks) * size:
            for victim in self._preemption.free_blocks_for_row(request, self.step, idle):
                self.update_state(victim)
        request.blocks.extend(self.pool.take(min(want, self.pool.num_available)))
        return min(stop, len(request.blocks) * size)

    def _preempt_for(
        self, head: StageRequest, found: list[BlockId], idle: bool, new: set[StageRequest]
    ) -> bool:
        """Whether there are blocks enough for a new request now that others gave up theirs."""
        fits, preempted = self._preemption.free_blocks_for_new(head, found, self.step, idle, new)
        for victim in preempted:
            self.update_state(victim)
        return fits

    def _has_row(self) -> bool:
        """Whether a row is free. If not, the request that has been starved for longest gives up its
        row, but keeps its blocks."""
        if not self.allocation.free_rows:
            # nobody has heard of: to take it back gains nothing
            new = {join.request for join in self.allocation.joined}
            starved = [
                r
                for r in self.allocation.by_row.values()
                if r.state is State.STARVED and not r.in_flight and r not in new
            ]
            if starved:
                self.allocation.release_row(min(starved, key=by_age))
        return bool(self.allocation.free_rows)
