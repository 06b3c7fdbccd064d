"""The thinker's stage: prompts in, text out as reports, and its rows out to the talker.

No link ends here: a prompt's features come with its announcement, or when they are asked for.
Driven by the host, on the loop thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stretto.errors import StrettoError
from stretto.messages.requests import Admit, Text, Working
from stretto.models.qwen3_omni.family import open_grammars
from stretto.models.qwen3_omni.params import ThinkerParams
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.models.qwen3_omni.pieces import media_pieces, missing_runs, runs_of
from stretto.models.qwen3_omni.positions import rope_positions
from stretto.models.qwen3_omni.stages.encoders import Encoders
from stretto.models.qwen3_omni.stages.guided import Compiling, PendingRequest, guide_of
from stretto.models.qwen3_omni.stages.prefix import thinker_salts
from stretto.models.qwen3_omni.thinker import Thinker, ThinkerInput
from stretto.models.speech.talker_stage import FRAME_S
from stretto.models.speech.token_ids import check_ids
from stretto.preprocess.grammars import GrammarGuide
from stretto.preprocess.prompt import Piece, Prompt
from stretto.stage.ar import CoreOutput, StageCore
from stretto.stage.guide import Grammars
from stretto.stage.host.context import StageContext
from stretto.stage.media_rows import MediaOutput
from stretto.stage.payload import Payload
from stretto.stage.request import Reason, RequestSpec, StageRequest
from stretto.stage.runner.logprobs import Scored
from stretto.stage.stage import CoreStage, Output, ToEngine, Transfer
from stretto.stage.timings import Clock, StageTimings, failed
from stretto.types import Mark, RequestId, Span

LINK = "thinker>talker"
TEXT_GROUP, TEXT_WAIT_S = 4, 0.025
"""Tokens leave together, up to so many, unless the last ones left so long ago: a chunk and a report
for each token would cost the host more than its share of the step. The first ones go one by one,
since the talker waits."""


@dataclass(slots=True, eq=False)
class TextOutput:
    """A request whose text is being made: what of it has not left yet."""

    timings: StageTimings
    speak: bool
    sent: int = 0  # rows that the talker has
    left: int = 0  # tokens that have left
    left_at: float = 0.0  # when the last ones did
    tokens: list[int] = field(default_factory=list)  # that have not
    logprobs: list[Scored] = field(default_factory=list)  # of these, if they are asked for

    def due(self, now: float) -> bool:
        return (
            len(self.tokens) >= min(TEXT_GROUP, 1 + self.left // 2)
            or now - self.left_at >= TEXT_WAIT_S
        )


class ThinkerStage(CoreStage[StageCore]):
    name = "thinker"
    params = ThinkerParams
    sends: Mapping[str, type[Payload]] = {LINK: ThinkerRows}

    def __init__(
        self,
        core: StageCore,
        model: Thinker,
        encoders: Encoders,
        context: StageContext,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(core, clock)
        self.model = model
        self.config = model.config
        self.requests: dict[RequestId, TextOutput] = {}
        grammars = Grammars(partial(open_grammars, Path(context.model)))
        self.compiling = Compiling(grammars, context.wake, context.clock)
        self._none = torch.empty(0, self.config.thinker.text.hidden_size, dtype=model.dtype)
        self.encoders = encoders

    def __len__(self) -> int:
        return len(self.requests) + len(self.compiling.waiting)

    @property
    def due_ns(self) -> int | None:
        parts = self.core.due_ns, self.encoders.due_ns, self.compiling.due_ns
        return min((at for at in parts if at is not None), default=None)

    def admit(self, a: Admit, params: ThinkerParams, prompt: Prompt) -> None:
        c = self.config
        check_ids(
            a.request, c.thinker.text.vocab_size, prompt.ids, tuple(i for i, _ in params.logit_bias)
        )
        positions, first = rope_positions(
            prompt.ids,
            c.tokens,
            c.thinker.vision.merge,
            c.thinker.positions_per_second,
            prompt.images,
            prompt.videos,
            prompt.audio_in_video,
        )
        pending = PendingRequest(a, params, prompt, positions, first)
        if params.grammar:
            self.compiling.add(pending)
        else:
            self._submit(pending)

    def _submit(self, pending: PendingRequest, grammar: GrammarGuide | None = None) -> None:
        a, params, prompt, c = pending.admit, pending.params, pending.prompt, self.config
        pieces, sampling = media_pieces(prompt, c), params.sampling
        capture = (
            np.sort(np.concatenate([p.places for p in pieces])) if params.speak and pieces else None
        )
        state = ThinkerInput(
            pending.positions,
            pending.first,
            sampling,
            [],
            capture,
            params.logit_bias,
            params.min_tokens,
            params.min_p,
        )
        spec = RequestSpec(
            a.request,
            params.max_tokens,
            frozenset({c.tokens.im_end}),
            priority=a.priority,
            needs_payload=params.speak,
            guide=guide_of(params, grammar),
            logprobs=params.logprobs,
            cache_root=a.cache_root,
        )
        salts, missing = thinker_salts(pieces), missing_runs(pieces)
        request = self.core.submit(spec, state, prompt.ids, salts=salts, missing=missing)
        self.requests[a.request] = TextOutput(StageTimings(self.clock()), params.speak)
        if pieces:
            self.encoders.add(request, state, a.cache_root, pieces)

    def supply(self, id: RequestId, pieces: Sequence[Piece]) -> None:
        """Features that were asked for."""
        self.encoders.supply(id, pieces)

    def cancel(self, id: RequestId) -> None:
        self.compiling.drop(id)
        self.encoders.drop(id)
        self.core.cancel(id)
        self.requests.pop(id, None)

    def finish(self, id: RequestId) -> None:
        """End the answer where it is: the talker speaks what it has."""
        output = self.requests.pop(id, None)
        if output is None or id not in self.core.scheduler:
            return
        request = self.core.scheduler.request(id)
        self._report_text(id, output, self.clock())
        self.encoders.drop(id)
        self.core.cancel(id)
        if output.speak:
            self._forward(request, output, len(request.ids), Mark.REQUEST_END, None)
        self.outputs.append(ToEngine(output.timings.ended(id, self.name, Reason.STOP)))

    def poll(self) -> Sequence[Output]:
        if self.compiling.waiting:
            self._submit_compiled()
        return super().poll()

    def _submit_compiled(self) -> None:
        """Requests whose grammar is there; and say of the others that they are being worked on."""
        for pending, made in self.compiling.done():
            try:
                self._submit(pending, made.result())
            except StrettoError as error:
                self._fail(pending.admit.request, error)
        self.outputs += [ToEngine(Working(id, self.name)) for id in self.compiling.working()]

    def launch(self) -> bool:
        if self.encoders.requests:
            self._encode()
        return super().launch()

    def _encode(self) -> None:
        """A part of the media that are due."""
        encoded, reports, failures = self.encoders.run_due()
        self.outputs += map(ToEngine, reports)
        for id, error in failures:
            self._fail(id, error)
        for id in encoded:
            if id in self.requests:
                self.requests[id].timings.encoded_at = self.clock()

    def _fail(self, id: RequestId, error: StrettoError) -> None:
        self.cancel(id)
        self.outputs.append(ToEngine(failed(id, self.name, error)))

    def take(self, o: CoreOutput) -> None:
        request, reason = o.request, o.reason
        id = request.id
        output = self.requests.get(id)
        if output is None:
            return  # cancelled meanwhile
        now, timings = self.clock(), output.timings
        if o.token is not None:
            timings.mark(now)
            output.tokens.append(o.token)
            if o.logprobs is not None:
                output.logprobs.append(o.logprobs)
            if len(timings.marks) == 1:
                timings.cached = request.num_cached
                timings.encoded = self.encoders.proven(id)
        elif reason is None:
            timings.mark_chunk(now)
        guide = request.spec.guide
        error = request.error or (guide.error if guide is not None and reason is not None else None)
        if error is not None:
            self._fail(id, error)
            return
        if o.token is not None and reason is None and not output.due(now):
            return
        self._report_text(id, output, now)
        if output.speak:
            # The answer's last token is never spoken, so it does not leave.
            ready = o.confirmed + (o.token is not None and reason is None)
            self._forward(
                request,
                output,
                ready,
                Mark.REQUEST_END if reason is not None else Mark.MORE,
                o.media,
            )
        if reason is not None:
            del self.requests[id]
            self.encoders.drop(id)
            self.outputs.append(ToEngine(timings.ended(id, self.name, reason)))
        elif id in self.core.scheduler and (deadline := timings.deadline(FRAME_S)) is not None:
            self.core.scheduler.set_deadline(id, deadline)

    def _report_text(self, id: RequestId, output: TextOutput, now: float) -> None:
        if output.tokens:
            self.outputs.append(ToEngine(Text(id, tuple(output.tokens), tuple(output.logprobs))))
            output.left = output.left + len(output.tokens)
            output.left_at = now
            output.tokens = []
            output.logprobs = []

    def _forward(
        self,
        request: StageRequest,
        output: TextOutput,
        ready: int,
        mark: Mark,
        media: MediaOutput | None,
    ) -> None:
        """Rows that the talker may have: the id at each position, and media rows."""
        start, rows = output.sent, None
        if ready > start:
            ids = torch.from_numpy(np.array(request.ids[start:ready], dtype=np.int32))
            runs: list[Span] = []
            hidden = self._none
            if media is not None:
                runs, hidden = runs_of([p for p in media.places if start <= p < ready]), media.rows
            rows = ThinkerRows(Span(start, ready), ids, tuple(runs), hidden)
            output.sent = ready
        self.outputs.append(Transfer(LINK, request.id, rows, mark, media.event if media else None))
