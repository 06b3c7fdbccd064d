"""A stage with its links: what turns control messages and chunks into requests, and outputs into chunks and reports.

One node per stage of a host, driven by the loop: `admit`, `cancel` and `throttle` come as messages, `turn` takes what
has arrived on the link in, gives the stage its turn and flushes the link out. All on the loop thread. A node never
waits: a full link leaves chunks in the outbox and marks their request as blocked, so that only it stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stretto.connector.contract import Chunk, Corrupt
from stretto.errors import StrettoError
from stretto.models.qwen3_omni.bridge import NUM_OPENING, TalkerPrompt, talker_prompt
from stretto.models.qwen3_omni.positions import rope_positions
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.orchestrator.messages import Admit, Codes, Ended, Failed, FromHost, Pcm, Text
from stretto.prompt.prompt import Prompt
from stretto.stage.codec import AudioOutput, CodecStage
from stretto.stage.links import Intake, Link
from stretto.stage.pace import FRAME_S, LOOK_S, Pace, leaving
from stretto.stage.payload.copies import adopt
from stretto.stage.payload.schema import CodecFrames, ThinkerRows, unpack
from stretto.stage.request import Confirmed, Reason, RequestSpec, Salt, StageRequest, State
from stretto.stage.runner.talker import TalkerInput
from stretto.stage.runner.thinker import Edit, ThinkerInput
from stretto.stage.scheduler.blocks import prefix_key
from stretto.stage.stage import MediaOutput, Output, Stage
from stretto.types import Mark, RequestId, Span

MAX_MARKS = 8192

Report = Callable[[FromHost, bytes], None]
Clock = Callable[[], float]

NOTHING = torch.empty(0, 0, dtype=torch.int32)
TEXT_GROUP, TEXT_WAIT_S = 4, 0.025
"""Tokens leave together, up to so many, unless the last ones left so long ago: a chunk and a report for each token
would cost the host more than its share of the step. The first ones go one by one, since the talker waits."""


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
        self.tellings[a.request] = Telling(Journal(self.clock()), a.speak)
        if a.speak:
            self.link.open(a.request)

    def cancel(self, id: RequestId) -> None:
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
        return self.stage.turn()

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


@dataclass(slots=True, eq=False)
class Speaking:
    """A request whose frames are being made: those that have not left yet, and when they should."""

    request: StageRequest
    admit: Admit
    journal: Journal
    pace: Pace
    frames: list[Sequence[int]] = field(default_factory=list)

    @property
    def stalled(self) -> bool:
        """It waits for text, and no frame is on its way."""
        return self.request.state is State.STARVED and not self.request.in_flight


class TalkerNode:
    name = "talker"

    def __init__(self, stage: Stage, model: Talker, report: Report, clock: Clock = time.monotonic) -> None:
        self.stage, self.model, self.report, self.clock = stage, model, report, clock
        self.config = model.config
        self.intake = Intake(self._read, self._fail)
        self.link: Link[CodecFrames] = Link(CodecFrames)
        self.voices: dict[RequestId, Speaking] = {}
        self._waiting: dict[RequestId, Speaking] = {}  # those with frames that have not left
        self._came = False  # frames came since the last look at them
        self._looked = 0.0
        stage.emit = self._emit

    @property
    def due_ns(self) -> int | None:
        return self.stage.due_ns

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
            last_on_device=True,
            cache_output=False,
            cache_root=str(plan.speaker).encode(),
        )
        known = given.num_rows
        salts = self._salts(a, prompt, plan)
        request = self.stage.submit(spec, given, row_ids(given, 0, known), closed=False, salts=salts)
        pace = Pace(a.first_frames, a.each_frames, a.ramp)
        self.voices[id] = Speaking(request, a, Journal(self.clock()), pace)
        self.link.open(id)
        if a.spoken is not None:
            self._text(id, given, a.spoken)
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
        if self._waiting:
            now = self.clock()
            if self._came or now - self._looked > LOOK_S:
                did = self._send_due(now) or did
        return did

    def _send_due(self, now: float) -> bool:
        """Frames leave step by step rather than request by request, so that the vocoder gets them in one go."""
        self._came, self._looked = False, now
        waiting = list(self._waiting.items())
        which = leaving([(v.pace, len(v.frames), v.stalled) for _, v in waiting], now)
        for (id, voice), go in zip(waiting, which, strict=True):
            if go:
                self._send(id, voice, now, Mark.MORE)
        return any(which)

    def _send(self, id: RequestId, voice: Speaking, now: float, mark: Mark) -> None:
        frames, first = voice.frames, voice.pace.sent
        if frames:
            # By way of the host, which has them anyway: on the device each request's few numbers would cost the
            # vocoder's stream several launches of their own.
            codes = np.array(frames, dtype=np.int32)
            if voice.admit.want_codes:
                self.report(Codes(id, first), codes.tobytes())
            stop = first + len(frames)
            self.link.boxes[id].add(CodecFrames(Span(first, stop), torch.from_numpy(codes)))
            voice.pace.left(len(frames), now)
            voice.frames = []
            del self._waiting[id]
        if not self.link.send(id, Confirmed(voice.pace.sent), mark) and mark is Mark.MORE:
            self.link.settle(id, self.stage.scheduler)
        if mark is Mark.MORE:
            assert voice.pace.begun is not None
            self.stage.scheduler.set_deadline(id, voice.pace.begun + FRAME_S * voice.pace.sent)

    def _read(self, id: RequestId, chunk: Chunk) -> None:
        given: TalkerInput = self.stage.runner.lane.inputs[id]
        rows = unpack(ThinkerRows, chunk)
        if rows is not None:
            if rows.media:
                if rows.hidden.shape[1] != self.config.talker.thinker_hidden_size:
                    raise Corrupt(f"media rows {tuple(rows.hidden.shape)} are not the thinker's", request=id)
                with self.stage.runner.on_stream():
                    adopt(chunk)
                    given.media.append(rows.hidden.to(self.model.device))
                known = self.stage.scheduler.request(id).cursor.prompt
                self.stage.scheduler.append_rows(id, row_ids(given, known, given.num_rows))
            first = max(len(self.voices[id].admit.prompt.ids) - rows.span.start, 0)
            if first < len(rows.span):
                tokens: list[int] = rows.ids[first:].tolist()
                # On the device they are looked up unseen: one that is not in the table would end all requests.
                if min(tokens) < 0 or max(tokens) >= len(self.model.text_table):
                    raise Corrupt(f"text {tokens} is not of this vocabulary", request=id)
                self._text(id, given, tokens)
        if chunk.header.mark is not Mark.MORE:
            self._end_text(id, given)

    def _text(self, id: RequestId, given: TalkerInput, tokens: Sequence[int]) -> None:
        more = len(tokens)
        if more and not given.text:  # the first is part of the prompt, and its end
            given.text.append(tokens[0])
            last = given.num_rows
            self.stage.scheduler.append_rows(id, row_ids(given, last - 1, last), last=True)
            tokens, more = tokens[1:], more - 1
        if more:
            given.text.extend(tokens)
            self.stage.scheduler.append_text(id, more)

    def _end_text(self, id: RequestId, given: TalkerInput) -> None:
        given.text_ended = True
        if given.text:
            self.stage.scheduler.end_text(id)
            return
        # Nothing to say: the talker never runs, and silence is the answer.
        self.stage.cancel(id)
        self.link.send(id, Confirmed(0), Mark.REQUEST_END)
        self.report(self.voices[id].journal.ended(id, self.name, Reason.STOP), b"")
        self._close(id, purge=False)

    def _emit(self, o: Output) -> None:
        id = o.request.id
        voice = self.voices.get(id)
        if voice is None:
            return
        if o.error is not None:
            self._close(id, purge=True)
            self.report(failed(id, self.name, o.error), b"")
            return
        now = self.clock()
        if o.reason is not None:  # the pick that ends a request is not a frame
            self._send(id, voice, now, Mark.REQUEST_END)
            self.report(voice.journal.ended(id, self.name, o.reason), b"")
            self._close(id, purge=False)
        elif o.token is None:
            voice.journal.mark_chunk(now)
        else:
            voice.journal.mark(now)
            voice.pace.came(now)
            voice.frames.append(o.row)
            self._waiting[id] = voice
            self._came = True

    def _fail(self, id: RequestId, error: StrettoError) -> None:
        if id in self.voices:
            self.stage.cancel(id)
            self._close(id, purge=True)
            self.report(failed(id, self.name, error), b"")

    def _close(self, id: RequestId, purge: bool) -> None:
        self.intake.close(id, purge)
        self.link.close(id, purge)
        self.voices.pop(id, None)
        self._waiting.pop(id, None)


class Code2WavNode:
    name = "code2wav"
    due_ns: int | None = None

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
        last = Reason.STOP if chunk.header.mark is not Mark.MORE else None
        self.stage.push(id, frames.codes if frames is not None else NOTHING, last)

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
