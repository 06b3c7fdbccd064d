"""The enroller: a stage of its own that makes a voice of a clip. It is not on the way of speech.

Two encoders, in float32 whatever the others are, and a node that runs them in parts, so that the host's other stages
have their turns. Called by the host and driven by the loop, on the loop thread."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import nn

from stretto.control.messages import Admit, Made, Working
from stretto.errors import Busy, Invalid
from stretto.models.parts import Parts, run_through
from stretto.models.qwen3_tts.config import TtsConfig
from stretto.models.qwen3_tts.encoder import CodecEncoder
from stretto.models.qwen3_tts.params import ClonedVoice, EnrollerParams
from stretto.models.qwen3_tts.speaker import SHORTEST, SpeakerEncoder
from stretto.prompt.prompt import Prompt
from stretto.stage.context import StageContext
from stretto.stage.report import Journal, failed
from stretto.stage.request import Reason
from stretto.types import RequestId

MOST = 8
"""Clips that may wait."""
REHEARSED = 24_000
"""Samples."""


class Enroller(nn.Module):
    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        assert config.speaker is not None
        self.per_frame = config.vocoder.samples_per_frame
        self.speaker_encoder, self.encoder = SpeakerEncoder(config.speaker), CodecEncoder(config.encoder)

    @property
    def device(self) -> torch.device:
        return self.speaker_encoder.fc.weight.device

    def run(self, samples: torch.Tensor, text: tuple[int, ...]) -> Parts[ClonedVoice]:
        """With its text, the clip is kept as codes too: then new speech goes on where it ends."""
        vector = yield from self.speaker_encoder.run(samples)
        yield
        kept = b""
        if text:
            codes = yield from self.encoder.run(samples, self.per_frame)
            yield
            kept = codes.cpu().numpy().astype(np.int16).tobytes()
        return ClonedVoice(vector.float().cpu().numpy().tobytes(), kept, text)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run over a second of silence for nobody: the first clip would wait for what the device loads and tries."""
        run_through(self.run(torch.zeros(REHEARSED, device=self.device), (0,)))


@dataclass(slots=True, eq=False)
class Work:
    parts: Generator[None, None, ClonedVoice]
    journal: Journal


class EnrollerNode:
    name = "enroller"
    params = EnrollerParams
    cheap = False
    due_ns: int | None = None
    stream: torch.cuda.Stream | None = None

    def __init__(self, model: Enroller, context: StageContext) -> None:
        self.model, self.report = model, context.report
        self.inlets: tuple[()] = ()
        self.outlets: tuple[()] = ()
        self.work: dict[RequestId, Work] = {}

    def __len__(self) -> int:
        return len(self.work)

    def admit(self, a: Admit, params: EnrollerParams, prompt: Prompt) -> None:
        clips = [c.mel for c in prompt.audios]
        if len(clips) != 1 or clips[0].ndim != 2 or clips[0].shape[0] != 1:
            raise Invalid("a voice is made of one clip", "audio")
        samples = clips[0][0]
        if len(samples) < SHORTEST:
            raise Invalid(f"the clip is too short: {len(samples)} samples, at least {SHORTEST} are needed", "audio")
        if len(self.work) >= MOST:
            raise Busy(f"{MOST} voices are being made already")
        heard = torch.from_numpy(np.array(samples)).to(self.model.device)
        self.work[a.request] = Work(self.model.run(heard, prompt.ids), Journal(time.monotonic()))

    def cancel(self, id: RequestId) -> None:
        self.work.pop(id, None)

    def finish(self, id: RequestId) -> None:
        pass

    def throttle(self, id: RequestId, on: bool) -> None:
        pass

    @torch.inference_mode()
    def turn(self) -> bool:
        """One part of the clip that came first."""
        for id, work in self.work.items():
            try:
                next(work.parts)
                self.report(Working(id, self.name), b"")
            except StopIteration as end:
                self._end(id, work, end.value)
            except RuntimeError as e:  # of memory, most likely
                self.cancel(id)
                self.report(failed(id, self.name, Invalid(f"no voice can be made of this: {e}", "audio")), b"")
            return True
        return False

    def _end(self, id: RequestId, work: Work, voice: ClonedVoice) -> None:
        del self.work[id]
        work.journal.mark(time.monotonic())
        self.report(Made(id), msgspec.msgpack.encode(voice))
        self.report(work.journal.ended(id, self.name, Reason.STOP), b"")
