"""An autoregressive stage: a scheduler and a runner around one model, serving many requests at once.

All methods belong to the loop thread. `turn` does what can be done now and never waits: it retires the steps that
have come back, hands their certain outputs to `emit`, and launches one more if fewer than `overlap_depth` are in
flight (one, so that the stages of a host take turns) and it is time for it: a step that would only lie in the queue is
held back (`ahead.py`) unless it brings a prompt, and `due_ns` says until when. A stop is seen one step late; the
surplus of that step is dropped here and never reaches `emit`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from stretto.errors import Bug, StrettoError
from stretto.stage.ahead import Ahead
from stretto.stage.request import Confirmed, Reason, RequestSpec, Salt, StageRequest, State
from stretto.stage.runner.runner import Runner
from stretto.stage.runner.step import Step
from stretto.stage.runner.waiter import Waiter
from stretto.stage.scheduler.batch import Batch, Outcome, Published
from stretto.stage.scheduler.blocks import PayloadHandle
from stretto.stage.scheduler.scheduler import Rows, Scheduler
from stretto.types import RequestId


@dataclass(frozen=True, slots=True, eq=False)
class MediaOutput:
    """Accept-layer rows of prompt positions, on the device; complete once `event` has fired (None: now)."""

    places: Sequence[int]
    rows: torch.Tensor
    event: torch.cuda.Event | None


@dataclass(slots=True, eq=False)
class Output:
    """What became certain for one request. Nothing in here is ever taken back. (Not frozen: one is made for every
    token, and a frozen record takes three times as long.)"""

    request: StageRequest
    confirmed: Confirmed
    token: int | None  # newly certain; for a frame, its code 0
    row: Sequence[int]  # all columns of the token (a frame's codes); empty without a token
    step: Step | None  # whose `tokens[at]` is the same row on the device
    at: int
    media: MediaOutput | None
    reason: Reason | None  # the segment ended here

    @property
    def error(self) -> StrettoError | None:
        return self.request.error

    @property
    def device_row(self) -> torch.Tensor:
        assert self.step is not None, "no token, no row"
        return self.step.tokens[self.at]


Emit = Callable[[Output], None]
_NO_ROW: list[int] = []


@dataclass(slots=True, eq=False)
class Kept:
    """Accept-layer rows that belong to a cached block."""

    places: list[int]
    rows: torch.Tensor


@dataclass(slots=True)
class StageStats:
    """Counters that the loop thread keeps; read by metrics and benchmarks."""

    steps: int = 0
    rows: int = 0  # computed
    tokens: int = 0  # confirmed
    failed: int = 0  # steps
    launch_ns: int = 0  # host time to schedule and launch
    retire_ns: int = 0  # host time to retire
    held: int = 0  # launches that were held back for a while
    late: int = 0  # of these, launches that found the device without work: held back for too long


class PayloadStore:
    """Rows kept beside cached blocks, by handle. The scheduler says when a handle is no longer needed."""

    def __init__(self) -> None:
        self._kept: dict[PayloadHandle, Kept] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, kept: Kept) -> PayloadHandle:
        handle = PayloadHandle(self._next)
        self._next += 1
        self._kept[handle] = kept
        return handle

    def get(self, handle: PayloadHandle) -> Kept:
        return self._kept[handle]

    def drop(self, handle: PayloadHandle) -> None:
        del self._kept[handle]


@dataclass(slots=True, eq=False)
class _Seat:
    """What the stage keeps for one request beside the scheduler's record."""

    request: StageRequest
    media: list[MediaOutput] = field(default_factory=list)  # handed out so far, for blocks that become cached
    cached: int = 0  # prompt rows found in the prefix cache


class Stage:
    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        runner: Runner,
        emit: Emit,
        store: PayloadStore | None = None,
        waiter: Waiter | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """Without `ahead`, steps are launched as soon as there is room for them."""
        self.name, self.scheduler, self.runner, self.emit = name, scheduler, runner, emit
        self.store = store if store is not None else PayloadStore()  # an empty one is False, like all that is empty
        self.waiter = waiter
        self.ahead = ahead or Ahead((), 0, on=False)
        self.clock = self.ahead.clock
        self.due_ns: int | None = None  # when a launch that is held back is due
        self.stats = StageStats()
        self._steps: deque[Step] = deque()
        self._seats: dict[RequestId, _Seat] = {}

    def __len__(self) -> int:
        """Requests that this stage still holds anything for."""
        return len(self._seats)

    # -- requests

    def submit(
        self, spec: RequestSpec, given: Any, prompt: Rows = 0, *, closed: bool = True, salts: Sequence[Salt] = ()
    ) -> StageRequest:
        """Take a request; `given` is what the model's lane needs beside the ids. Keeps nothing if refused."""
        request = self.scheduler.submit(spec, prompt, closed=closed, salts=salts)
        self.runner.lane.inputs[spec.id] = given
        self._seats[spec.id] = _Seat(request)
        return request

    def cancel(self, id: RequestId) -> bool:
        """End a request wherever it is. What is in flight for it is dropped as it comes back."""
        ended = self.scheduler.cancel(id)
        self._leave(id)
        return ended

    def num_cached(self, id: RequestId) -> int:
        return self._seats[id].cached

    # -- steps

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def idle(self) -> bool:
        return not self._steps and not self._seats

    def turn(self) -> bool:
        """Do what can be done now. True: something was."""
        did = False
        while self._steps and self._steps[0].done:
            self._retire(self._steps.popleft())
            did = True
        if len(self._steps) < self.scheduler.config.overlap_depth:
            did = self._launch_next() or did
        return did

    def wait(self) -> None:
        """Until the oldest step is back. For callers without a loop."""
        if self._steps:
            self._steps[0].wait_tokens()

    def _find(self, id: RequestId) -> StageRequest:
        return self._seats[id].request

    def _launch_next(self) -> bool:
        """Launch one step, unless it can wait. False: nothing was launched."""
        held, due = self.due_ns is not None, self.ahead.due_ns()
        self.due_ns = due if due is not None and self.scheduler.only_decodes_wait else None
        if self.due_ns is not None:
            return False
        start = self.clock()
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        before = self._steps[-1] if self._steps else None
        self._launch(batch, start)
        self.stats.launch_ns += self.clock() - start
        if held:
            self.stats.held += 1
            self.stats.late += before is None or before.done
        return True

    def _launch(self, batch: Batch, start: int) -> None:
        step = self.runner.launch(batch, self._find)
        self._steps.append(step)
        known = batch.decode_only and step.error is None
        flight = self.ahead.launched(len(batch.spans) if known else None, self.clock() - start)
        self.stats.steps += 1
        self.stats.rows += batch.num_tokens
        if self.waiter is not None and step.copied is not None:
            self.waiter.watch(step.copied, lambda: self.ahead.ended(flight))
        for join in batch.joined:
            self._seats[join.request].cached += join.filled - join.reused_from
            kept = [self.store.get(handle) for _, handle in join.payloads]
            if kept:  # found in the cache: certain already, and never computed for this request
                request = self._find(join.request)
                places = [p for k in kept for p in k.places]
                media = MediaOutput(places, *self.runner.joined([k.rows for k in kept]))
                self._seats[join.request].media.append(media)
                self._emit(Output(request, Confirmed(request.cursor.confirmed), None, (), None, 0, media, None))

    def _retire(self, step: Step) -> None:
        start = self.clock()
        self.ahead.retired()
        result = self.runner.retire(step)
        rows = {i: at for at, i in enumerate(step.sampling)}
        columns: list[list[int]] = [] if step.error is not None else step.host.tolist()
        captured, confirm = step.captured.rows, self.runner.lane.confirm
        self.stats.failed += step.error is not None
        for outcome in self.scheduler.retire(step.batch, result):
            request, index, token = outcome.request, outcome.at, outcome.token
            media = None
            if index in captured:
                media = MediaOutput(step.captured.places[index], captured[index], step.captured_at)
                self._seats[request.id].media.append(media)
            at, row = 0, _NO_ROW
            if token is not None:
                at = rows[index]
                row = columns[at]
                self.stats.tokens += 1
                confirm(request, row)
            if outcome.published:
                self._keep(outcome)
            self._emit(Output(request, outcome.confirmed, token, row, step, at, media, outcome.reason))
        for span in step.batch.spans:
            seat = self._seats.get(span.request)
            if seat is not None and seat.request.state is State.DONE:
                self._leave(span.request)
        self.stats.retire_ns += self.clock() - start

    def _emit(self, output: Output) -> None:
        if output.confirmed > output.request.cursor.launched:
            raise Bug(f"{output.request.id}: an output that was never launched")
        self.emit(output)

    def _keep(self, outcome: Outcome) -> None:
        """Blocks that became findable keep the accept-layer rows of their media."""
        for block in outcome.published:
            kept = self._rows_of(outcome.request, block)
            if kept is not None:
                handle = self.store.put(kept)
                if not self.scheduler.attach_payload(block, handle):
                    self.store.drop(handle)

    def _rows_of(self, request: StageRequest, block: Published) -> Kept | None:
        places: list[int] = []
        rows: list[torch.Tensor] = []
        for media in self._seats[request.id].media:
            where = np.asarray(media.places)
            low, high = np.searchsorted(where, [block.start, block.stop])
            if low < high:
                places += where[low:high].tolist()
                rows.append(media.rows[low:high])
        return Kept(places, self.runner.joined(rows)[0]) if rows else None  # read by `joined` again, on that stream

    def _leave(self, id: RequestId) -> None:
        """Forget a request once it is over and nothing of it is in flight."""
        seat = self._seats.get(id)
        if seat is not None and seat.request.state is State.DONE and not seat.request.in_flight:
            del self._seats[id]
            del self.runner.lane.inputs[id]
