"""Decides what runs next. `schedule` makes one `Batch` (up to `overlap_depth` of them may be in flight, so it works
with placeholders for tokens that the host does not know yet), `retire` takes in what a batch gave, in order. The
other methods are how input, credit, deadlines and cancellations arrive, at any moment in between. Called by the
stage on its loop thread; nothing here blocks, and nothing imports torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from stretto.errors import Bug, Busy, Gone, Invalid, StrettoError, TooLong
from stretto.stage.request import OPAQUE, BlockId, Reason, RequestSpec, Salt, StageRequest, State
from stretto.stage.scheduler.batch import Batch, Outcome, Published, RowSpan, StepResult
from stretto.stage.scheduler.blocks import BlockPool, PayloadHandle, chain_keys
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.ledger import Ledger
from stretto.stage.scheduler.queues import aged_first, most_urgent_first, split
from stretto.types import RequestId

Rows = int | Sequence[int]
"""Input rows: their token ids, or only their number when no id tells them."""


class Scheduler:
    def __init__(self, config: SchedulerConfig, on_drop: Callable[[PayloadHandle], None] | None = None) -> None:
        """`on_drop` is told each payload handle that the prefix cache no longer needs."""
        self.config = config
        self.pool = BlockPool(config.num_blocks, on_drop)
        self._ledger = Ledger(config, self.pool)
        self._size = config.block_size
        self._in_flight: deque[tuple[Batch, list[StageRequest]]] = deque()
        self._arrivals = 0
        self._left_out = False  # the last batch had to leave ready requests out, so some may be ageing
        self._prefilled = False  # the last batch held prefills

    # -- what others may ask

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_steps(self) -> int:
        """Batches made so far."""
        return self._ledger.step

    @property
    def num_waiting(self) -> int:
        return len(self._ledger.waiting)

    @property
    def num_seated(self) -> int:
        return len(self._ledger.holdings.seated)

    @property
    def only_decodes_wait(self) -> bool:
        """Whether there is something to run, and nothing of it is a prompt, as far as that can be told without making
        the batch."""
        holdings = self._ledger.holdings
        if self._ledger.waiting and holdings.num_free_rows:
            return False
        found, running = False, State.RUNNING
        for request in holdings.seated.values():
            if request.state is not running or (request.in_flight and request.spec.host_history):
                continue
            cursor = request.cursor
            start, known = cursor.filled, cursor.known
            if start + 1 == known and request.closed:
                found = True
            elif min(known, request.limit) > start:
                return False
        return found

    def requests(self) -> list[StageRequest]:
        """All that are not DONE."""
        return list(self._ledger.requests.values())

    def request(self, id: RequestId) -> StageRequest:
        try:
            return self._ledger.requests[id]
        except KeyError:
            raise Gone(f"request {id} is not here (any more)") from None

    def __contains__(self, id: RequestId) -> bool:
        return id in self._ledger.requests

    # -- input

    def submit(
        self,
        spec: RequestSpec,
        prompt: Rows = 0,
        *,
        closed: bool = True,
        salts: Sequence[Salt] = (),
        deadline: float | None = None,
    ) -> StageRequest:
        """A new request. With `closed=False` its prompt grows by `append_rows` until `close_prompt`; it may start
        empty (an announced request, whose first input is still to come)."""
        if spec.id in self._ledger.requests:
            raise Bug(f"request {spec.id} submitted twice")
        if sum(not r.was_admitted for r in self._ledger.requests.values()) >= self.config.max_waiting:
            raise Busy(f"{self.config.max_waiting} requests are waiting already")
        request = StageRequest(spec, self._arrivals, since=self._ledger.step, deadline=deadline)
        request.max_new, request.resumable = spec.max_new, spec.resumable
        request.refresh_order(self.config.max_preemptions)
        ids = self._fitting(request, prompt, spec.max_new, closed)
        request.cursor.append(request.add_input(ids, salts))
        if closed:
            self._close_prompt(request)
        request.refresh_limit()
        self._arrivals += 1
        self._ledger.add(request)
        return request

    def append_rows(self, id: RequestId, rows: Rows, *, last: bool = False, salts: Sequence[Salt] = ()) -> None:
        """More rows of an open prompt. `last` closes it in the same move. Raises TooLong and changes nothing if
        they do not fit. A salt's span counts from the start of the sequence."""
        request = self.request(id)
        if request.closed or request.state is State.PAUSED:
            raise Bug(f"{id}: rows for a closed prompt")
        ids = self._fitting(request, rows, request.max_new, last)
        request.cursor.append(request.add_input(ids, salts))
        if last:
            self._close_prompt(request)
        request.refresh_limit()
        self._ledger.settle(request)

    def close_prompt(self, id: RequestId) -> None:
        """The prompt is complete; the answer may begin."""
        self.append_rows(id, 0, last=True)

    def append_text(self, id: RequestId, count: int = 1) -> None:
        """`count` more text tokens arrived for a paced request: as many more decode steps may run."""
        request = self.request(id)
        if not request.spec.paced or request.text_ended or request.state is State.PAUSED:
            raise Bug(f"{id}: text that nobody waits for")
        request.num_text += count
        request.refresh_limit()
        self._ledger.settle(request)

    def end_text(self, id: RequestId) -> None:
        """No more text in this segment: a paced request runs free."""
        request = self.request(id)
        if not request.spec.paced or request.state is State.PAUSED:
            raise Bug(f"{id}: the end of a text that nobody waits for")
        request.text_ended = True
        request.refresh_limit()
        self._ledger.settle(request)

    def extend(
        self,
        id: RequestId,
        rows: Rows,
        *,
        closed: bool = True,
        max_new: int | None = None,
        salts: Sequence[Salt] = (),
    ) -> None:
        """A new segment of a paused request: all its tokens so far become prompt, then come `rows`. (To drop some
        of them first, `interrupt` it with `keep`.)"""
        request = self.request(id)
        if request.state is not State.PAUSED:
            raise Bug(f"{id}: a new segment while {request.state.name}")
        max_new = request.max_new if max_new is None else max_new
        ids = self._fitting(request, rows, max_new, closed)
        request.max_new, request.closed, request.reason = max_new, False, None
        request.num_text, request.text_ended = 0, False
        request.cursor.extend(request.add_input(ids, salts))
        if closed:
            self._close_prompt(request)
        request.refresh_limit()
        self._ledger.resume(request)

    def interrupt(self, id: RequestId, keep: int | None = None) -> None:
        """Ends the segment now and pauses the request, with the first `keep` of its tokens as history (by default
        all that are confirmed). What is in flight is discarded. Also truncates a request that is paused already."""
        request = self.request(id)
        if not request.resumable:
            raise Bug(f"{id}: only a resumable request can be interrupted")
        if keep is not None and not 0 <= keep <= len(request.ids):
            raise Bug(f"{id}: cannot keep {keep} of {len(request.ids)} tokens")
        self._ledger.pause(request, Reason.INTERRUPTED, len(request.ids) if keep is None else keep)

    def close(self, id: RequestId) -> None:
        """No further segment will come: the request ends with its current one (at once, if it is paused)."""
        request = self.request(id)
        request.resumable = False
        if request.state is State.PAUSED:
            self._ledger.end(request, request.reason or Reason.STOP)

    def cancel(self, id: RequestId) -> bool:
        """Ends the request now, whatever it is doing. False if it is gone already."""
        if id not in self._ledger.requests:
            return False
        self._ledger.end(self._ledger.requests[id], Reason.CANCELLED)
        return True

    def fail(self, id: RequestId, error: StrettoError) -> None:
        request = self.request(id)
        request.error = error
        self._ledger.end(request, Reason.FAILED)

    def set_deadline(self, id: RequestId, deadline: float | None) -> None:
        """When the output that has left runs out at the listener, on any clock that all requests share. None:
        nothing has left yet, which goes before every deadline."""
        request = self.request(id)
        request.deadline = deadline
        request.refresh_order(self.config.max_preemptions)

    def set_blocked(self, id: RequestId, blocked: bool) -> None:
        """Whether downstream has no room for this request's output. Up to `overlap_depth` steps that are in flight
        still give theirs: keep as much credit back."""
        request = self.request(id)
        request.blocked_downstream = blocked
        self._ledger.settle(request)

    def attach_payload(self, block: Published, payload: PayloadHandle) -> bool:
        """Keeps the payload of a published block, so that requests that need it can reuse the block. False if the
        block is gone or served: the handle stays the caller's."""
        return self.pool.attach(block.block, block.key, payload)

    # -- steps

    def schedule(self) -> Batch | None:
        """The next batch, or None if nothing can run now or enough is in flight."""
        if len(self._in_flight) >= self.config.overlap_depth:
            return None
        if self._ledger.waiting:
            self._ledger.admit(idle=not self._in_flight)
        decodes, prefills, answering = self._ready()
        aged_prefills = 0
        if self._left_out:
            decodes, _ = aged_first(decodes, self._ledger.step, self.config.patience)
            prefills, aged_prefills = aged_first(prefills, self._ledger.step, self.config.patience)
        self._left_out = False
        spans: list[RowSpan] = []
        placed: list[StageRequest] = []
        num_decodes = 0
        for some_decodes, some_prefills in self._turns(decodes, prefills):
            # Decodes may use the whole budget, unless a prefill has been left out for too long.
            budget = self.config.max_step_tokens
            kept = min(budget // 2, self.config.least_share) if aged_prefills else 0
            for request in some_decodes:
                if len(spans) >= budget - kept:
                    self._left_out = True
                    break
                self._place(request, request.cursor.filled + 1, spans, placed)
            num_decodes = len(spans)
            if some_prefills:
                chunk = self.config.prefill_chunk if answering else self.config.lone_prefill_chunk
                self._place_prefills(some_prefills, min(budget - num_decodes, chunk), spans, placed)
            if spans:
                break
        if not spans:
            return None
        num_tokens = num_decodes + sum(span.stop - span.start for span in spans[num_decodes:])
        self._prefilled = len(spans) > num_decodes
        holdings = self._ledger.holdings
        batch = Batch(
            step=self._ledger.step,
            spans=tuple(spans),
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            joined=tuple(holdings.joined),
            left=tuple(holdings.left),
        )
        holdings.joined, holdings.left = [], []
        self._in_flight.append((batch, placed))
        self._ledger.step += 1
        return batch

    def retire(self, batch: Batch, result: StepResult) -> list[Outcome]:
        """Takes in the results of the oldest batch in flight."""
        if not self._in_flight or self._in_flight[0][0] is not batch:
            raise Bug(f"step {batch.step} retired out of order")
        if len(result.tokens) != len(batch.spans):
            raise Bug(f"step {batch.step}: {len(result.tokens)} tokens for {len(batch.spans)} spans")
        _, requests = self._in_flight.popleft()
        outcomes = []
        for index, (request, span, token) in enumerate(zip(requests, batch.spans, result.tokens)):
            request.in_flight -= 1
            if span.epoch != request.epoch:
                continue  # surplus: the request has stopped, ended or been cut back since this was launched
            if result.errors and span.request in result.errors:
                outcomes.append(self._fail_span(request, index, result.errors[span.request]))
            else:
                outcomes.append(self._confirm(request, index, span, token))
        self._ledger.holdings.retire(batch.step)
        return outcomes

    def check(self) -> None:
        """Asserts every invariant that can be seen from outside a method. For tests and for idle moments."""
        self._ledger.check()
        for request in self.requests():
            if request.in_flight != sum(request in placed for _, placed in self._in_flight):
                raise Bug(f"{request.id}: {request.in_flight} steps in flight")

    # -- scheduling, in parts

    def _turns(
        self, decodes: list[StageRequest], prefills: list[StageRequest]
    ) -> list[tuple[list[StageRequest], list[StageRequest]]]:
        """What may share a step; the second choice is for when nothing of the first gets the blocks that it needs."""
        if self.config.mixed or not decodes or not prefills:
            return [(decodes, prefills)]
        alone: list[tuple[list[StageRequest], list[StageRequest]]] = [([], prefills), (decodes, [])]
        return alone[::-1] if self._prefilled else alone

    def _ready(self) -> tuple[list[StageRequest], list[StageRequest], bool]:
        """Seated requests that can compute now: those that decode, those with more than one row or none to sample,
        each most urgent first; and whether any request is in the middle of its answer."""
        decodes, prefills, answering = [], [], False
        running = State.RUNNING
        for request in most_urgent_first(self._ledger.holdings.seated.values()):
            cursor = request.cursor
            if cursor.known > cursor.prompt and not request.blocked_downstream:
                answering = True
            if request.state is not running or (request.in_flight and request.spec.host_history):
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

    def _place_prefills(
        self, prefills: list[StageRequest], budget: int, spans: list[RowSpan], placed: list[StageRequest]
    ) -> None:
        wants = [self._num_rows(r) for r in prefills]
        for request, share in zip(prefills, split(budget, wants, self.config.least_share)):
            if share:
                self._place(request, request.cursor.filled + share, spans, placed)
            else:
                self._left_out = True

    def _place(self, request: StageRequest, stop: int, spans: list[RowSpan], placed: list[StageRequest]) -> None:
        """Puts a request's rows up to `stop` into the batch, or as many of them as get blocks."""
        if request.state is not State.RUNNING:
            return  # preempted for a more urgent one in this very pass
        cursor = request.cursor
        start, table = cursor.filled, len(request.blocks)
        new_blocks: tuple[BlockId, ...] = ()
        if stop > table * self._size:
            stop = self._ledger.grow(request, stop, idle=not spans and not self._in_flight)
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
                request.spec.id,
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
        placed.append(request)
        cursor.launch(stop, samples)
        request.device_at = stop if samples else -1
        request.in_flight += 1
        request.last_step = request.since = self._ledger.step
        if stop >= request.limit:
            self._ledger.settle(request)

    # -- the ends of things

    def _confirm(self, request: StageRequest, index: int, span: RowSpan, token: int) -> Outcome:
        cursor = request.cursor
        start = cursor.confirmed
        confirmed = cursor.confirm(span.stop)
        reason = None
        if span.samples:
            reason = request.add_token(token)
            request.proven = True
        published: tuple[Published, ...] = ()
        next_full = (request.published + 1) * self._size
        if request.proven and next_full <= span.stop and next_full <= request.keyable and self.config.prefix_cache:
            published = self._publish(request, span.stop)
        if reason is not None:
            if request.resumable:
                self._ledger.pause(request, reason, len(request.ids))
            else:
                self._ledger.end(request, reason)
        return Outcome(request, index, start, confirmed, token if span.samples else None, reason, published)

    def _fail_span(self, request: StageRequest, index: int, error: StrettoError) -> Outcome:
        confirmed = request.cursor.confirm(0)  # nothing new
        self.fail(request.id, error)
        return Outcome(request, index, confirmed, confirmed, None, Reason.FAILED, ())

    def _publish(self, request: StageRequest, stop: int) -> tuple[Published, ...]:
        """Makes blocks findable that are full with the step that computed rows up to `stop`. (`confirmed` may be
        ahead of it: then these rows are computed for a second time, and those after them are not there yet.)"""
        size = self._size
        # A request that was preempted while the step was in flight has no blocks left to offer.
        rows = min(stop, request.keyable, len(request.blocks) * size)
        chain_keys(request, rows, size)
        awaiting = []
        for index in range(request.published, rows // size):
            key, media = request.keys[index]
            brings_payload = media and request.spec.needs_payload
            if self.pool.publish(request.blocks[index], key, brings_payload) and brings_payload:
                awaiting.append(Published(request.blocks[index], key, index * size, (index + 1) * size))
        request.published = max(request.published, rows // size)
        return tuple(awaiting)

    # -- input, checked before anything changes

    def _fitting(self, request: StageRequest, rows: Rows, max_new: int, closing: bool) -> Sequence[int]:
        """The ids of new input rows, if the request can ever be served with them."""
        ids = [OPAQUE] * rows if isinstance(rows, int) else rows
        prompt = len(request.ids) + len(ids)
        if closing and not prompt:
            raise Invalid("the prompt is empty", param="prompt")
        if prompt + max_new > self.config.max_context:
            limit = self.config.max_context
            raise TooLong(f"{prompt} tokens of prompt and {max_new} of answer exceed the context of {limit} tokens")
        if self._ledger.holdings.num_blocks(prompt + max_new - 1) > self.config.num_blocks:
            raise Invalid(f"{prompt + max_new} tokens can never fit this stage's {self.config.num_blocks} KV blocks")
        return ids

    def _close_prompt(self, request: StageRequest) -> None:
        cursor = request.cursor
        request.closed = True
        if cursor.filled == cursor.known:
            # All rows ran before anyone knew that the last of them should sample: it runs again. What of them is
            # still in flight is given up and runs again too, so that no block is written by two steps at once.
            request.epoch += 1
            cursor.rollback(cursor.known)
            cursor.vacate(cursor.known - 1)
            self._ledger.holdings.trim(request)
