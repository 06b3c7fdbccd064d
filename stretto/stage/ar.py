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

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.observe.recorder import Recorder
from stretto.stage.launch_timing import LaunchTimer
from stretto.stage.media_rows import MediaOutput, cached_media, media_of_block
from stretto.stage.request import Confirmed, Reason, RequestSpec, Salt, StageRequest, State
from stretto.stage.runner.logprobs import Scored
from stretto.stage.runner.runner import Runner
from stretto.stage.runner.step import Step
from stretto.stage.runner.waiter import Waiter
from stretto.stage.scheduler.batch import Outcome, RowJoin
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
    token: int | None = None
    # all columns of the token; empty without a token
    row: Sequence[int] = ()
    media: MediaOutput | None = None
    # the request ended here
    reason: Reason | None = None
    # of the token, if the request asks
    logprobs: Scored | None = None


class StageCore(StepQueue[Step, CoreOutput]):
    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        runner: Runner,
        waiter: Waiter | None = None,
        timer: LaunchTimer | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Without `timer`, steps are launched as soon as there is room for them."""
        depth = scheduler.config.overlap_depth
        super().__init__(name, depth, timer, waiter, recorder, runner.stream)
        self.scheduler = scheduler
        self.runner = runner
        # the launch that is due waits because of `hold_ns`
        self._held_for_prefill = False
        # until they are over and nothing of them is in flight
        self._requests: dict[RequestId, StageRequest] = {}
        # since when those wait that were in no batch yet
        self._queued_ns: dict[RequestId, int] = {}
        # handed out so far, for blocks that become cached
        self._media: defaultdict[RequestId, list[MediaOutput]] = defaultdict(list)

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
        request = self.scheduler.submit(
            spec, prompt, adapter_input=adapter_input, closed=closed, salts=salts, missing=missing
        )
        self._requests[spec.id] = request
        self._queued_ns[spec.id] = self.clock()
        return request

    def cancel(self, id: RequestId) -> bool:
        """End a request wherever it is. What is in flight for it is dropped as it comes back."""
        ended = self.scheduler.cancel(id)
        if id in self._requests:
            self._remove_if_done(self._requests[id])
        return ended

    def throttle(self, id: RequestId, on: bool) -> None:
        if id in self.scheduler:
            self.scheduler.set_blocked(id, on)

    @property
    def prefill_in_flight(self) -> bool:
        """Whether a step in flight holds prompts."""
        return any(step.kind != "decode" for step in self._steps)

    # -- steps

    def launch(self, hold_ns: int | None = None) -> bool:
        """`hold_ns`: until when a step that only decodes should wait, by the stage's clock. It may
        also wait for the step in flight (`launch_timing.py`)."""
        launched = self.has_room and self._launch_next(hold_ns)
        return launched or self.can_retire

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
        step = self.runner.launch(batch)
        size = len(batch.spans) if batch.decode_only and step.error is None else None
        self._launched(step, start, batch.num_tokens, size)
        for join in batch.joined:
            self._take_join(join, start)
        if waited and self._held_for_prefill:
            self.stats.held_for_prefill += 1
        elif waited:
            self.stats.held += 1
            self.stats.late += self.in_flight == 1 or self._is_done(self._steps[-2])
        return True

    def _take_join(self, join: RowJoin, start_ns: int) -> None:
        """A request was in a batch, for the first time or again after a preemption: rows that it
        has from the cache are never computed for it, and certain."""
        request = join.request
        since_ns = self._queued_ns.pop(request.id, None)
        if since_ns is not None:
            self.stats.queue.observe((start_ns - since_ns) / 1e9)
        media = cached_media(join, self.runner.joined)
        if media is not None:
            self._media[request.id].append(media)
            confirmed = Confirmed(request.cursor.confirmed)
            self._outputs.append(CoreOutput(request, confirmed, media=media))

    def _retire(self, step: Step) -> None:
        self.stats.failed += step.error is not None
        for outcome in self.scheduler.retire(step.batch, self.runner.retire(step)):
            output = CoreOutput(
                outcome.request, outcome.confirmed, row=outcome.row, reason=outcome.reason
            )
            if step.side_rows.rows or outcome.published:
                output.media = self._media_of(step, outcome)
            if outcome.row:
                output.token = outcome.row[0]
                self.stats.tokens += 1
                self.runner.adapter.confirm(outcome.request, outcome.row)
                if step.logprobs is not None:
                    output.logprobs = step.logprobs.of(step.sampling.index(outcome.at))
            self._outputs.append(output)
        for span in step.batch.spans:
            self._remove_if_done(span.request)

    def _media_of(self, step: Step, outcome: Outcome) -> MediaOutput | None:
        """Rows that the step hands out for the next stage; they are kept with the blocks that
        became findable."""
        id, index, media = outcome.request.id, outcome.at, None
        if index in step.side_rows.rows:
            places = step.side_rows.places[index]
            media = MediaOutput(places, step.side_rows.rows[index], step.side_rows_at)
            self._media[id].append(media)
        for block in outcome.published:
            rows = media_of_block(block, self._media[id], self.runner.joined)
            if rows is not None:
                self.scheduler.pool.attach(block.block, block.key, rows)
        return media

    def _describe(self, step: Step) -> str:
        tokens = "" if step.kind == "decode" else f", {step.batch.num_tokens} tokens"
        return f"{step.kind} of {len(step.batch.spans)}{tokens}"

    def _remove_if_done(self, request: StageRequest) -> None:
        """Forget a request once it is over and nothing of it is in flight."""
        if request.state is State.DONE and not request.in_flight:
            self._requests.pop(request.id, None)
            self._queued_ns.pop(request.id, None)
            self._media.pop(request.id, None)
