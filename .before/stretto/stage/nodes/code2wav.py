"""The vocoder's node: frames in, packets of samples out as reports.

Called by the host and driven by the loop, on the loop thread."""

from __future__ import annotations

import time

import torch

from stretto.connector.contract import Chunk
from stretto.errors import StrettoError
from stretto.orchestrator.messages import Admit, Pcm
from stretto.prompt.prompt import Prompt
from stretto.stage.codec import AudioOutput, CodecStage
from stretto.stage.links import Intake
from stretto.stage.nodes.report import Clock, Journal, Report, failed
from stretto.stage.pace import FRAME_S
from stretto.stage.payload.schema import CodecFrames, unpack
from stretto.stage.request import Reason
from stretto.types import Mark, RequestId

NOTHING = torch.empty(0, 0, dtype=torch.int32)


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
        self.intake.close(id, purge)
        self.journals.pop(id, None)
