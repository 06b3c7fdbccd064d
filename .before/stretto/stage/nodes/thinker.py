"""The thinker's node: prompts in by control messages, text out as reports, and its rows out to the talker.

It has no link in: a prompt's features come with its announcement. Called by the host and driven by the loop, on the
loop thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from stretto.errors import Bug, StrettoError
from stretto.models.qwen3_omni.parts import Parts
from stretto.models.qwen3_omni.positions import rope_positions
from stretto.models.qwen3_omni.thinker import MediaRows, Thinker
from stretto.orchestrator.messages import Admit, Text
from stretto.prompt.prompt import Prompt
from stretto.stage.links import Link
from stretto.stage.nodes.given import check_ids
from stretto.stage.nodes.prefix import runs_of, thinker_salts
from stretto.stage.nodes.report import Clock, Journal, Report, failed
from stretto.stage.payload.schema import ThinkerRows
from stretto.stage.request import Confirmed, Reason, RequestSpec, StageRequest
from stretto.stage.runner.thinker import Edit, ThinkerInput
from stretto.stage.stage import MediaOutput, Output, Stage
from stretto.types import Mark, RequestId, Span

TEXT_GROUP, TEXT_WAIT_S = 4, 0.025
"""Tokens leave together, up to so many, unless the last ones left so long ago: a chunk and a report for each token
would cost the host more than its share of the step. The first ones go one by one, since the talker waits."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """A request whose media are being encoded."""

    admit: Admit
    prompt: Prompt
    positions: npt.NDArray[np.float32]
    first: float
    parts: Parts[MediaRows | None]


@dataclass(slots=True, eq=False)
class Telling:
    """A request whose text is being made: what of it has not left yet."""

    journal: Journal
    speak: bool
    left: int = 0  # tokens that have left
    left_at: float = 0.0  # when the last ones did
    tokens: list[int] = field(default_factory=list)  # that have not

    def due(self, now: float) -> bool:
        return len(self.tokens) >= min(TEXT_GROUP, 1 + self.left // 2) or now - self.left_at >= TEXT_WAIT_S


class ThinkerNode:
    name = "thinker"

    def __init__(self, stage: Stage, model: Thinker, report: Report, clock: Clock = time.monotonic) -> None:
        self.stage, self.model, self.report, self.clock = stage, model, report, clock
        self.config = model.config
        self.link: Link[ThinkerRows] = Link(ThinkerRows)
        self.encoding: dict[RequestId, Encoding] = {}
        self.tellings: dict[RequestId, Telling] = {}
        self._none = torch.empty(0, self.config.thinker.text.hidden_size, dtype=model.dtype)
        stage.emit = self._emit

    @property
    def due_ns(self) -> int | None:
        return self.stage.due_ns

    def admit(self, a: Admit, prompt: Prompt) -> None:
        if a.spoken is not None:
            return
        c = self.config
        check_ids(a, c.thinker.text.vocab_size)
        positions, first = rope_positions(
            prompt.ids,
            c.tokens,
            c.thinker.vision.merge,
            c.thinker.positions_per_second,
            prompt.images,
            prompt.videos,
            prompt.audio_in_video,
        )
        self.tellings[a.request] = Telling(Journal(self.clock()), a.speak)
        if a.speak:
            self.link.open(a.request)
        self.encoding[a.request] = Encoding(a, prompt, positions, first, self.model.encoding(prompt))
        if not prompt.has_media:
            self._encode(a.request)  # there is nothing to do

    def _encode(self, id: RequestId) -> None:
        """Run one part of a request's media through the encoders; when that was the last one, it is for the stage."""
        e = self.encoding.pop(id)
        try:
            with self.stage.runner.on_stream(), torch.inference_mode():
                next(e.parts)
        except StopIteration as end:
            self._submit(e, end.value)
        else:
            self.encoding[id] = e  # behind the others

    def _submit(self, e: Encoding, media: MediaRows | None) -> None:
        a, prompt, c = e.admit, e.prompt, self.config
        capture = None
        if a.speak and media is not None:
            capture = media.places.numpy()
        edit = bias_edit(a.logit_bias) if a.logit_bias else None
        given = ThinkerInput(e.positions, e.first, a.text.params(), media, capture, edit, a.min_text_tokens)
        spec = RequestSpec(
            a.request,
            a.max_text_tokens,
            frozenset({c.tokens.im_end}),
            sampling=a.text.params(),
            priority=a.priority,
            host_history=edit is not None,
            needs_payload=a.speak,
            cache_root=a.cache_root,
        )
        self.stage.submit(spec, given, prompt.ids, salts=thinker_salts(a, prompt, c.tokens.media_pads))

    def cancel(self, id: RequestId) -> None:
        self.encoding.pop(id, None)
        self.stage.cancel(id)
        self.link.close(id, purge=True)
        self.tellings.pop(id, None)

    def stop_text(self, id: RequestId) -> None:
        """End the answer where it is, in good order: the talker speaks what it has."""
        telling = self.tellings.pop(id, None)
        if telling is None or id not in self.stage.scheduler:
            return
        request = self.stage.scheduler.request(id)
        self._tell(id, telling, self.clock())
        self.stage.cancel(id)
        if telling.speak:
            self._forward(request, len(request.ids), Mark.REQUEST_END, None)
        self.report(telling.journal.ended(id, self.name, Reason.STOP), b"")

    def throttle(self, id: RequestId, on: bool) -> None:
        self.link.throttle(id, on)
        self.link.settle(id, self.stage.scheduler)

    def turn(self) -> bool:
        for id in self.link.flush():
            self.link.settle(id, self.stage.scheduler)
        encoded = bool(self.encoding)
        if encoded:
            self._encode_next()
        return self.stage.turn() or encoded

    def _encode_next(self) -> None:
        """A part of one request's media, each in its turn: all others have their steps between two parts."""
        id = next(iter(self.encoding))
        try:
            self._encode(id)
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception as e:  # noqa: BLE001  what features that fit nothing make of the models
            error = e if isinstance(e, StrettoError) else Bug(f"its media cannot be encoded: {e!r}")
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
            if len(journal.marks) == 1:
                journal.cached = self.stage.num_cached(id)
        elif reason is None:
            journal.mark_chunk(now)
        if o.error is not None:
            del self.tellings[id]
            self.link.close(id, purge=True)
            self.report(failed(id, self.name, o.error), b"")
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
            self.report(journal.ended(id, self.name, reason), b"")
        elif (deadline := journal.deadline()) is not None:
            self.stage.scheduler.set_deadline(id, deadline)

    def _tell(self, id: RequestId, telling: Telling, now: float) -> None:
        if telling.tokens:
            self.report(Text(id, tuple(telling.tokens)), b"")
            telling.left, telling.left_at = telling.left + len(telling.tokens), now
            telling.tokens = []

    def _forward(self, request: StageRequest, ready: int, mark: Mark, media: MediaOutput | None) -> None:
        """Rows that the talker may have: the id at each position, and media rows."""
        id = request.id
        box = self.link.boxes[id]
        start = box.added
        if ready > start:
            ids = torch.from_numpy(np.array(request.ids[start:ready], dtype=np.int32))
            runs, hidden = self._media(media, start, ready)
            box.add(ThinkerRows(Span(start, ready), ids, runs, hidden), event=media.event if media else None)
        if not self.link.send(id, Confirmed(max(ready, start)), mark) and mark is Mark.MORE:
            self.link.settle(id, self.stage.scheduler)

    def _media(self, media: MediaOutput | None, start: int, stop: int) -> tuple[tuple[Span, ...], torch.Tensor]:
        if media is None:
            return (), self._none
        return tuple(runs_of([p for p in media.places if start <= p < stop])), media.rows


def bias_edit(bias: Sequence[tuple[int, float]]) -> Edit:
    ids, values = [i for i, _ in bias], [b for _, b in bias]

    def edit(history: list[int], logits: torch.Tensor) -> torch.Tensor:
        where = torch.tensor(ids, device=logits.device)
        return logits.index_add(0, where, torch.tensor(values, device=logits.device, dtype=logits.dtype))

    return edit
