"""A stage with its links: what turns control messages and chunks into requests, and outputs into chunks and reports.

One node per stage of a host, driven by the loop: `admit`, `cancel` and `throttle` come as messages, `turn` takes what
has arrived on the link in, gives the stage its turn and flushes the link out. All on the loop thread. A node never
waits: a full link leaves chunks in the outbox and marks their request as blocked, so that only it stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch

from stretto.connector.contract import EVERY_EPOCH, Chunk
from stretto.connector.courier import InLink, OutLink
from stretto.errors import StrettoError
from stretto.models.qwen3_omni.bridge import NUM_OPENING, TalkerPrompt, talker_prompt
from stretto.models.qwen3_omni.positions import rope_positions
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.orchestrator.messages import Admit, Codes, Ended, Failed, FromHost, Pcm, Text
from stretto.prompt.prompt import Prompt
from stretto.stage.codec import AudioOutput, CodecStage
from stretto.stage.inbox import Inboxes
from stretto.stage.outbox import Outbox
from stretto.stage.payload.chunker import ChunkPolicy
from stretto.stage.payload.copies import adopt
from stretto.stage.payload.schema import CodecFrames, Payload, ThinkerRows, unpack
from stretto.stage.request import Confirmed, Reason, RequestSpec, Salt
from stretto.stage.runner.talker import TalkerInput
from stretto.stage.runner.thinker import Edit, ThinkerInput
from stretto.stage.scheduler.blocks import prefix_key
from stretto.stage.scheduler.scheduler import Scheduler
from stretto.stage.stage import Output, Stage
from stretto.types import Mark, RequestId, Span

FRAME_S = 0.08
MAX_MARKS = 8192

Report = Callable[[FromHost, bytes], None]
Clock = Callable[[], float]
P = TypeVar("P", bound=Payload)

TEXT_POLICY = ChunkPolicy(first=1, each=1, limit=4096)
"""Text goes on at once; a prompt's rows go together as far as they are ready."""


class Link(Generic[P]):
    """The node's side of the link it sends on: outboxes of the requests that speak."""

    def __init__(self, kind: type[P]) -> None:
        self.kind = kind
        self.out: OutLink | None = None
        self.boxes: dict[RequestId, Outbox[P]] = {}
        self._slow: set[RequestId] = set()  # whose listener does not keep up

    def open(self, id: RequestId, policy: ChunkPolicy) -> None:
        self.boxes[id] = Outbox(self.kind, id, policy, self._offer)

    def _offer(self, parcel: object) -> bool:
        return self.out is not None and self.out.offer(parcel)  # type: ignore[arg-type]

    def flush(self) -> list[RequestId]:
        """Send what waited. Returns the requests whose outbox is empty again after it was not."""
        freed = []
        for id, box in list(self.boxes.items()):
            if box.waiting and box.flush():
                freed.append(id)
        if any(box.waiting for box in self.boxes.values()) and self.out is not None:
            self.out.wake_when_sent()
        return freed

    def throttle(self, id: RequestId, on: bool) -> None:
        if on and id in self.boxes:
            self._slow.add(id)
        else:
            self._slow.discard(id)

    def blocked(self, id: RequestId) -> bool:
        """A request rests while its listener is slow or its chunks find no room: each may end before the other."""
        box = self.boxes.get(id)
        return id in self._slow or (box is not None and box.waiting > 0)

    def settle(self, id: RequestId, scheduler: Scheduler) -> None:
        """Tell the scheduler whether the request rests."""
        if id in scheduler:
            scheduler.set_blocked(id, self.blocked(id))

    def close(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        box = self.boxes.get(id)
        self._slow.discard(id)
        if box is None:
            return
        if not purge and box.waiting:
            return  # its last chunks still wait for room; `flush` comes back to it
        del self.boxes[id]
        box.drop()
        if purge and self.out is not None:
            self.out.purge(id, EVERY_EPOCH)

    def sweep(self) -> None:
        for id in [id for id, box in self.boxes.items() if box.ended and not box.waiting]:
            del self.boxes[id]
            self._slow.discard(id)


class Intake:
    """The node's side of the link it receives on: inboxes of the requests that were announced. `read` is given each
    chunk in order and must not keep it; `fail` is told what went wrong with a request."""

    def __init__(
        self, read: Callable[[RequestId, Chunk], None], fail: Callable[[RequestId, StrettoError], None]
    ) -> None:
        self.link: InLink | None = None
        self.boxes = Inboxes()
        self._read, self._fail = read, fail

    def open(self, id: RequestId) -> None:
        """Announce a request, and take what came for it early."""
        self.boxes.announce(id)
        self._take(id)

    def turn(self) -> bool:
        """Take what has arrived. True: something had."""
        did = False
        while self.link is not None and (chunk := self.link.poll()) is not None:
            did = True
            id = chunk.header.request
            try:
                self.boxes.push(chunk)
                self._take(id)
            except StrettoError as e:
                self._fail(id, e)
        return did

    def close(self, id: RequestId, purge: bool) -> None:
        """The request is over. With `purge`, so is what is on its way."""
        self.boxes.forget(id)
        if purge and self.link is not None:
            self.link.purge(id, EVERY_EPOCH)

    def _take(self, id: RequestId) -> None:
        if id not in self.boxes:
            return
        inbox = self.boxes[id]
        while (chunk := inbox.pop()) is not None:
            try:
                self._read(id, chunk)
            finally:
                chunk.release()
            if inbox.ended and not len(inbox):
                self.boxes.forget(id)
                return


@dataclass(slots=True, eq=False)
class Journal:
    """When a request began here and when its outputs came; what its timeline is drawn from."""

    begun: float
    marks: list[float] = field(default_factory=list)
    chunks: list[float] = field(default_factory=list)  # of the prompt
    cached: int = 0

    def mark_chunk(self, now: float) -> None:
        if len(self.chunks) < MAX_MARKS:
            self.chunks.append(now)

    def mark(self, now: float) -> None:
        if len(self.marks) < MAX_MARKS:
            self.marks.append(now)

    def deadline(self) -> float | None:
        """When a listener runs out: one output is played per frame, from the first on."""
        return self.marks[0] + FRAME_S * len(self.marks) if self.marks else None

    def ended(self, id: RequestId, stage: str, reason: Reason) -> Ended:
        return Ended(id, stage, reason.value, self.begun, tuple(self.marks), self.cached, tuple(self.chunks))


class ThinkerNode:
    name = "thinker"

    def __init__(self, stage: Stage, model: Thinker, report: Report, clock: Clock = time.monotonic) -> None:
        self.stage, self.model, self.report, self.clock = stage, model, report, clock
        self.config = model.config
        self.link: Link[ThinkerRows] = Link(ThinkerRows)
        self.journals: dict[RequestId, Journal] = {}
        stage.emit = self._emit

    def admit(self, a: Admit, prompt: Prompt) -> None:
        if a.spoken is not None:
            return
        c = self.config
        positions, first = rope_positions(
            prompt.ids,
            c.tokens,
            c.thinker.vision.merge,
            c.thinker.positions_per_second,
            prompt.images,
            prompt.videos,
            prompt.audio_in_video,
        )
        with self.stage.runner.on_stream(), torch.inference_mode():
            media = self.model.encode(prompt)
        capture = None
        if a.speak and media is not None:
            capture = media.places.numpy()
        edit = bias_edit(a.logit_bias) if a.logit_bias else None
        given = ThinkerInput(positions, first, a.text.params(), media, capture, edit, a.min_text_tokens)
        spec = RequestSpec(
            a.request,
            a.max_text_tokens,
            frozenset({c.tokens.im_end}),
            sampling=a.text.params(),
            priority=a.priority,
            host_history=edit is not None,
            needs_payload=a.speak,
        )
        pads = np.flatnonzero(np.isin(prompt.ids, c.tokens.media_pads)).tolist()
        salts = [Salt(run, a.media) for run in runs_of(pads)]
        self.stage.submit(spec, given, prompt.ids, salts=salts)
        self.journals[a.request] = Journal(self.clock())
        if a.speak:
            self.link.open(a.request, TEXT_POLICY)

    def cancel(self, id: RequestId) -> None:
        self.stage.cancel(id)
        self.link.close(id, purge=True)
        self.journals.pop(id, None)

    def stop_text(self, id: RequestId) -> None:
        """End the answer where it is, in good order: the talker speaks what it has."""
        journal = self.journals.pop(id, None)
        if journal is None:
            return
        self.stage.cancel(id)
        box = self.link.boxes.get(id)
        if box is not None:
            box.send(Confirmed(box.added), Mark.REQUEST_END)
        self.report(journal.ended(id, self.name, Reason.STOP), b"")

    def throttle(self, id: RequestId, on: bool) -> None:
        self.link.throttle(id, on)
        self.link.settle(id, self.stage.scheduler)

    def turn(self) -> bool:
        for id in self.link.flush():
            self.link.settle(id, self.stage.scheduler)
        did = self.stage.turn()
        self.link.sweep()
        return did

    def _emit(self, o: Output) -> None:
        id = o.request.id
        journal = self.journals.get(id)
        if journal is None:
            return  # cancelled meanwhile
        if o.token is not None:
            journal.mark(self.clock())
            if len(journal.marks) == 1:
                journal.cached = self.stage.num_cached(id)
            if o.reason is None:
                self.stage.scheduler.set_deadline(id, journal.deadline())
            self.report(Text(id, (o.token,)), b"")
        elif o.reason is None:
            journal.mark_chunk(self.clock())
        box = self.link.boxes.get(id)
        if box is not None and o.error is None:
            self._forward(box, o)
        if o.reason is not None:
            del self.journals[id]
            if o.error is not None:
                self.link.close(id, purge=True)
                self.report(failed(id, self.name, o.error), b"")
            else:
                self.report(journal.ended(id, self.name, o.reason), b"")

    def _forward(self, box: Outbox[ThinkerRows], o: Output) -> None:
        """Rows that the talker may have: the id at each position, and media rows. The answer's last token is never
        spoken, so it does not leave."""
        ready = o.confirmed + (o.token is not None and o.reason is None)
        start = box.added
        if ready > start:
            runs, hidden = self._media(o, start, ready)
            ids = torch.tensor(o.request.ids[start:ready], dtype=torch.int32)
            box.add(ThinkerRows(Span(start, ready), ids, runs, hidden), event=o.media.event if o.media else None)
        mark = Mark.REQUEST_END if o.reason is not None else Mark.MORE
        if not box.send(Confirmed(ready), mark) and o.reason is None:
            self.link.settle(o.request.id, self.stage.scheduler)

    def _media(self, o: Output, start: int, stop: int) -> tuple[tuple[Span, ...], torch.Tensor]:
        if o.media is None:
            return (), torch.empty(0, self.config.thinker.text.hidden_size, dtype=self.model.dtype)
        return tuple(runs_of([p for p in o.media.places if start <= p < stop])), o.media.rows


class TalkerNode:
    name = "talker"

    def __init__(self, stage: Stage, model: Talker, report: Report, clock: Clock = time.monotonic) -> None:
        self.stage, self.model, self.report, self.clock = stage, model, report, clock
        self.config = model.config
        self.intake = Intake(self._read, self._fail)
        self.link: Link[CodecFrames] = Link(CodecFrames)
        self.admits: dict[RequestId, Admit] = {}
        self.journals: dict[RequestId, Journal] = {}
        stage.emit = self._emit

    def admit(self, a: Admit, prompt: Prompt) -> None:
        if not a.speak:
            return
        id = a.request
        plan = talker_prompt(prompt, self.config, a.voice)
        given = TalkerInput(plan, a.code0.params(), a.residual.params(), min_frames=a.min_frames)
        spec = RequestSpec(
            id,
            a.max_frames + 1,
            frozenset({self.config.talker.codec.eos}),
            sampling=given.code0,
            priority=a.priority,
            paced=True,
            cache_output=False,
            cache_root=str(plan.speaker).encode(),
        )
        known = given.num_rows
        self.stage.submit(spec, given, row_ids(given, 0, known), closed=False, salts=self._salts(a, prompt, plan))
        self.admits[id] = a
        self.journals[id] = Journal(self.clock())
        self.link.open(id, ChunkPolicy(a.first_frames, a.each_frames, a.ramp))
        if a.spoken is not None:
            for token in a.spoken:
                self._text(id, given, token)
            self._end_text(id, given)
        else:
            self.intake.open(id)

    def _salts(self, a: Admit, prompt: Prompt, plan: TalkerPrompt) -> list[Salt]:
        """What tells media rows apart: the thinker's whole prefix up to their end, which they depend on though the
        talker never sees its text. `a.media` is the digest of the media themselves."""
        if not a.media:
            return []
        told = [Salt(Span(0, len(prompt.ids)), a.media)]
        return [
            Salt(run, prefix_key(prompt.ids[: plan.places[run.stop - 1] + 1], told))
            for run in runs_of(np.flatnonzero(plan.is_media).tolist())
        ]

    def cancel(self, id: RequestId) -> None:
        self.stage.cancel(id)
        self._close(id, purge=True)

    def throttle(self, id: RequestId, on: bool) -> None:
        self.link.throttle(id, on)
        self.link.settle(id, self.stage.scheduler)

    def turn(self) -> bool:
        did = self.intake.turn()
        for id in self.link.flush():
            self.link.settle(id, self.stage.scheduler)
        did = self.stage.turn() or did
        self.link.sweep()
        return did

    def _read(self, id: RequestId, chunk: Chunk) -> None:
        given: TalkerInput = self.stage.runner.lane.inputs[id]
        rows = unpack(ThinkerRows, chunk)
        if rows is not None:
            if len(rows.hidden):
                with self.stage.runner.on_stream():
                    adopt(chunk)
                    given.media.append(rows.hidden.to(self.model.device))
                known = self.stage.scheduler.request(id).cursor.prompt
                self.stage.scheduler.append_rows(id, row_ids(given, known, given.num_rows))
            prompt = self.admits[id].prompt
            first = max(len(prompt.ids) - rows.span.start, 0)
            for token in rows.ids[first:].tolist():
                self._text(id, given, token)
        if chunk.header.mark is not Mark.MORE:
            self._end_text(id, given)

    def _text(self, id: RequestId, given: TalkerInput, token: int) -> None:
        given.text.append(token)
        if len(given.text) == 1:
            last = given.num_rows
            self.stage.scheduler.append_rows(id, row_ids(given, last - 1, last), last=True)
        else:
            self.stage.scheduler.append_text(id)

    def _end_text(self, id: RequestId, given: TalkerInput) -> None:
        given.text_ended = True
        if given.text:
            self.stage.scheduler.end_text(id)
            return
        # Nothing to say: the talker never runs, and silence is the answer.
        self.stage.cancel(id)
        self.link.boxes[id].send(Confirmed(0), Mark.REQUEST_END)
        self.report(self.journals[id].ended(id, self.name, Reason.STOP), b"")
        self._close(id, purge=False)

    def _emit(self, o: Output) -> None:
        id = o.request.id
        journal = self.journals.get(id)
        if journal is None:
            return
        if o.error is not None:
            self._close(id, purge=True)
            self.report(failed(id, self.name, o.error), b"")
            return
        box = self.link.boxes[id]
        if o.token is None and o.reason is None:
            journal.mark_chunk(self.clock())
        if o.token is not None and o.reason is None:  # the pick that ends a request is not a frame
            journal.mark(self.clock())
            self.stage.scheduler.set_deadline(id, journal.deadline())
            n = box.added
            assert o.step is not None
            box.add(CodecFrames(Span(n, n + 1), o.step.tokens[o.at : o.at + 1]), event=o.step.copied)
            if self.admits[id].want_codes:
                self.report(Codes(id, n), np.array(o.row, dtype=np.int32).tobytes())
        mark = Mark.REQUEST_END if o.reason is not None else Mark.MORE
        if not box.send(Confirmed(box.added), mark) and o.reason is None:
            self.link.settle(id, self.stage.scheduler)
        if o.reason is not None:
            self.report(journal.ended(id, self.name, o.reason), b"")
            self._close(id, purge=False)

    def _fail(self, id: RequestId, error: StrettoError) -> None:
        if id in self.journals:
            self.stage.cancel(id)
            self._close(id, purge=True)
            self.report(failed(id, self.name, error), b"")

    def _close(self, id: RequestId, purge: bool) -> None:
        self.intake.close(id, purge)
        self.link.close(id, purge)
        self.admits.pop(id, None)
        self.journals.pop(id, None)


class Code2WavNode:
    name = "code2wav"

    def __init__(self, stage: CodecStage, report: Report, clock: Clock = time.monotonic) -> None:
        self.stage, self.report, self.clock = stage, report, clock
        self.intake = Intake(self._read, self._fail)
        self.journals: dict[RequestId, Journal] = {}
        stage.emit = self._emit

    def admit(self, a: Admit, prompt: Prompt) -> None:
        if not a.speak:
            return
        self.stage.open(a.request)
        self.journals[a.request] = Journal(self.clock())
        self.intake.open(a.request)

    def cancel(self, id: RequestId) -> None:
        self.stage.cancel(id)
        self._close(id, purge=True)

    def throttle(self, id: RequestId, on: bool) -> None:
        pass  # upstream stops; what is here is bounded

    def turn(self) -> bool:
        did = self.intake.turn()
        return self.stage.turn() or did

    def _read(self, id: RequestId, chunk: Chunk) -> None:
        frames = unpack(CodecFrames, chunk)
        with self.stage.on_stream():
            adopt(chunk)
        codes = frames.codes if frames is not None else torch.empty(0, 0)
        last = Reason.STOP if chunk.header.mark is not Mark.MORE else None
        self.stage.push(id, codes, last)

    def _fail(self, id: RequestId, error: StrettoError) -> None:
        if id in self.journals:
            self.stage.cancel(id)
            self._close(id, purge=True)
            self.report(failed(id, self.name, error), b"")

    def _emit(self, o: AudioOutput) -> None:
        id = o.request
        journal = self.journals.get(id)
        if journal is None:
            return
        if o.error is not None:
            self._close(id, purge=True)
            self.report(failed(id, self.name, o.error), b"")
            return
        if len(o.samples):
            now = self.clock()
            journal.mark(now)
            rate = self.stage.model.config.samples_per_frame / FRAME_S
            if o.reason is None:
                self.stage.set_deadline(id, journal.marks[0] + (o.start + len(o.samples)) / rate)
            self.report(Pcm(id, o.start, o.frames), o.samples.tobytes())
        if o.reason is not None:
            self.report(journal.ended(id, self.name, o.reason), b"")
            self._close(id, purge=False)

    def _close(self, id: RequestId, purge: bool) -> None:
        self.intake.close(id, purge)
        self.journals.pop(id, None)


Node = ThinkerNode | TalkerNode | Code2WavNode


def failed(id: RequestId, stage: str, error: StrettoError) -> Failed:
    return Failed(id, stage, type(error).__name__, str(error))


def bias_edit(bias: Sequence[tuple[int, float]]) -> Edit:
    ids, values = [i for i, _ in bias], [b for _, b in bias]

    def edit(history: list[int], logits: torch.Tensor) -> torch.Tensor:
        where = torch.tensor(ids, device=logits.device)
        return logits.index_add(0, where, torch.tensor(values, device=logits.device, dtype=logits.dtype))

    return edit


def runs_of(places: Sequence[int]) -> list[Span]:
    """Rising positions as runs."""
    runs: list[Span] = []
    for p in places:
        if runs and runs[-1].stop == p:
            runs[-1] = Span(runs[-1].start, p + 1)
        else:
            runs.append(Span(p, p + 1))
    return runs


OPENING_ID = 1 << 40
"""Ids of the talker's opening rows in the prefix cache begin here: beyond any vocabulary."""


def row_ids(given: TalkerInput, start: int, stop: int) -> list[int]:
    """What tells the talker's prompt rows [start, stop), for the prefix cache: user tokens by id, opening rows by their
    place, and the last one by the text token in it. (Voices are kept apart by the cache's root.)"""
    users = len(given.prompt.ids)
    last = users + NUM_OPENING - 1
    ids = list(given.prompt.ids[start : min(stop, users)])
    for row in range(max(start, users), stop):
        ids.append(OPENING_ID + row - users if row < last else OPENING_ID + NUM_OPENING + given.text[0])
    return ids
