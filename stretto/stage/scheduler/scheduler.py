"""Decides what runs next. `schedule` makes one `Batch` (up to `overlap_depth` of them may be in
flight, so it works with placeholders for tokens that the host does not know yet), `retire` takes in
what a batch gave, in order. The other methods are how input, credit, deadlines and cancellations
arrive, at any moment in between. Called by the stage on its loop thread; nothing here blocks, and
nothing imports torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from stretto.errors import Bug, Busy, Gone, Invalid, StrettoError, TooLong
from stretto.stage.request import OPAQUE, BlockId, Reason, RequestSpec, Salt, StageRequest, State
from stretto.stage.scheduler.batch import Batch, Outcome, Published, RowSpan, StepResult
from stretto.stage.scheduler.blocks import BlockPool
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.prefix import publish, search
from stretto.stage.scheduler.queues import aged_first, by_order, split
from stretto.stage.scheduler.requests import RequestTable
from stretto.types import RequestId, Span

Rows = int | Sequence[int]
"""Input rows: their token ids or, where no ids describe them, their number."""


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.table = RequestTable(config, self.pool)
        self._size = config.block_size
        self.in_flight: deque[Batch] = deque()
        self._arrivals = 0
        # the last batch had to leave ready requests out, so some may be ageing
        self._left_out = False
        # the last batch held prefills
        self._prefilled = False

    # -- what others may ask

    @property
    def num_waiting(self) -> int:
        return len(self.table.waiting)

    @property
    def only_decodes_wait(self) -> bool:
        """Whether there is something to run, and nothing of it is a prompt, as far as that is
        known without making the batch."""
        allocation = self.table.allocation
        if self.table.waiting and allocation.free_rows:
            return False
        found, running = False, State.RUNNING
        for request in allocation.by_row.values():
            if request.state is not running:
                continue
            cursor = request.cursor
            start, known = cursor.filled, cursor.known
            if start + 1 == known and request.closed:
                found = True
            elif min(known, request.limit) > start:
                return False
        return found

    def request(self, id: RequestId) -> StageRequest:
        try:
            return self.table.requests[id]
        except KeyError:
            raise Gone(f"request {id} is not here (any more)") from None

    def __contains__(self, id: RequestId) -> bool:
        return id in self.table.requests

    # -- input

    def submit(
        self,
        spec: RequestSpec,
        prompt: Rows = 0,
        *,
        adapter_input: Any = None,
        closed: bool = True,
        salts: Sequence[Salt] = (),
        missing: Sequence[Span] = (),
    ) -> StageRequest:
        """A new request. With `closed=False` its prompt grows by `append_rows`; it may start empty
        (an announced request, whose first input is still to come). `missing`: see `set_missing`."""
        if spec.id in self.table.requests:
            raise Bug(f"request {spec.id} submitted twice")
        if sum(not r.was_admitted for r in self.table.requests.values()) >= self.config.max_waiting:
            raise Busy(f"{self.config.max_waiting} requests are waiting already")
        request = StageRequest(spec, self._arrivals, adapter_input, since=self.table.step)
        request.refresh_order(self.config.max_preemptions)
        request.missing = missing
        self._add_rows(request, prompt, salts, closed)
        self._arrivals += 1
        self.table.add(request)
        return request

    def append_rows(
        self, id: RequestId, rows: Rows, *, last: bool = False, salts: Sequence[Salt] = ()
    ) -> None:
        """More rows of an open prompt. `last` closes it in the same move. Raises TooLong and
        changes nothing if they do not fit. A salt's span counts from the start of the sequence."""
        request = self.request(id)
        if request.closed:
            raise Bug(f"{id}: rows for a closed prompt")
        self._add_rows(request, rows, salts, last)
        self.table.update_state(request)

    def set_missing(self, id: RequestId, missing: Sequence[Span]) -> None:
        """The prompt rows whose input is not here yet, in order; all others' is. They are not
        computed until it comes, unless the prefix cache has them: then it need not come at all."""
        request = self.request(id)
        request.missing = missing
        self.table.update_state(request)

    def num_found(self, id: RequestId) -> int:
        """Leading rows that need not be computed: those with KV or, before it has a row, those in
        the prefix cache."""
        request = self.request(id)
        if request.row is not None or request.blocks or not self.config.prefix_cache:
            return request.cursor.filled
        return len(search(self.pool, request, self._size)) * self._size

    def append_step_inputs(self, id: RequestId, count: int = 1, *, last: bool = False) -> None:
        """`count` more step inputs arrived for a paced request: as many more decode steps may run.
        `last`: no more will come, and it runs without."""
        request = self.request(id)
        if not request.spec.paced or request.step_inputs_ended:
            raise Bug(f"{id}: step inputs that it does not wait for")
        request.num_step_inputs += count
        request.step_inputs_ended = last
        self.table.update_state(request)

    def cancel(self, id: RequestId) -> bool:
        """Ends the request now, whatever it is doing. False if it is gone already."""
        if id not in self.table.requests:
            return False
        self.table.end(self.table.requests[id], Reason.CANCELLED)
        return True

    def set_deadline(self, id: RequestId, deadline: float | None) -> None:
        """When the output that has left runs out at the listener, on any clock that all requests
        share. None: nothing has left yet, which goes before every deadline."""
        request = self.request(id)
        request.deadline = deadline
        request.refresh_order(self.config.max_preemptions)

    def set_blocked(self, id: RequestId, blocked: bool) -> None:
        """Whether downstream has no room for this request's output. Up to `overlap_depth` steps
        that are in flight still give theirs: keep as much credit back."""
        request = self.request(id)
        request.blocked_downstream = blocked
        self.table.update_state(request)

    # -- steps

    def schedule(self) -> Batch | None:
        """The next batch, or None if nothing can run now or enough is in flight."""
        if len(self.in_flight) >= self.config.overlap_depth:
            return None
        if self.table.waiting:
            self.table.admit(idle=not self.in_flight)
        decodes, prefills, answering = self._ready()
        aged_prefills = 0
        if self._left_out:
            decodes, _ = aged_first(decodes, self.table.step, self.config.patience)
            prefills, aged_prefills = aged_first(prefills, self.table.step, self.config.patience)
        self._left_out = False
        spans: list[RowSpan] = []
        num_decodes = 0
        for some_decodes, some_prefills in self._step_choices(decodes, prefills):
            # Decodes may use the whole budget, unless a prefill has been left out for too long.
            budget = self.config.max_step_tokens
            reserved = min(budget // 2, self.config.least_share) if aged_prefills else 0
            for request in some_decodes:
                if len(spans) >= budget - reserved:
                    self._left_out = True
                    break
                self._add_span(request, request.cursor.filled + 1, spans)
            num_decodes = len(spans)
            if some_prefills:
                chunk = self.config.prefill_chunk if answering else self.config.lone_prefill_chunk
                self._add_prefills(some_prefills, min(budget - num_decodes, chunk), spans)
            if spans:
                break
        if not spans:
            return None
        num_tokens = num_decodes + sum(span.stop - span.start for span in spans[num_decodes:])
        self._prefilled = len(spans) > num_decodes
        allocation = self.table.allocation
        batch = Batch(
            step=self.table.step,
            spans=tuple(spans),
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            joined=tuple(allocation.joined),
        )
        allocation.joined = []
        self.in_flight.append(batch)
        self.table.step += 1
        return batch

    def retire(self, batch: Batch, result: StepResult) -> list[Outcome]:
        """Takes in the results of the oldest batch in flight."""
        if not self.in_flight or self.in_flight[0] is not batch:
            raise Bug(f"step {batch.step} retired out of order")
        if len(result.rows) != len(batch.spans):
            raise Bug(f"step {batch.step}: {len(result.rows)} rows for {len(batch.spans)} spans")
        self.in_flight.popleft()
        outcomes = []
        for index, (span, row) in enumerate(zip(batch.spans, result.rows)):
            request = span.request
            request.in_flight -= 1
            if span.epoch != request.epoch:
                # surplus: the request has stopped, ended or been cut back since this was launched
                continue
            if result.errors and request.id in result.errors:
                outcomes.append(self._fail_span(request, index, result.errors[request.id]))
            else:
                outcomes.append(self._confirm(request, index, span, row))
        self.table.allocation.retire(batch.step)
        return outcomes

    # -- scheduling, in parts

    def _step_choices(
        self, decodes: list[StageRequest], prefills: list[StageRequest]
    ) -> list[tuple[list[StageRequest], list[StageRequest]]]:
        """What may share a step; the second choice is for when nothing of the first gets the blocks
        that it needs."""
        if self.config.mixed or not decodes or not prefills:
            return [(decodes, prefills)]
        alone: list[tuple[list[StageRequest], list[StageRequest]]] = [([], prefills), (decodes, [])]
        return alone[::-1] if self._prefilled else alone

    def _ready(self) -> tuple[list[StageRequest], list[StageRequest], bool]:
        """Requests of the batch that can compute now: those that decode, those with more than one
        row or none to sample, each most urgent first; and whether any request is in the middle of
        its answer."""
        decodes, prefills, answering = [], [], False
        running = State.RUNNING
        for request in sorted(self.table.allocation.by_row.values(), key=by_order):
            cursor = request.cursor
            if cursor.known > cursor.prompt and not request.blocked_downstream:
                answering = True
            # A guided request waits until the host knows what its next step goes on from.
            if (
                request.spec.guide is not None
                and request.in_flight
                and cursor.known > cursor.prompt
            ):
                continue
            if request.state is not running:
                continue
            start, known = cursor.filled, cursor.known
            rows = min(known, request.limit) - start
            if rows > 1 and request.spec.last_on_device:
                rows = self._num_rows(request)
            if rows == 1 and start + 1 == known and request.closed:
                decodes.append(request)
            elif rows > 0:
                prefills.append(request)
        return decodes, prefills, answering or bool(decodes)

    @staticmethod
    def _num_rows(request: StageRequest) -> int:
        """How many rows a request can compute in one step."""
        cursor = request.cursor
        rows = min(cursor.known, request.limit) - cursor.filled
        apart = request.spec.last_on_device and request.closed and cursor.known == cursor.prompt
        return rows - 1 if apart and rows > 1 else rows

    def _add_prefills(
        self,
        prefills: list[StageRequest],
        budget: int,
        spans: list[RowSpan],
    ) -> None:
        wants = [self._num_rows(r) for r in prefills]
        for request, share in zip(prefills, split(budget, wants, self.config.least_share)):
            if share:
                self._add_span(request, request.cursor.filled + share, spans)
            else:
                self._left_out = True

    def _add_span(self, request: StageRequest, stop: int, spans: list[RowSpan]) -> None:
        """Puts a request's rows up to `stop` into the batch, or as many of them as get blocks."""
        if request.state is not State.RUNNING:
            # preempted for a more urgent one in this very pass
            return
        cursor = request.cursor
        start, table = cursor.filled, len(request.blocks)
        new_blocks: tuple[BlockId, ...] = ()
        if stop > table * self._size:
            stop = self.table.grow(request, stop, idle=not spans and not self.in_flight)
            if stop <= start:
                self._left_out = True
                return
            new_blocks = tuple(request.blocks[table:])
        samples = request.closed and stop == cursor.known
        on_device = start == request.device_at or (
            request.spec.last_on_device and samples and stop == cursor.prompt and stop - start == 1
        )
        assert request.row is not None
        spans.append(
            RowSpan(
                request,
                request.row,
                start,
                stop,
                samples,
                on_device,
                cursor.launched,
                table,
                new_blocks,
                request.epoch,
            )
        )
        cursor.launch(stop, samples)
        request.device_at = stop if samples else -1
        request.in_flight += 1
        request.last_step = request.since = self.table.step
        if stop >= request.limit:
            self.table.update_state(request)

    # -- the ends of things

    def _confirm(
        self, request: StageRequest, index: int, span: RowSpan, row: Sequence[int]
    ) -> Outcome:
        confirmed = request.cursor.confirm(span.stop)
        reason = None
        if span.samples:
            reason = request.add_token(row[0])
            request.proven = True
        published: tuple[Published, ...] = ()
        next_full = (request.published + 1) * self._size
        if (
            request.proven
            and next_full <= span.stop
            and next_full <= request.keyable
            and self.config.prefix_cache
        ):
            published = publish(self.pool, request, span.stop, self._size)
        if reason is not None:
            self.table.end(request, reason)
        return Outcome(request, index, confirmed, row if span.samples else (), reason, published)

    def _fail_span(self, request: StageRequest, index: int, error: StrettoError) -> Outcome:
        # nothing new
        confirmed = request.cursor.confirm(0)
        request.error = error
        self.table.end(request, Reason.FAILED)
        return Outcome(request, index, confirmed, (), Reason.FAILED, ())

    # -- input, checked before anything changes

    def _add_rows(
        self, request: StageRequest, rows: Rows, salts: Sequence[Salt], last: bool
    ) -> None:
        """New rows of a prompt, if the request can ever be served with them. `last` closes it."""
        ids = [OPAQUE] * rows if isinstance(rows, int) else rows
        prompt, max_new = len(request.ids) + len(ids), request.spec.max_new
        if last and not prompt:
            raise Invalid("the prompt is empty", param="prompt")
        if prompt + max_new > self.config.max_context:
            limit = self.config.max_context
            raise TooLong(
                f"{prompt} tokens of prompt and {max_new} of answer exceed the context of {limit} "
                f"tokens"
            )
        if self.table.allocation.num_blocks(prompt + max_new - 1) > self.config.num_blocks:
            raise Invalid(
                f"{prompt + max_new} tokens can never fit this stage's {self.config.num_blocks} KV "
                f"blocks"
            )
        request.cursor.append(request.add_input(ids, salts))
        if last:
            self._close_prompt(request)

    def _close_prompt(self, request: StageRequest) -> None:
        cursor = request.cursor
        request.closed = True
        if cursor.filled == cursor.known:
            # All rows ran before anyone knew that the last of them should sample: it runs again.
            # What of them is still in flight is given up and runs again too, so that no block is
            # written by two steps at once.
            request.epoch += 1
            cursor.recall()
            cursor.vacate(cursor.known - 1)
            self.table.allocation.trim(request)
