"""The talker's node: the thinker's rows in, frames of speech out to the vocoder, when their pace says so.

Called by the host and driven by the loop, on the loop thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stretto.connector.contract import Chunk, Corrupt
from stretto.errors import StrettoError
from stretto.models.qwen3_omni.bridge import talker_prompt
from stretto.models.qwen3_omni.talker import Talker
from stretto.orchestrator.messages import Admit, Codes
from stretto.prompt.prompt import Prompt
from stretto.stage.links import Intake, Link
from stretto.stage.nodes.given import check_ids
from stretto.stage.nodes.prefix import row_ids, talker_root, talker_salts
from stretto.stage.nodes.report import Clock, Journal, Report, failed
from stretto.stage.pace import FRAME_S, LOOK_S, Pace, Rhythm, leaving
from stretto.stage.payload.copies import adopt
from stretto.stage.payload.schema import CodecFrames, ThinkerRows, unpack
from stretto.stage.request import Confirmed, Reason, RequestSpec, StageRequest, State
from stretto.stage.runner.talker import TalkerInput
from stretto.stage.stage import Output, Stage
from stretto.types import Mark, RequestId, Span


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
        self._rhythm = Rhythm()
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
        check_ids(a, len(self.model.text_table))
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
            cache_root=talker_root(a, plan),
        )
        known = given.num_rows
        salts = talker_salts(a, prompt, plan)
        request = self.stage.submit(spec, given, row_ids(given, 0, known), closed=False, salts=salts)
        pace = Pace(a.first_frames, a.each_frames, a.ramp, self._rhythm)
        self.voices[id] = Speaking(request, a, Journal(self.clock()), pace)
        self.link.open(id)
        if a.spoken is not None:
            self._text(id, given, a.spoken)
            self._end_text(id, given)
        else:
            self.intake.open(id)

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
            self.cancel(id)
            self.report(failed(id, self.name, error), b"")

    def _close(self, id: RequestId, purge: bool) -> None:
        self.intake.close(id, purge)
        self.link.close(id, purge)
        self.voices.pop(id, None)
        self._waiting.pop(id, None)
