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

from stretto.errors import Bug, StrettoError
from stretto.observe.recorder import Recorder
from stretto.stage.ahead import Ahead
from stretto.stage.counters import StageStats
from stretto.stage.mediarows import MediaOutput, PayloadStore
from stretto.stage.request import Confirmed, Reason, RequestSpec, Salt, StageRequest, State
from stretto.stage.runner.logprobs import Scored
from stretto.stage.runner.runner import Runner
from stretto.stage.runner.step import Step
from stretto.stage.runner.waiter import Waiter
from stretto.stage.scheduler.batch import Batch
from stretto.stage.scheduler.scheduler import Rows, Scheduler
from stretto.types import RequestId, Span


@dataclass(slots=True, eq=False)
class Output:
    """What became certain for one request. Nothing in here is ever taken back. (Not frozen: one is made for every
    token, and a frozen record takes three times as long.)"""

    request: StageRequest
    confirmed: Confirmed
    token: int | None  # newly certain; for a frame, its code 0
    row: Sequence[int]  # all columns of the token (a frame's codes); empty without a token
    media: MediaOutput | None
    reason: Reason | None  # the request ended here
    logprobs: Scored | None = None  # of the token, if the request asks

    @property
    def error(self) -> StrettoError | None:
        return self.request.error


Emit = Callable[[Output], None]
_NO_ROW: list[int] = []


@dataclass(slots=True, eq=False)
class _Seat:
    """What the stage keeps for one request beside the scheduler's record."""

    request: StageRequest
    since_ns: int  # it is here
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
        recorder: Recorder | None = None,
    ) -> None:
        """Without `ahead`, steps are launched as soon as there is room for them. `recorder` is given spans."""
        self.name, self.scheduler, self.runner, self.emit = name, scheduler, runner, emit
        self.store = store if store is not None else PayloadStore()  # an empty one is False, like all that is empty
        self.waiter = waiter
        self.ahead = ahead or Ahead((), 0, on=False)
        self.clock = self.ahead.clock
        self.due_ns: int | None = None  # when a launch that is held back is due
        self.gives_way: Callable[[], int | None] = lambda: None  # until when a decode step waits for others' prompts
        self._gave_way = False  # the launch that is held back does
        self.stats = StageStats()
        self.recorder = recorder or Recorder()
        self._steps: deque[tuple[Step, str, int, int]] = deque()  # with its kind, and when its launch began and ended
        self._seats: dict[RequestId, _Seat] = {}

    def __len__(self) -> int:
        """Requests that this stage still holds anything for."""
        return len(self._seats)

    # -- requests

    def submit(
        self,
        spec: RequestSpec,
        given: Any,
        prompt: Rows = 0,
        *,
        closed: bool = True,
        salts: Sequence[Salt] = (),
        missing: Sequence[Span] = (),
    ) -> StageRequest:
        """Take a request; `given` is what the model's lane needs beside the ids. Keeps nothing if refused."""
        request = self.scheduler.submit(spec, prompt, closed=closed, salts=salts, missing=missing)
        self.runner.lane.inputs[spec.id] = given
        self._seats[spec.id] = _Seat(request, self.clock())
        return request

    def cancel(self, id: RequestId) -> bool:
        """End a request wherever it is. What is in flight for it is dropped as it comes back."""
        ended = self.scheduler.cancel(id)
        self._leave(id)
        return ended

    @property
    def reading(self) -> bool:
        """Whether a step in flight holds prompts."""
        return any(kind != "decode" for _, kind, _, _ in self._steps)

    def num_cached(self, id: RequestId) -> int:
        return self._seats[id].cached

    # -- steps

    def turn(self) -> bool:
        """Do what can be done now. True: something was."""
        did = self._retire_done()
        if len(self._steps) < self.scheduler.config.overlap_depth and self._launch_next():
            did = True
            if self._steps[-1][0].copied is None:  # on a CPU the launch is the work: what came of it goes on at once
                self._retire_done()
        return did

    def _retire_done(self) -> bool:
        did = False
        while self._steps and self._steps[0][0].done:
            self._retire(*self._steps.popleft())
            did = True
        return did

    def _find(self, id: RequestId) -> StageRequest:
        return self._seats[id].request

    def _launch_next(self) -> bool:
        """Launch one step, unless it can wait. False: nothing was launched."""
        held, due = self.due_ns is not None, self.ahead.due_ns()
        way = self.gives_way() if due is None else None
        self.due_ns = due or way if (due or way) and self.scheduler.only_decodes_wait else None
        if self.due_ns is not None:
            self._gave_way = way is not None
            return False
        start = self.clock()
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        before = self._steps[-1][0] if self._steps else None
        self._launch(batch, start)
        if held and self._gave_way:
            self.stats.gave_way += 1
        elif held:
            self.stats.held += 1
            self.stats.late += before is None or before.done
        return True

    def _launch(self, batch: Batch, start: int) -> None:
        step = self.runner.launch(batch, self._find)
        launched = self.clock()
        kind = "decode" if batch.decode_only else "mixed" if batch.num_decodes else "prefill"
        self._steps.append((step, kind, start, launched))
        known = batch.decode_only and step.error is None
        flight = self.ahead.launched(len(batch.spans) if known else None, launched - start)
        self.stats.steps += 1
        self.stats.kinds[kind].launched((launched - start) / 1e9)
        self.recorder.span("loop", f"launch {self.name}", start, launched)
        self.stats.rows += batch.num_tokens
        if self.waiter is not None and step.copied is not None:
            self.waiter.watch(step.copied, lambda: self.ahead.ended(flight))
        for join in batch.joined:
            seat = self._seats[join.request]
            if seat.since_ns:  # the first time
                self.stats.queue.observe((start - seat.since_ns) / 1e9)
                seat.since_ns = 0
            seat.cached += join.filled - join.reused_from
            media = self.store.found(join, self.runner.joined)
            if media is not None:  # certain already, and never computed for this request
                request = seat.request
                seat.media.append(media)
                self._emit(Output(request, Confirmed(request.cursor.confirmed), None, (), media, None))

    def _retire(self, step: Step, kind: str, launching: int, launched: int) -> None:
        start = self.clock()
        begun, ended = self.ahead.retired()
        if step.copied is None:  # on a CPU the launch is the work
            begun, ended = launching, launched
        self.stats.kinds[kind].device.observe((ended - begun) / 1e9)
        tokens = "" if kind == "decode" else f", {step.batch.num_tokens} tokens"
        self.recorder.span(self.name, f"{kind} of {len(step.batch.spans)}{tokens}", begun, ended)
        result, columns = self.runner.retire(step)
        rows = {i: at for at, i in enumerate(step.sampling)}
        captured, confirm = step.captured.rows, self.runner.lane.confirm
        self.stats.failed += step.error is not None
        for outcome in self.scheduler.retire(step.batch, result):
            request, index, token = outcome.request, outcome.at, outcome.token
            media = None
            if index in captured:
                media = MediaOutput(step.captured.places[index], captured[index], step.captured_at)
                self._seats[request.id].media.append(media)
            row, told = _NO_ROW, None
            if token is not None:
                at = rows[index]
                row = columns[at]
                self.stats.tokens += 1
                confirm(request, row)
                if step.logprobs is not None:
                    told = step.logprobs.of(at)
            if outcome.published:
                handed = self._seats[request.id].media
                self.store.keep(outcome.published, handed, self.runner.joined, self.scheduler.pool.attach)
            self._emit(Output(request, outcome.confirmed, token, row, media, outcome.reason, told))
        for span in step.batch.spans:
            seat = self._seats.get(span.request)
            if seat is not None and seat.request.state is State.DONE:
                self._leave(span.request)
        done = self.clock()
        self.stats.retire_ns += done - start
        self.recorder.span("loop", f"retire {self.name}", start, done)

    def _emit(self, output: Output) -> None:
        if output.confirmed > output.request.cursor.launched:
            raise Bug(f"{output.request.id}: an output that was never launched")
        self.emit(output)

    def _leave(self, id: RequestId) -> None:
        """Forget a request once it is over and nothing of it is in flight."""
        seat = self._seats.get(id)
        if seat is not None and seat.request.state is State.DONE and not seat.request.in_flight:
            del self._seats[id]
            del self.runner.lane.inputs[id]
