"""The vocoder's node: frames in, packets of samples out as reports.

Called by the host and driven by the loop, on the loop thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from stretto.control.messages import Admit, Pcm
from stretto.errors import StrettoError
from stretto.models.speech.params import VocoderParams
from stretto.models.speech.payloads import CodecFrames
from stretto.models.speech.talker_node import FRAME_S
from stretto.prompt.prompt import Prompt
from stretto.stage.codec import AudioEmit, AudioOutput, CodecStage, Primer
from stretto.stage.context import StageContext
from stretto.stage.links import Arrival, Inlet
from stretto.stage.report import Clock, Journal, failed
from stretto.stage.request import Reason
from stretto.types import Mark, RequestId

NOTHING = torch.empty(0, 0, dtype=torch.int32)


class VocoderNode:
    name = "code2wav"
    params: type[VocoderParams] = VocoderParams
    cheap = True
    due_ns: int | None = None

    def __init__(
        self, stage: Callable[[AudioEmit], CodecStage], context: StageContext, clock: Clock = time.monotonic
    ) -> None:
        self.report, self.clock = context.report, clock
        self.inlet = Inlet("talker>code2wav", CodecFrames, self._read, self._fail)
        self.inlets: tuple[Inlet[CodecFrames]] = (self.inlet,)
        self.outlets: tuple[()] = ()
        self.journals: dict[RequestId, Journal] = {}
        self.stage = stage(self._emit)

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self.stage.stream

    def admit(self, a: Admit, params: VocoderParams, prompt: Prompt) -> None:
        self.stage.open(a.request, self.primer(params))
        self.journals[a.request] = Journal(self.clock())
        self.inlet.open(a.request)

    def primer(self, params: VocoderParams) -> Primer | None:
        """What a request's stream has heard before its first frame."""
        return None

    def cancel(self, id: RequestId) -> None:
        self.stage.cancel(id)
        self._close(id, purge=True)

    def finish(self, id: RequestId) -> None:
        """It ends with its frames, which end by themselves."""

    def throttle(self, id: RequestId, on: bool) -> None:
        pass  # upstream stops; what is here is bounded

    def turn(self) -> bool:
        did = self.inlet.turn()
        return self.stage.turn() or did

    def _read(self, id: RequestId, arrival: Arrival[CodecFrames]) -> None:
        frames = arrival.payload
        last = Reason.STOP if arrival.mark is not Mark.MORE else None
        self.stage.push(id, frames.codes if frames is not None else NOTHING, last)

    def _fail(self, id: RequestId, error: StrettoError) -> None:
        if id in self.journals:
            self.cancel(id)
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
        self.inlet.close(id, purge)
        self.journals.pop(id, None)
