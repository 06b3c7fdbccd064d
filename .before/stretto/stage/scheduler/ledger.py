"""The scheduler's books: every live request, its state, and who gives up memory for whom. `Scheduler` is the only
caller, on the stage's loop thread. Each public method leaves states, queue, rows and blocks in agreement; `check`
asserts that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from stretto.errors import Bug
from stretto.stage.request import BlockId, Reason, StageRequest, State
from stretto.stage.scheduler.batch import Leave
from stretto.stage.scheduler.blocks import BlockPool
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.holdings import Holdings
from stretto.stage.scheduler.queues import Waiting, by_age, by_order
from stretto.types import RequestId


class Ledger:
    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.holdings = Holdings(pool, config.block_size, config.max_rows)
        self.waiting = Waiting()
        self.requests: dict[RequestId, StageRequest] = {}
        self.step = 0  # of the batch being made, or of the next

    # -- states

    def add(self, request: StageRequest) -> None:
        self.requests[request.id] = request
        self.waiting.push(request)
        self.settle(request)

    def settle(self, request: StageRequest) -> None:
        """Puts a request into the state that its input and its row call for. A pause ends only with `resume`."""
        if request.state is State.PAUSED:
            return
        if request.starved:
            state = State.STARVED
        elif request.row is None:
            state = State.WAITING
        else:
            state = State.RUNNING
        if state is not request.state:
            self._move(request, state)

    def pause(self, request: StageRequest, reason: Reason, keep: int) -> None:
        """Ends the segment, with the first `keep` tokens as history. Their KV stays; what is in flight is void."""
        request.epoch += 1
        request.reason = reason
        self.holdings.unseat(request, Leave.PAUSED)
        request.cursor.rollback(keep)
        self.holdings.trim(request)
        request.forget(keep, self.config.block_size)
        if request.state is not State.PAUSED:
            self._move(request, State.PAUSED)

    def resume(self, request: StageRequest) -> None:
        """A paused request has a new segment."""
        self._move(request, State.STARVED if request.starved else State.WAITING)

    def end(self, request: StageRequest, reason: Reason) -> None:
        request.epoch += 1
        request.reason = reason
        self.holdings.unseat(request, Leave.ENDED)
        self.holdings.drop(request)
        self._move(request, State.DONE)
        del self.requests[request.id]

    def _move(self, request: StageRequest, state: State) -> None:
        if request.state is State.WAITING:
            self.waiting.discard(request)
        request.move_to(state, self.step)
        if state is State.WAITING:
            self.waiting.push(request)

    # -- rows and blocks

    def admit(self, idle: bool) -> None:
        """Gives rows to waiting requests, strictly in order, while rows and blocks last. `idle`: nothing is in
        flight."""
        while (head := self.waiting.head(self.step, self.config.patience)) is not None:
            if head.in_flight or not self._has_row():
                return
            reuse = self.config.prefix_cache and not head.blocks
            found = self.holdings.find_prefix(head) if reuse else []
            if not self._has_room(head, found, idle):
                self.pool.release(found)
                return
            self.holdings.seat(head, found)
            self._move(head, State.RUNNING)

    def grow(self, request: StageRequest, stop: int, idle: bool) -> int:
        """Blocks for rows up to `stop`, or for as many as there are; others are preempted only if not even one more
        row fits. Returns where the rows with blocks end. `idle`: the batch is empty so far, and nothing is in
        flight."""
        holdings, size = self.holdings, self.config.block_size
        want = holdings.num_blocks(stop) - len(request.blocks)
        if not self.pool.num_available and request.cursor.filled == len(request.blocks) * size:
            victims = self._victims(request, idle, lambda other: other.order > request.order)
            self._make_room(victims, lambda _: 1)
        holdings.grow(request, min(want, self.pool.num_available))
        return min(stop, len(request.blocks) * size)

    def _has_row(self) -> bool:
        """Whether a row is free. If not, the request that has been starved for longest gives up its row, but keeps
        its blocks."""
        if not self.holdings.num_free_rows:
            starved = [r for r in self.holdings.seated.values() if r.state is State.STARVED and not r.in_flight]
            if starved:
                self.holdings.unseat(min(starved, key=by_age), Leave.PARKED)
        return self.holdings.num_free_rows > 0

    def _has_room(self, head: StageRequest, found: list[BlockId], idle: bool) -> bool:
        """Whether all known rows of `head` fit beside what the running requests need now, with a block to spare for
        each of those: otherwise it would be preempted, or preempt, at once, and a running request that lacks a block
        could lack it for ever. Paused requests, and running ones of a lower priority, make room for it."""
        running = {r for r in self.holdings.seated.values() if r.state is State.RUNNING}
        victims = self._victims(
            head,
            idle and not running,
            lambda other: other.spec.priority > head.spec.priority and other.order > head.order,
        )
        num_blocks = self.holdings.num_blocks
        own = num_blocks(head.cursor.known) - len(head.blocks) - len(found)

        def need(gone: Sequence[StageRequest]) -> int:
            stay = running.difference(gone)
            return own + sum(1 + max(0, num_blocks(r.cursor.known) - len(r.blocks)) for r in stay)

        return self._make_room(victims, need)

    def _make_room(self, victims: Sequence[StageRequest], need: Callable[[Sequence[StageRequest]], int]) -> bool:
        """Preempts as few of `victims` as possible, in order, to have the blocks needed once they are gone; nobody,
        if all of them would not do. False if there is no room, or only when the steps in flight have retired."""
        have = self.pool.num_available + self.holdings.num_limbo
        counts: Counter[BlockId] = Counter()
        for num_gone in range(len(victims) + 1):
            gone = victims[:num_gone]
            if have >= need(gone):
                for victim in gone:
                    self._preempt(victim)
                return self.pool.num_available >= need(gone)
            if num_gone < len(victims):
                for block in victims[num_gone].blocks:
                    counts[block] += 1
                    have += counts[block] == self.pool.num_refs(block)  # the last to hold it
        return False

    def _victims(
        self, request: StageRequest, stuck: bool, may_lose: Callable[[StageRequest], bool]
    ) -> list[StageRequest]:
        """Who gives up its blocks for `request`, in this order: the paused, longest first; then those that
        `may_lose` allows, least urgent first. If nothing can move before input arrives (`stuck`), then also those
        that wait for input, however urgent they are. Never one whose span is in the batch being made already."""
        holders = [r for r in self.requests.values() if r.blocks and r is not request and r.last_step != self.step]
        holders.sort(key=by_order, reverse=True)
        paused = [r for r in holders if r.state is State.PAUSED]
        losers = [r for r in holders if r.state is not State.PAUSED and may_lose(r)]
        last = [r for r in holders if stuck and r.state in (State.STARVED, State.WAITING) and r not in losers]
        return sorted(paused, key=by_age) + losers + last

    def _preempt(self, victim: StageRequest) -> None:
        """Takes a request's row and blocks. Its steps in flight stand: they still have the blocks (in limbo) and
        their tokens count. All confirmed tokens become input to be computed again when it is admitted again, which
        is only when nothing of it is in flight, so that the host knows them all."""
        self.holdings.unseat(victim, Leave.PREEMPTED)
        self.holdings.drop(victim)
        if victim.state is State.RUNNING:
            victim.num_preemptions += 1
            victim.refresh_order(self.config.max_preemptions)
            self._move(victim, State.WAITING)

    def check(self) -> None:
        requests = list(self.requests.values())
        self.holdings.check(requests)
        for request in requests:
            request.cursor.check()
            state, seated = request.state, request.row is not None
            if state is State.DONE or (state is State.RUNNING and not seated):
                raise Bug(f"{request.id} is {state.name} and seated={seated}")
            if seated and state in (State.WAITING, State.PAUSED):
                raise Bug(f"{request.id} is {state.name} and has a row")
            if (state is State.WAITING) != (request in self.waiting):
                raise Bug(f"{request.id} is {state.name}, and in the queue or not against that")
            if state is not State.PAUSED and request.starved != (state is State.STARVED):
                raise Bug(f"{request.id} is {state.name}, starved={request.starved}")
