"""A talker's stage: frames of speech out to the vocoder, when their pace says so. A family adds
what comes in.

Driven by the host, on the loop thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from stretto.errors import Invalid, StrettoError, TooLong
from stretto.messages.requests import Admit, Codes
from stretto.models.speech.adapter import FrameInput
from stretto.models.speech.pacing import CHECK_INTERVAL_S, FrameTiming, PacketPacing, select_due
from stretto.models.speech.params import FrameParams
from stretto.models.speech.payloads import CodecFrames
from stretto.models.speech.prefill_priority import hold_ns
from stretto.models.speech.talker import FrameTalker
from stretto.models.speech.token_ids import check_ids
from stretto.preprocess.prompt import Prompt
from stretto.stage.ar import CoreOutput, StageCore
from stretto.stage.host.context import StageContext
from stretto.stage.payload import Payload
from stretto.stage.request import Reason, RequestSpec, Salt, StageRequest, State
from stretto.stage.stage import CoreStage, Output, ToEngine, Transfer
from stretto.stage.timings import Clock, StageTimings, failed
from stretto.types import Mark, RequestId, Span

LINK = "talker>code2wav"
FRAME_S = 0.08
MIN_PICKS = 2
"""Picks: a frame, and the one that ends the speech."""


@dataclass(slots=True, eq=False)
class SpeechOutput:
    """A request whose frames are being made: those that have not left yet, and when they should."""

    request: StageRequest
    num_prompt: int  # tokens of the request's prompt
    want_codes: bool
    timings: StageTimings
    pace: PacketPacing
    prefill_only: bool = False  # its prompt is read, and nothing of it will be heard
    frames: list[Sequence[int]] = field(default_factory=list)

    @property
    def stalled(self) -> bool:
        """It waits for text, and no frame is on its way."""
        return self.request.state is State.STARVED and not self.request.in_flight


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """Of a request's prompt, when the request arrives."""

    state: FrameInput[Any]
    rows: list[int]  # their ids for the prefix cache
    root: bytes
    salts: Sequence[Salt] = ()
    missing: Sequence[Span] = ()  # rows whose input is still to come
    length: int = 0  # rows of the whole prompt, where they are known


class SpeechStage(CoreStage[StageCore]):
    name = "talker"
    params: type[FrameParams] = FrameParams
    sends: Mapping[str, type[Payload]] = {LINK: CodecFrames}

    def __init__(
        self,
        core: StageCore,
        model: FrameTalker,
        context: StageContext,
        opening_s: float,
        prefill: StageCore | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`opening_s`: of the first frame, so much is not sounded by the vocoder. `prefill`: a
        stage on the same device whose prompts go before frames."""
        super().__init__(core, clock)
        self.model = model
        self.requests: dict[RequestId, SpeechOutput] = {}
        self.waiting: dict[RequestId, SpeechOutput] = {}  # those with frames that have not left
        make_timing = FrameTiming.on_cpu if context.device.type == "cpu" else FrameTiming
        self.frame_timing = make_timing(FRAME_S, opening_s)
        self._frames_added = False  # since the last check
        self._last_check = 0.0
        self.prefill = prefill

    def admit(self, a: Admit, params: Any, prompt: Prompt) -> None:
        id, p = a.request, params
        check_ids(id, len(self.model.text_table), prompt.ids, p.spoken or ())
        plan = self.plan(a, p, prompt)
        state = plan.state
        spec = RequestSpec(
            id,
            self._longest(p.max_frames + 1, plan.length),
            frozenset({self.model.frames.eos}),
            priority=a.priority,
            paced=True,
            last_on_device=True,
            cache_output=False,
            cache_root=plan.root,
        )
        request = self.core.submit(
            spec, state, plan.rows, closed=False, salts=plan.salts, missing=plan.missing
        )
        pace = PacketPacing(p.first_frames, p.each_frames, p.ramp, self.frame_timing)
        self.requests[id] = SpeechOutput(
            request, len(prompt.ids), p.want_codes, StageTimings(self.clock()), pace
        )
        if p.spoken is not None:
            self.add_text(id, state, p.spoken, last=not p.live)

    def _longest(self, picks: int, prompt: int) -> int:
        """As many of these picks as there is room for behind a prompt of so many rows."""
        c = self.core.scheduler.config
        room = min(c.max_context, c.num_blocks * c.block_size) - prompt
        if room < MIN_PICKS:
            raise TooLong(
                f"there is no room to speak behind {prompt} tokens of text and voice", "input"
            )
        return min(picks, room)

    def plan(self, a: Admit, params: Any, prompt: Prompt) -> PromptPlan:
        """A request's prompt here, as far as it is known."""
        raise NotImplementedError

    def last_row(self, state: Any) -> list[int]:
        """The prompt's last row, which holds the first text token, as ids for the prefix cache."""
        raise NotImplementedError

    def take_step_inputs(self, id: RequestId, tokens: Sequence[int], last: bool) -> None:
        """More of a text that is read aloud while it is written."""
        speech = self.requests.get(id)
        if speech is None:
            return  # it ended meanwhile
        try:
            check_ids(id, len(self.model.text_table), tokens)
            state = speech.request.input
            if state.text_ended:
                raise Invalid("text after its end", "input")
            self.add_text(id, state, tokens, last)
        except StrettoError as e:
            self._fail(id, e)

    def cancel(self, id: RequestId) -> None:
        self.core.cancel(id)
        self._forget(id)

    def poll(self) -> Sequence[Output]:
        for confirmed in self.core.poll():
            self.take(confirmed)
        if self.waiting:
            now = self.clock()
            if self._frames_added or now - self._last_check > CHECK_INTERVAL_S:
                self._send_due(now)
        return self.take_outputs()

    def launch(self) -> bool:
        until_ns = None
        if self.prefill is not None and self.prefill.prefill_in_flight and self.core.has_room:
            paced = ((speech.request, speech.pace) for speech in self.requests.values())
            if wait_ns := hold_ns(paced, self.frame_timing, self.clock()):
                until_ns = self.core.clock() + wait_ns
        return self.core.launch(until_ns)

    def _send_due(self, now: float) -> None:
        """Frames leave step by step rather than request by request, so that the vocoder gets them
        in one go."""
        self._frames_added = False
        self._last_check = now
        waiting = list(self.waiting.items())
        which = select_due([(v.pace, len(v.frames), v.stalled) for _, v in waiting], now)
        for (id, speech), go in zip(waiting, which, strict=True):
            if go:
                self._send(id, speech, now, Mark.MORE)

    def _send(self, id: RequestId, speech: SpeechOutput, now: float, mark: Mark) -> None:
        frames, first = speech.frames, speech.pace.sent
        payload = None
        if frames:
            # By way of the host, which has them anyway: on the device each request's few numbers
            # would cost the vocoder's stream several launches of their own.
            codes = np.array(frames, dtype=np.int32)
            if speech.want_codes:
                self.outputs.append(ToEngine(Codes(id, first, codes.shape[1]), codes.tobytes()))
            payload = CodecFrames(Span(first, first + len(frames)), torch.from_numpy(codes))
            speech.pace.packet_sent(len(frames), now)
            speech.frames = []
            del self.waiting[id]
        self.outputs.append(Transfer(LINK, id, payload, mark))
        if mark is Mark.MORE:
            self.core.scheduler.set_deadline(id, speech.pace.deadline)

    def add_text(self, id: RequestId, state: Any, tokens: Sequence[int], last: bool) -> None:
        """The next tokens of a request's text; `last`: no more will come."""
        if tokens and not state.text:  # the first is part of the prompt, and its end
            state.text.append(tokens[0])
            self.core.scheduler.append_rows(id, self.last_row(state), last=True)
            tokens = tokens[1:]
        state.text.extend(tokens)
        if last:
            state.text_ended = True
        if state.text:
            if tokens or last:
                self.core.scheduler.append_step_inputs(id, len(tokens), last=last)
        elif last and not self.requests[id].prefill_only:
            self._end_silent(id)

    def _end_silent(self, id: RequestId) -> None:
        """There is no text: the talker never runs, and silence is the answer."""
        self.core.cancel(id)
        self.outputs.append(Transfer(LINK, id, None, Mark.REQUEST_END))
        self.outputs.append(ToEngine(self.requests[id].timings.ended(id, self.name, Reason.STOP)))
        self._forget(id)

    def take(self, o: CoreOutput) -> None:
        id = o.request.id
        speech = self.requests.get(id)
        if speech is None:
            return
        if o.request.error is not None:
            self._forget(id)
            self.outputs.append(ToEngine(failed(id, self.name, o.request.error)))
            return
        now = self.clock()
        if o.reason is not None:  # the pick that ends a request is not a frame
            if not speech.prefill_only:
                self._send(id, speech, now, Mark.REQUEST_END)
            speech.timings.cached = o.request.num_cached
            self.outputs.append(ToEngine(speech.timings.ended(id, self.name, o.reason)))
            self._forget(id)
        elif o.token is None:
            speech.timings.mark_chunk(now)
        else:
            speech.timings.mark(now)
            speech.pace.frame_made(now)
            speech.frames.append(o.row)
            self.waiting[id] = speech
            self._frames_added = True

    def _fail(self, id: RequestId, error: StrettoError) -> None:
        if id in self.requests:
            self.cancel(id)
            self.outputs.append(ToEngine(failed(id, self.name, error)))

    def _forget(self, id: RequestId) -> None:
        self.requests.pop(id, None)
        self.waiting.pop(id, None)
