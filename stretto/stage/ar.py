"""The core of an autoregressive stage: a scheduler and a runner around one model, serving many
requests at once. A family's stage holds one, submits requests to it and makes its outputs into
payloads and reports.

All methods belong to the loop thread, and none waits. `poll` retires one step that the device has
finished and returns what it confirmed. `launch` starts one more step if fewer than
`overlap_depth` are in flight (one, so that the stages of a host alternate) and it is time for it:
a step that would only lie in the queue is held back (`launch_timing.py`) unless it brings a prompt,
and `due_ns` says until when. They are two calls so that outputs travel on before the host spends
time on the next launch. A stop is seen one step late; `poll` drops the surplus of that step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.errors import Bug, StrettoError
from stretto.observe.recorder import Recorder
from stretto.stage.counters import StageStats
from stretto.stage.launch_timing import LaunchTimer
from stretto.stage.media_rows import MediaOutput, PayloadStore
from stretto.stage.request import Confirmed, Reason, RequestSpec, Salt, StageRequest, State
from stretto.stage.runner.logprobs import Scored
from stretto.stage.runner.runner import Runner
from stretto.stage.runner.step import Step
from stretto.stage.runner.waiter import Waiter
from stretto.stage.scheduler.batch import Batch
from stretto.stage.scheduler.scheduler import Rows, Scheduler
from stretto.stage.steps import StepQueue
from stretto.types import RequestId, Span


@dataclass(slots=True, eq=False)
class CoreOutput:
    """What one retired step confirmed for one request. None of it is ever taken back. (Not frozen:
    one is made for every token, and a frozen record takes three times as long.)"""

    request: StageRequest
    confirmed: Confirmed
    # newly confirmed; column 0 of `row`
    token: int | None
    # all columns of the token; empty without a token
    row: Sequence[int]
    media: MediaOutput | None
    # the request ended here
    reason: Reason | None
    # of the token, if the request asks
    logprobs: Scored | None = None
    # rows of the prompt that were found in the prefix cache
    cached: int = 0

    @property
    def error(self) -> StrettoError | None:
        return self.request.error


_NO_ROW: list[int] = []


@dataclass(slots=True, eq=False)
class _RequestState:
    """What the core keeps for one request beside the scheduler's record."""

    request: StageRequest
    # 0 once its first row was in a batch
    submitted_ns: int
    # handed out so far, for blocks that become cached
    media: list[MediaOutput] = field(default_factory=list)
    # prompt rows found in the prefix cache
    cached: int = 0


@dataclass(slots=True, eq=False)
class _InFlight:
    """A step that was launched and is not retired."""

    step: Step
    # one of `counters.KINDS`
    kind: str
    launch_start_ns: int
    launch_end_ns: int

    @property
    def done(self) -> bool:
        return self.step.done


class StageCore(StepQueue[_InFlight, CoreOutput]):
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
        """Without `timer`, steps are launched as soon as there is room for them. `recorder`
        receives spans."""
        super().__init__(scheduler.config.overlap_depth)
        self.name = name
        self.scheduler = scheduler
        self.runner = runner
        # an empty one is False
        self.store = store if store is not None else PayloadStore()
        self.waiter = waiter
        self.timer = timer or LaunchTimer((), 0, on=False)
        self.clock = self.timer.clock
        # when a launch that is held back is due
        self.due_ns: int | None = None
        # the launch that is due waits because of `hold_ns`
        self._held_for_prefill = False
        self.stats = StageStats()
        self.recorder = recorder or Recorder()
        self._requests: dict[RequestId, _RequestState] = {}

    def __len__(self) -> int:
        """Requests that this stage still holds anything for."""
        return len(self._requests)

    # -- requests

    def submit(
        self,
        spec: RequestSpec,
        adapter_input: Any,
        prompt: Rows = 0,
        *,
        closed: bool = True,
        salts: Sequence[Salt] = (),
        missing: Sequence[Span] = (),
    ) -> StageRequest:
        """Take a request; `adapter_input` is what the model's adapter needs beside the ids. Keeps
        nothing if refused."""
        request = self.scheduler.submit(spec, prompt, closed=closed, salts=salts, missing=missing)
        self.runner.adapter.inputs[spec.id] = adapter_input
        self._requests[spec.id] = _RequestState(request, self.clock())
        return request

    def cancel(self, id: RequestId) -> bool:
        """End a request wherever it is. What is in flight for it is dropped as it comes back."""
        ended = self.scheduler.cancel(id)
        self._remove_if_done(id)
        return ended

    @property
    def prefill_in_flight(self) -> bool:
        """Whether a step in flight holds prompts."""
        return any(flight.kind != "decode" for flight in self._steps)

    # -- steps

    def launch(self, hold_ns: int | None = None) -> bool:
        """Launch one step, unless there is nothing to run or it can wait. True: one was launched,
        or `poll` has one more to retire. On a CPU the launch is the work, so that `poll` returns
        what came of it at once. `hold_ns`: until when a step that only decodes should wait, by the
        stage's clock."""
        launched = self.has_room and self._launch_next(hold_ns)
        return launched or self.can_retire

    def _find(self, id: RequestId) -> StageRequest:
        return self._requests[id].request

    def _launch_next(self, hold_ns: int | None) -> bool:
        waited = self.due_ns is not None
        just_in_time_ns = None if self.can_retire else self.timer.due_ns()
        until_ns = just_in_time_ns or hold_ns
        self.due_ns = None
        if until_ns and self.scheduler.only_decodes_wait:
            self.due_ns = until_ns
            self._held_for_prefill = just_in_time_ns is None
            return False
        start = self.clock()
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        before = self._steps[-1].step if self._steps else None
        self._launch(batch, start)
        if waited and self._held_for_prefill:
            self.stats.held_for_prefill += 1
        elif waited:
            self.stats.held += 1
            self.stats.late += before is None or before.done
        return True

    def _launch(self, batch: Batch, start: int) -> None:
        step = self.runner.launch(batch, self._find)
        launched = self.clock()
        if batch.decode_only:
            kind = "decode"
        else:
            kind = "mixed" if batch.num_decodes else "prefill"
        self._steps.append(_InFlight(step, kind, start, launched))
        known = batch.decode_only and step.error is None
        flight = self.timer.launched(len(batch.spans) if known else None, launched - start)
        self.stats.steps += 1
        self.stats.kinds[kind].launched((launched - start) / 1e9)
        self.recorder.span("loop", f"launch {self.name}", start, launched)
        self.stats.rows += batch.num_tokens
        if self.waiter is not None and step.copied is not None:
            self.waiter.watch(step.copied, lambda: self.timer.ended(flight))
        for join in batch.joined:
            state = self._requests[join.request]
            if state.submitted_ns:
                # the first time
                self.stats.queue.observe((start - state.submitted_ns) / 1e9)
                state.submitted_ns = 0
            state.cached += join.filled - join.reused_from
            media = self.store.found(join, self.runner.joined)
            if media is not None:
                # confirmed already, and never computed for this request
                confirmed = Confirmed(state.request.cursor.confirmed)
                state.media.append(media)
                self._append(CoreOutput(state.request, confirmed, None, (), media, None))

    def _retire(self, flight: _InFlight) -> None:
        step, kind = flight.step, flight.kind
        start = self.clock()
        begin_ns, end_ns = self.timer.retired()
        if step.copied is None:
            # on a CPU the launch is the work
            begin_ns = flight.launch_start_ns
            end_ns = flight.launch_end_ns
        self.stats.kinds[kind].device.observe((end_ns - begin_ns) / 1e9)
        tokens = "" if kind == "decode" else f", {step.batch.num_tokens} tokens"
        self.recorder.span(
            self.name, f"{kind} of {len(step.batch.spans)}{tokens}", begin_ns, end_ns
        )
        result, columns = self.runner.retire(step)
        rows = {i: at for at, i in enumerate(step.sampling)}
        captured, confirm = step.captured.rows, self.runner.adapter.confirm
        self.stats.failed += step.error is not None
        for outcome in self.scheduler.retire(step.batch, result):
            request, index, token = outcome.request, outcome.at, outcome.token
            media = None
            if index in captured:
                media = MediaOutput(step.captured.places[index], captured[index], step.captured_at)
                self._requests[request.id].media.append(media)
            row = _NO_ROW
            logprobs = None
            if token is not None:
                at = rows[index]
                row = columns[at]
                self.stats.tokens += 1
                confirm(request, row)
                if step.logprobs is not None:
                    logprobs = step.logprobs.of(at)
            if outcome.published:
                handed = self._requests[request.id].media
                self.store.keep(
                    outcome.published, handed, self.runner.joined, self.scheduler.pool.attach
                )
            cached = self._requests[request.id].cached
            self._append(
                CoreOutput(
                    request, outcome.confirmed, token, row, media, outcome.reason, logprobs, cached
                )
            )
        for span in step.batch.spans:
            self._remove_if_done(span.request)
        done = self.clock()
        self.stats.retire_ns += done - start
        self.recorder.span("loop", f"retire {self.name}", start, done)

    def _append(self, output: CoreOutput) -> None:
        if output.confirmed > output.request.cursor.launched:
            raise Bug(f"{output.request.id}: an output that was never launched")
        self._outputs.append(output)

    def _remove_if_done(self, id: RequestId) -> None:
        """Forget a request once it is over and nothing of it is in flight."""
        state = self._requests.get(id)
        if state is None:
            return
        if state.request.state is State.DONE and not state.request.in_flight:
            del self._requests[id]
            del self.runner.adapter.inputs[id]
