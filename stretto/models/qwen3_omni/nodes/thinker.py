"""The thinker's node: prompts in by control messages, text out as reports, and its rows out to the talker.

It has no link in: a prompt's features come with its announcement, or when they are asked for. Called by the host and
driven by the loop, on the loop thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stretto.control.messages import Admit, Text, Working
from stretto.errors import StrettoError
from stretto.models.qwen3_omni.grammars import open_grammars
from stretto.models.qwen3_omni.lanes.thinker import ThinkerInput
from stretto.models.qwen3_omni.nodes.encoders import Encoders
from stretto.models.qwen3_omni.nodes.guided import Admitted, Compiling, guide_of
from stretto.models.qwen3_omni.nodes.prefix import thinker_salts
from stretto.models.qwen3_omni.params import ThinkerParams
from stretto.models.qwen3_omni.payloads import ThinkerRows
from stretto.models.qwen3_omni.pieces import media_pieces, missing_runs, runs_of
from stretto.models.qwen3_omni.positions import rope_positions
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.models.speech.given import check_ids
from stretto.models.speech.talker_node import FRAME_S
from stretto.prompt.grammars import GrammarGuide
from stretto.prompt.prompt import Piece, Prompt
from stretto.stage.context import StageContext
from stretto.stage.guide import Grammars
from stretto.stage.links import Outlet
from stretto.stage.mediarows import MediaOutput
from stretto.stage.report import Clock, Journal, failed
from stretto.stage.request import Reason, RequestSpec, StageRequest
from stretto.stage.runner.logprobs import Scored
from stretto.stage.stage import Emit, Output, Stage
from stretto.types import Mark, RequestId, Span

TEXT_GROUP, TEXT_WAIT_S = 4, 0.025
"""Tokens leave together, up to so many, unless the last ones left so long ago: a chunk and a report for each token
would cost the host more than its share of the step. The first ones go one by one, since the talker waits."""


@dataclass(slots=True, eq=False)
class Telling:
    """A request whose text is being made: what of it has not left yet."""

    journal: Journal
    speak: bool
    left: int = 0  # tokens that have left
    left_at: float = 0.0  # when the last ones did
    tokens: list[int] = field(default_factory=list)  # that have not
    logprobs: list[Scored] = field(default_factory=list)  # of these, if they are asked for

    def due(self, now: float) -> bool:
        return len(self.tokens) >= min(TEXT_GROUP, 1 + self.left // 2) or now - self.left_at >= TEXT_WAIT_S


class ThinkerNode:
    name = "thinker"
    params = ThinkerParams
    cheap = False

    def __init__(
        self,
        stage: Callable[[Emit], Stage],
        model: Thinker,
        context: StageContext,
        clock: Clock = time.monotonic,
    ) -> None:
        self.model, self.report, self.clock = model, context.report, clock
        self.config = model.config
        self.outlet: Outlet[ThinkerRows] = Outlet("thinker>talker", ThinkerRows)
        self.inlets: tuple[()] = ()
        self.outlets = (self.outlet,)
        self.tellings: dict[RequestId, Telling] = {}
        grammars = Grammars(partial(open_grammars, Path(context.model)))
        self.compiling = Compiling(grammars, context.ring, context.clock)
        self._none = torch.empty(0, self.config.thinker.text.hidden_size, dtype=model.dtype)
        self.stage = stage(self._emit)
        self.encoders = Encoders(model, self.stage, context, self._fail)

    def __len__(self) -> int:
        return len(self.tellings) + len(self.compiling.waiting)

    @property
    def due_ns(self) -> int | None:
        parts = self.stage.due_ns, self.encoders.due_ns, self.compiling.due_ns
        return min((at for at in parts if at is not None), default=None)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self.stage.runner.stream

    def admit(self, a: Admit, params: ThinkerParams, prompt: Prompt) -> None:
        c = self.config
        check_ids(a.request, c.thinker.text.vocab_size, prompt.ids, tuple(i for i, _ in params.logit_bias))
        positions, first = rope_positions(
            prompt.ids,
            c.tokens,
            c.thinker.vision.merge,
            c.thinker.positions_per_second,
            prompt.images,
            prompt.videos,
            prompt.audio_in_video,
        )
        known = Admitted(a, params, prompt, positions, first)
        if params.grammar:
            self.compiling.add(known)
        else:
            self._submit(known)

    def _submit(self, known: Admitted, grammar: GrammarGuide | None = None) -> None:
        a, params, prompt, c = known.admit, known.params, known.prompt, self.config
        pieces, sampling = media_pieces(prompt, c), params.sampling
        capture = np.sort(np.concatenate([p.places for p in pieces])) if params.speak and pieces else None
        given = ThinkerInput(
            known.positions, known.first, sampling, [], capture, params.logit_bias, params.min_tokens, params.min_p
        )
        spec = RequestSpec(
            a.request,
            params.max_tokens,
            frozenset({c.tokens.im_end}),
            sampling=sampling,
            priority=a.priority,
            needs_payload=params.speak,
            guide=guide_of(params, grammar),
            logprobs=params.logprobs,
            cache_root=a.cache_root,
        )
        salts, missing = thinker_salts(pieces), missing_runs(pieces)
        request = self.stage.submit(spec, given, prompt.ids, salts=salts, missing=missing)
        self.tellings[a.request] = Telling(Journal(self.clock()), params.speak)
        if params.speak:
            self.outlet.open(a.request)
        if pieces:
            self.encoders.add(request, given, a.cache_root, pieces)

    def supply(self, id: RequestId, pieces: Sequence[Piece]) -> None:
        """Features that were asked for."""
        self.encoders.supply(id, pieces)

    def cancel(self, id: RequestId) -> None:
        self.compiling.drop(id)
        self.encoders.drop(id)
        self.stage.cancel(id)
        self.outlet.close(id, purge=True)
        self.tellings.pop(id, None)

    def finish(self, id: RequestId) -> None:
        """End the answer where it is: the talker speaks what it has."""
        telling = self.tellings.pop(id, None)
        if telling is None or id not in self.stage.scheduler:
            return
        request = self.stage.scheduler.request(id)
        self._tell(id, telling, self.clock())
        self.encoders.drop(id)
        self.stage.cancel(id)
        if telling.speak:
            self._forward(request, len(request.ids), Mark.REQUEST_END, None)
        self.report(telling.journal.ended(id, self.name, Reason.STOP), b"")

    def throttle(self, id: RequestId, on: bool) -> None:
        self.outlet.throttle(id, on)
        self.outlet.tell(id, self.stage.scheduler)

    def turn(self) -> bool:
        for id in self.outlet.flush():
            self.outlet.tell(id, self.stage.scheduler)
        for known, made in self.compiling.done() if self.compiling.waiting else ():
            try:
                self._submit(known, made.result())
            except StrettoError as error:
                self._fail(known.admit.request, error)
        for id in self.compiling.working():
            self.report(Working(id, self.name), b"")
        encoded = self.encoders.turn()
        for id in encoded:
            if id in self.tellings:
                self.tellings[id].journal.encoded_at = self.clock()
        return self.stage.turn() or bool(encoded)

    def _fail(self, id: RequestId, error: StrettoError) -> None:
        self.cancel(id)
        self.report(failed(id, self.name, error), b"")

    def _emit(self, o: Output) -> None:
        request, reason = o.request, o.reason
        id = request.id
        telling = self.tellings.get(id)
        if telling is None:
            return  # cancelled meanwhile
        now, journal = self.clock(), telling.journal
        if o.token is not None:
            journal.mark(now)
            telling.tokens.append(o.token)
            if o.logprobs is not None:
                telling.logprobs.append(o.logprobs)
            if len(journal.marks) == 1:
                journal.cached = self.stage.num_cached(id)
                journal.encoded = self.encoders.proven(id)
        elif reason is None:
            journal.mark_chunk(now)
        guide = request.spec.guide
        error = o.error or (guide.error if guide is not None and reason is not None else None)
        if error is not None:
            self._fail(id, error)
            return
        if o.token is not None and reason is None and not telling.due(now):
            return
        self._tell(id, telling, now)
        if telling.speak:
            # The answer's last token is never spoken, so it does not leave.
            ready = o.confirmed + (o.token is not None and reason is None)
            self._forward(request, ready, Mark.REQUEST_END if reason is not None else Mark.MORE, o.media)
        if reason is not None:
            del self.tellings[id]
            self.encoders.drop(id)
            self.report(journal.ended(id, self.name, reason), b"")
        elif (deadline := journal.deadline(FRAME_S)) is not None:
            self.stage.scheduler.set_deadline(id, deadline)

    def _tell(self, id: RequestId, telling: Telling, now: float) -> None:
        if telling.tokens:
            self.report(Text(id, tuple(telling.tokens), tuple(telling.logprobs)), b"")
            telling.left, telling.left_at = telling.left + len(telling.tokens), now
            telling.tokens, telling.logprobs = [], []

    def _forward(self, request: StageRequest, ready: int, mark: Mark, media: MediaOutput | None) -> None:
        """Rows that the talker may have: the id at each position, and media rows."""
        id = request.id
        start = self.outlet.sent(id)
        rows = None
        if ready > start:
            ids = torch.from_numpy(np.array(request.ids[start:ready], dtype=np.int32))
            runs: list[Span] = []
            hidden = self._none
            if media is not None:
                runs, hidden = runs_of([p for p in media.places if start <= p < ready]), media.rows
            rows = ThinkerRows(Span(start, ready), ids, tuple(runs), hidden)
        if not self.outlet.send(id, rows, mark, media.event if media else None) and mark is Mark.MORE:
            self.outlet.tell(id, self.stage.scheduler)
