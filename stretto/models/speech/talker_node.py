"""A talker's node: frames of speech out to the vocoder, when their pace says so. A family adds what comes in.

Called by the host and driven by the loop, on the loop thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from stretto.control.messages import Admit, Codes
from stretto.errors import Invalid, StrettoError, TooLong
from stretto.models.speech.given import check_ids
from stretto.models.speech.lane import FrameInput
from stretto.models.speech.params import FrameParams
from stretto.models.speech.payloads import CodecFrames
from stretto.models.speech.talker import FrameTalker
from stretto.prompt.prompt import Prompt
from stretto.stage.context import StageContext
from stretto.stage.giveway import GiveWay
from stretto.stage.links import Inlet, Outlet
from stretto.stage.pace import LOOK_S, Pace, Rhythm, leaving
from stretto.stage.report import Clock, Journal, failed
from stretto.stage.request import Reason, RequestSpec, Salt, StageRequest, State
from stretto.stage.stage import Emit, Output, Stage
from stretto.types import Mark, RequestId, Span

FRAME_S = 0.08
LEAST = 2
"""Picks: a frame, and the one that ends the speech."""


@dataclass(slots=True, eq=False)
class Speaking:
    """A request whose frames are being made: those that have not left yet, and when they should."""

    request: StageRequest
    num_prompt: int  # tokens of the request's prompt
    want_codes: bool
    journal: Journal
    pace: Pace
    ahead: bool = False  # its prompt is read, and nothing of it will be heard
    frames: list[Sequence[int]] = field(default_factory=list)

    @property
    def stalled(self) -> bool:
        """It waits for text, and no frame is on its way."""
        return self.request.state is State.STARVED and not self.request.in_flight


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Of a request's prompt, when the request arrives."""

    given: FrameInput[Any]
    rows: list[int]  # what tells them, for the prefix cache
    root: bytes
    salts: Sequence[Salt] = ()
    missing: Sequence[Span] = ()  # rows whose input is still to come
    length: int = 0  # rows of the whole prompt, where they are known


class FrameNode:
    name = "talker"
    params: type[FrameParams] = FrameParams
    cheap = False

    def __init__(
        self,
        stage: Callable[[Emit], Stage],
        model: FrameTalker,
        context: StageContext,
        opening_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        """`opening_s`: of the first frame, so much is not sounded by the vocoder."""
        self.model, self.report, self.clock = model, context.report, clock
        self.outlet: Outlet[CodecFrames] = Outlet("talker>code2wav", CodecFrames)
        self.inlets: tuple[Inlet[Any], ...] = ()
        self.outlets = (self.outlet,)
        self.voices: dict[RequestId, Speaking] = {}
        self._waiting: dict[RequestId, Speaking] = {}  # those with frames that have not left
        self.rhythm = (Rhythm.on_cpu if context.device.type == "cpu" else Rhythm)(FRAME_S, opening_s)
        self._came = False  # frames came since the last look at them
        self._looked = 0.0
        self.stage = stage(self._emit)

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def due_ns(self) -> int | None:
        return self.stage.due_ns

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self.stage.runner.stream

    def admit(self, a: Admit, params: Any, prompt: Prompt) -> None:
        id, p = a.request, params
        check_ids(id, len(self.model.text_table), prompt.ids, p.spoken or ())
        known = self.plan(a, p, prompt)
        given = known.given
        spec = RequestSpec(
            id,
            self._longest(p.max_frames + 1, known.length),
            frozenset({self.model.frames.eos}),
            sampling=given.code0,
            priority=a.priority,
            paced=True,
            last_on_device=True,
            cache_output=False,
            cache_root=known.root,
        )
        request = self.stage.submit(spec, given, known.rows, closed=False, salts=known.salts, missing=known.missing)
        pace = Pace(p.first_frames, p.each_frames, p.ramp, self.rhythm)
        self.voices[id] = Speaking(request, len(prompt.ids), p.want_codes, Journal(self.clock()), pace)
        self.outlet.open(id)
        if p.spoken is not None:
            self._text(id, given, p.spoken)
            if not p.live:
                self._end_text(id, given)
        else:
            self.listen(id)

    def give_way(self, to: Stage) -> None:
        """Hold frames back while that stage, on the same device, reads prompts; nobody is to wait for that."""
        self.stage.gives_way = GiveWay(to, self.voices.values(), self.rhythm, self.clock, self.stage.clock)

    def _longest(self, picks: int, prompt: int) -> int:
        """As many of these picks as there is room for behind a prompt of so many rows."""
        c = self.stage.scheduler.config
        room = min(c.max_context, c.num_blocks * c.block_size) - prompt
        if room < LEAST:
            raise TooLong(f"there is no room to speak behind {prompt} tokens of text and voice", "input")
        return min(picks, room)

    def plan(self, a: Admit, params: Any, prompt: Prompt) -> Known:
        """A request's prompt here, as far as it is known."""
        raise NotImplementedError

    def last_row(self, given: Any) -> list[int]:
        """What tells the prompt's last row, with the first text token in it."""
        raise NotImplementedError

    def listen(self, id: RequestId) -> None:
        """The request's text is still to come."""
        for inlet in self.inlets:
            inlet.open(id)

    def take_text(self, id: RequestId, tokens: Sequence[int], last: bool) -> None:
        """More of a text that is read aloud while it is written."""
        if id not in self.voices:
            return  # it ended meanwhile
        try:
            check_ids(id, len(self.model.text_table), tokens)
            given = self.stage.runner.lane.inputs[id]
            if given.text_ended:
                raise Invalid("text after its end", "input")
            self._text(id, given, tokens)
            if last:
                self._end_text(id, given)
        except StrettoError as e:
            self._fail(id, e)

    def cancel(self, id: RequestId) -> None:
        self.stage.cancel(id)
        self._close(id, purge=True)

    def finish(self, id: RequestId) -> None:
        """It ends with its text, which ends by itself."""

    def throttle(self, id: RequestId, on: bool) -> None:
        self.outlet.throttle(id, on)
        self.outlet.tell(id, self.stage.scheduler)

    def turn(self) -> bool:
        did = False
        for inlet in self.inlets:
            did = inlet.turn() or did
        for id in self.outlet.flush():
            self.outlet.tell(id, self.stage.scheduler)
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
        payload = None
        if frames:
            # By way of the host, which has them anyway: on the device each request's few numbers would cost the
            # vocoder's stream several launches of their own.
            codes = np.array(frames, dtype=np.int32)
            if voice.want_codes:
                self.report(Codes(id, first, codes.shape[1]), codes.tobytes())
            payload = CodecFrames(Span(first, first + len(frames)), torch.from_numpy(codes))
            voice.pace.left(len(frames), now)
            voice.frames = []
            del self._waiting[id]
        if not self.outlet.send(id, payload, mark) and mark is Mark.MORE:
            self.outlet.tell(id, self.stage.scheduler)
        if mark is Mark.MORE:
            self.stage.scheduler.set_deadline(id, voice.pace.deadline)

    def _text(self, id: RequestId, given: Any, tokens: Sequence[int]) -> None:
        more = len(tokens)
        if more and not given.text:  # the first is part of the prompt, and its end
            given.text.append(tokens[0])
            self.stage.scheduler.append_rows(id, self.last_row(given), last=True)
            tokens, more = tokens[1:], more - 1
        if more:
            given.text.extend(tokens)
            self.stage.scheduler.append_text(id, more)

    def _end_text(self, id: RequestId, given: Any) -> None:
        given.text_ended = True
        if self.voices[id].ahead:
            return  # it ends when all its rows are in
        if given.text:
            self.stage.scheduler.end_text(id)
            return
        # Nothing to say: the talker never runs, and silence is the answer.
        self.stage.cancel(id)
        self.outlet.send(id, None, Mark.REQUEST_END)
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
            if not voice.ahead:
                self._send(id, voice, now, Mark.REQUEST_END)
            voice.journal.cached = self.stage.num_cached(id)
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
        for inlet in self.inlets:
            inlet.close(id, purge)
        self.outlet.close(id, purge)
        self.voices.pop(id, None)
        self._waiting.pop(id, None)
