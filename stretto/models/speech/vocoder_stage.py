"""The vocoder's stage: frames in, packets of samples out as reports. Driven by the host, on the
loop thread."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from stretto.messages.requests import Admit, Pcm
from stretto.models.speech.params import VocoderParams
from stretto.models.speech.payloads import CodecFrames
from stretto.models.speech.talker_stage import FRAME_S, LINK
from stretto.preprocess.prompt import Prompt
from stretto.stage.payload import Payload
from stretto.stage.request import Reason
from stretto.stage.stage import CoreStage, ToEngine, Transfer
from stretto.stage.timings import Clock, StageTimings, failed
from stretto.stage.vocoder import Primer, VocoderCore, VocoderOutput
from stretto.types import Mark, RequestId

NOTHING = torch.empty(0, 0, dtype=torch.int32)


class VocoderStage(CoreStage[VocoderCore]):
    name = "code2wav"
    params: type[VocoderParams] = VocoderParams
    cheap = True
    receives: Mapping[str, type[Payload]] = {LINK: CodecFrames}

    def __init__(self, core: VocoderCore, clock: Clock = time.monotonic) -> None:
        super().__init__(core, clock)
        self.requests: dict[RequestId, StageTimings] = {}

    def admit(self, a: Admit, params: VocoderParams, prompt: Prompt) -> None:
        self.core.open(a.request, self.primer(params))
        self.requests[a.request] = StageTimings(self.clock())

    def primer(self, params: VocoderParams) -> Primer | None:
        """What a request's stream starts with."""
        return None

    def cancel(self, id: RequestId) -> None:
        self.core.cancel(id)
        self.requests.pop(id, None)

    def accept(self, transfer: Transfer) -> None:
        frames: CodecFrames | None = transfer.payload
        last = Reason.STOP if transfer.mark is not Mark.MORE else None
        self.core.push(transfer.request, frames.codes if frames is not None else NOTHING, last)

    def take(self, o: VocoderOutput) -> None:
        id = o.request
        timings = self.requests.get(id)
        if timings is None:
            return
        if o.error is not None:
            del self.requests[id]
            self.outputs.append(ToEngine(failed(id, self.name, o.error)))
            return
        if len(o.samples):
            now = self.clock()
            timings.mark(now)
            rate = self.core.model.config.samples_per_frame / FRAME_S
            if o.reason is None:
                self.core.set_deadline(id, timings.marks[0] + (o.start + len(o.samples)) / rate)
            self.outputs.append(ToEngine(Pcm(id, o.start, o.frames), o.samples.tobytes()))
        if o.reason is not None:
            self.outputs.append(ToEngine(timings.ended(id, self.name, o.reason)))
            del self.requests[id]
