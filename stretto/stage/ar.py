"""The core of an autoregressive stage: a scheduler and a runner around one model, serving many
requests at once. A family's stage holds one, submits requests to it and makes its outputs into
payloads and reports.

All methods belong to the loop thread, and none waits. `poll` retires the steps that the device has
finished and returns what became certain. `launch` starts one more step if fewer than
`overlap_depth` are in flight (one, so that the stages of a host take turns) and it is time for it:
a step that would only lie in the queue is held back (`launch_timing.py`) unless it brings a prompt,
and `due_ns` says until when. They are two calls so that outputs travel on before the host spends
time on the next launch. A stop is seen one step late; `poll` drops the surplus of that step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import Bug, StrettoError
from stretto.observe.recorder import Recorder
from stretto.stage.counters import StageStats, reset
from stretto.stage.launch_timing import LaunchTimer
from stretto.stage.media_rows import MediaOutput, PayloadStore
from stretto.stage.request import Confirmed, Reason, RequestSpec, Salt, StageRequest, State
from stretto.stage.runner.logprobs import Scored
from stretto.stage.runner.runner import Runner
from stretto.stage.runner.step import Step
from stretto.stage.runner.waiter import Waiter
from stretto.stage.scheduler.batch import Batch
from stretto.stage.scheduler.scheduler import Rows, Scheduler
from stretto.types import RequestId, Span


@dataclass(slots=True, eq=False)
class Certain:
    """What became certain for one request. Nothing in here is ever taken back. (Not frozen: one is
    made for every token, and a frozen record takes three times as long.)"""

    request: StageRequest
    confirmed: Confirmed
    token: int | None  # newly certain; for a frame, its code 0
    row: Sequence[int]  # all columns of the token (a frame's codes); empty without a token
    media: MediaOutput | None
    reason: Reason | None  # the request ended here
    logprobs: Scored | None = None  # of the token, if the request asks
    cached: int = 0  # rows of the prompt that were found in the prefix cache

    @property
    def error(self) -> StrettoError | None:
        return self.request.error


_NO_ROW: list[int] = []


@dataclass(slots=True, eq=False)
class _Seat:
    """What the stage keeps for one request beside the scheduler's record."""

    request: StageRequest
    since_ns: int  # it is here
    media: list[MediaOutput] = field(
        default_factory=list
    )  # handed out so far, for blocks that become cached
    cached: int = 0  # prompt rows found in the prefix cache


class StageCore:
    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        runner: Runner,
        store: PayloadStore | None = None,
        waiter: Waiter | None = None,
        timer: LaunchTimer | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Without `timer`, steps are launched as soon as there is room for them. `recorder` is
        given spans."""
        self.name = name
        self.scheduler = scheduler
        self.runner = runner
        self.store = (
            store if store is not None else PayloadStore()
        )  # an empty one is False, like all that is empty
        self.waiter = waiter
        self.timer = timer or LaunchTimer((), 0, on=False)
        self.clock = self.timer.clock
        self.due_ns: int | None = None  # when a launch that is held back is due
        self._held_back = False  # the launch that is due was held back by `hold_ns`
        self.stats = StageStats()
        self.recorder = recorder or Recorder()
        self._steps: deque[tuple[Step, str, int, int]] = (
            deque()
        )  # with its kind, and when its launch began and ended
        self._seats: dict[RequestId, _Seat] = {}
        self._certain: list[Certain] = []  # that `poll` returns next

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
        """Take a request; `given` is what the model's adapter needs beside the ids. Keeps nothing
        if refused."""
        request = self.scheduler.submit(spec, prompt, closed=closed, salts=salts, missing=missing)
        self.runner.adapter.inputs[spec.id] = given
        self._seats[spec.id] = _Seat(request, self.clock())
        return request

    def cancel(self, id: RequestId) -> bool:
        """End a request wherever it is. What is in flight for it is dropped as it comes back."""
        ended = self.scheduler.cancel(id)
        self._leave(id)
        return ended

    def forget(self) -> None:
        """Begin anew: an empty prefix cache, no measured times. There are no requests now."""
        self.store = PayloadStore()
        self.scheduler = Scheduler(self.scheduler.config, self.store.drop)
        a = self.timer
        self.due_ns = None
        self.timer = LaunchTimer(a.sizes, a.lead_ns, a.on, a.clock)
        reset(self.stats)

    @property
    def reading(self) -> bool:
        """Whether a step in flight holds prompts."""
        return any(kind != "decode" for _, kind, _, _ in self._steps)

    # -- steps

    def poll(self) -> list[Certain]:
        """Retire the steps that are done; what became certain since the last call, in order."""
        while self._steps and self._steps[0][0].done:
            self._retire(*self._steps.popleft())
        certain = self._certain
        self._certain = []
        return certain

    @property
    def in_flight(self) -> int:
        """Steps that were launched and are not retired."""
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether one more step may be in flight."""
        return len(self._steps) < self.scheduler.config.overlap_depth

    def launch(self, hold_ns: int | None = None) -> bool:
        """Launch one step, unless there is nothing to run or it can wait. True: one was launched.
        On a CPU the launch is the work, so that `poll` returns what came of it at once. `hold_ns`:
        until when a step that only decodes should wait, by the stage's clock."""
        return self.has_room and self._launch_next(hold_ns)

    def _find(self, id: RequestId) -> StageRequest:
        return self._seats[id].request

    def _launch_next(self, hold_ns: int | None) -> bool:
        waited, due = self.due_ns is not None, self.timer.due_ns()
        until = due or hold_ns
        self.due_ns = until if until and self.scheduler.only_decodes_wait else None
        if self.due_ns is not None:
            self._held_back = due is None
            return False
        start = self.clock()
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        before = self._steps[-1][0] if self._steps else None
        self._launch(batch, start)
        if waited and self._held_back:
            self.stats.gave_way += 1
        elif waited:
            self.stats.held += 1
            self.stats.late += before is None or before.done
        return True

    def _launch(self, batch: Batch, start: int) -> None:
        step = self.runner.launch(batch, self._find)
        launched = self.clock()
        kind = "decode" if batch.decode_only else "mixed" if batch.num_decodes else "prefill"
        self._steps.append((step, kind, start, launched))
        known = batch.decode_only and step.error is None
        flight = self.timer.launched(len(batch.spans) if known else None, launched - start)
        self.stats.steps += 1
        self.stats.kinds[kind].launched((launched - start) / 1e9)
        self.recorder.span("loop", f"launch {self.name}", start, launched)
        self.stats.rows += batch.num_tokens
        if self.waiter is not None and step.copied is not None:
            self.waiter.watch(step.copied, lambda: self.timer.ended(flight))
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
                self._add(
                    Certain(request, Confirmed(request.cursor.confirmed), None, (), media, None)
                )

    def _retire(self, step: Step, kind: str, launching: int, launched: int) -> None:
        start = self.clock()
        begun, ended = self.timer.retired()
        if step.copied is None:  # on a CPU the launch is the work
            begun, ended = launching, launched
        self.stats.kinds[kind].device.observe((ended - begun) / 1e9)
        tokens = "" if kind == "decode" else f", {step.batch.num_tokens} tokens"
        self.recorder.span(self.name, f"{kind} of {len(step.batch.spans)}{tokens}", begun, ended)
        result, columns = self.runner.retire(step)
        rows = {i: at for at, i in enumerate(step.sampling)}
        captured, confirm = step.captured.rows, self.runner.adapter.confirm
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
                self.store.keep(
                    outcome.published, handed, self.runner.joined, self.scheduler.pool.attach
                )
            cached = self._seats[request.id].cached
            self._add(
                Certain(request, outcome.confirmed, token, row, media, outcome.reason, told, cached)
            )
        for span in step.batch.spans:
            seat = self._seats.get(span.request)
            if seat is not None and seat.request.state is State.DONE:
                self._leave(span.request)
        done = self.clock()
        self.stats.retire_ns += done - start
        self.recorder.span("loop", f"retire {self.name}", start, done)

    def _add(self, certain: Certain) -> None:
        if certain.confirmed > certain.request.cursor.launched:
            raise Bug(f"{certain.request.id}: an output that was never launched")
        self._certain.append(certain)

    def _leave(self, id: RequestId) -> None:
        """Forget a request once it is over and nothing of it is in flight."""
        seat = self._seats.get(id)
        if seat is not None and seat.request.state is State.DONE and not seat.request.in_flight:
            del self._seats[id]
            del self.runner.adapter.inputs[id]
