"""The vocoder's stage: frames in, packets of samples out as reports. Driven by the host, on the
loop thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from stretto.messages.requests import Admit, Pcm
from stretto.models.speech.params import VocoderParams
from stretto.models.speech.payloads import CodecFrames
from stretto.models.speech.talker_stage import FRAME_S, LINK
from stretto.preprocess.prompt import Prompt
from stretto.stage.payload import Payload
from stretto.stage.request import Reason
from stretto.stage.stage import Arrival, Output, ToEngine
from stretto.stage.timings import Clock, StageTimings, failed
from stretto.stage.vocoder import Primer, VocoderCore, VocoderOutput
from stretto.types import Mark, RequestId

NOTHING = torch.empty(0, 0, dtype=torch.int32)


class VocoderStage:
    name = "code2wav"
    params: type[VocoderParams] = VocoderParams
    cheap = True
    receives: Mapping[str, type[Payload]] = {LINK: CodecFrames}
    sends: Mapping[str, type[Payload]] = {}
    due_ns: int | None = None

    def __init__(self, core: VocoderCore, clock: Clock = time.monotonic) -> None:
        self.core = core
        self.clock = clock
        self.requests: dict[RequestId, StageTimings] = {}

    def __len__(self) -> int:
        return len(self.core)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        return self.core.stream

    def admit(self, a: Admit, params: VocoderParams, prompt: Prompt) -> None:
        self.core.open(a.request, self.primer(params))
        self.requests[a.request] = StageTimings(self.clock())

    def primer(self, params: VocoderParams) -> Primer | None:
        """What a request's stream has heard before its first frame."""
        return None

    def cancel(self, id: RequestId) -> None:
        self.core.cancel(id)
        self.requests.pop(id, None)

    def finish(self, id: RequestId) -> None:
        """It ends with its frames, which end by themselves."""

    def throttle(self, id: RequestId, on: bool) -> None:
        pass  # upstream stops; what is here is bounded

    def accept(self, arrival: Arrival) -> None:
        frames: CodecFrames | None = arrival.payload
        last = Reason.STOP if arrival.mark is not Mark.MORE else None
        self.core.push(arrival.request, frames.codes if frames is not None else NOTHING, last)

    def poll(self) -> Sequence[Output]:
        outputs: list[Output] = []
        for made in self.core.poll():
            self._take(made, outputs)
        return outputs

    def launch(self) -> bool:
        return self.core.launch()

    def _take(self, o: VocoderOutput, outputs: list[Output]) -> None:
        id = o.request
        timings = self.requests.get(id)
        if timings is None:
            return
        if o.error is not None:
            del self.requests[id]
            outputs.append(ToEngine(failed(id, self.name, o.error)))
            return
        if len(o.samples):
            now = self.clock()
            timings.mark(now)
            rate = self.core.model.config.samples_per_frame / FRAME_S
            if o.reason is None and id in self.core:
                self.core.set_deadline(id, timings.marks[0] + (o.start + len(o.samples)) / rate)
            outputs.append(ToEngine(Pcm(id, o.start, o.frames), o.samples.tobytes()))
        if o.reason is not None:
            outputs.append(ToEngine(timings.ended(id, self.name, o.reason)))
            del self.requests[id]
