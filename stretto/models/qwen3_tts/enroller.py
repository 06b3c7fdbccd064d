"""The enroller: a stage of its own that makes a voice of a clip. It is not on the path of speech.

Two encoders, in float32 whatever the others are, and a stage that runs them in parts, so that the
host's other stages have their turns. On a GPU they have a stream of their own, behind those of
speech, and what they make is copied to the host while the loop goes on. Driven by the host, on the
loop thread."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import nn

from stretto.errors import Busy, Invalid
from stretto.layers.upload import to_device
from stretto.messages.requests import Admit, ProductData, Working
from stretto.models.parts import Parts
from stretto.models.qwen3_tts.config import TtsConfig
from stretto.models.qwen3_tts.encoder import CodecEncoder
from stretto.models.qwen3_tts.params import ClonedVoice, EnrollerParams
from stretto.models.qwen3_tts.speaker import SHORTEST, SpeakerEncoder
from stretto.preprocess.prompt import Prompt
from stretto.stage.host.context import StageContext
from stretto.stage.request import Reason
from stretto.stage.runner.waiter import Waiter
from stretto.stage.stage import Output, Stage, ToEngine
from stretto.stage.timings import StageTimings, failed
from stretto.types import RequestId

MAX_CLIPS = 8
"""Clips that may wait."""


class Enroller(nn.Module):
    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        assert config.speaker is not None
        self.per_frame = config.vocoder.samples_per_frame
        self.speaker_encoder = SpeakerEncoder(config.speaker)
        self.encoder = CodecEncoder(config.encoder)

    @property
    def device(self) -> torch.device:
        return self.speaker_encoder.fc.weight.device

    def run(self, samples: torch.Tensor, text: tuple[int, ...]) -> Parts[tuple[torch.Tensor, ...]]:
        """The voice's vector; with the clip's text its codes too, since then new speech goes on
        where it ends. Both on the device."""
        vector = yield from self.speaker_encoder.run(samples)
        yield
        if not text:
            return (vector.float(),)
        codes = yield from self.encoder.run(samples, self.per_frame)
        yield
        return vector.float(), codes.to(torch.int16)


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """What was made, on the host or on its way there."""

    host: tuple[torch.Tensor, ...]
    event: torch.cuda.Event | None  # None on a CPU: it is there

    @classmethod
    def of(cls, made: tuple[torch.Tensor, ...], waiter: Waiter | None) -> Copied:
        """On the stream that made it; `waiter` rings when it is there."""
        if waiter is None:
            return cls(made, None)
        host = tuple(
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
            for t in made
        )
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        waiter.watch(event)
        return cls(host, event)

    @property
    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def voice(self, text: tuple[int, ...]) -> ClonedVoice:
        vector, *codes = (t.numpy().tobytes() for t in self.host)
        return ClonedVoice(vector, codes[0], text) if codes else ClonedVoice(vector)


@dataclass(slots=True, eq=False)
class Work:
    parts: Generator[None, None, tuple[torch.Tensor, ...]]
    text: tuple[int, ...]
    timings: StageTimings
    copied: Copied | None = None  # all parts are done


class EnrollerStage(Stage):
    name = "enroller"
    params = EnrollerParams

    def __init__(self, model: Enroller, context: StageContext) -> None:
        super().__init__()
        self.model = model
        self.work: dict[RequestId, Work] = {}
        self.waiter = context.waiter(self.name)
        if self.waiter is not None:  # nobody hears this: its kernels go behind all others
            self.stream = torch.cuda.Stream(model.device, priority=0)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.work)

    def admit(self, a: Admit, params: EnrollerParams, prompt: Prompt) -> None:
        clips = [c.mel for c in prompt.audios]
        if len(clips) != 1 or clips[0].ndim != 2 or clips[0].shape[0] != 1:
            raise Invalid("a voice is made of one clip", "audio")
        samples = clips[0][0]
        if len(samples) < SHORTEST:
            raise Invalid(
                f"the clip is too short: {len(samples)} samples, at least {SHORTEST} are needed",
                "audio",
            )
        if len(self.work) >= MAX_CLIPS:
            raise Busy(f"{MAX_CLIPS} voices are being made already")
        with self._running():
            clip = to_device(np.array(samples), self.model.device, torch.float32)
        self.work[a.request] = Work(
            self.model.run(clip, prompt.ids), prompt.ids, StageTimings(self.clock())
        )

    def cancel(self, id: RequestId) -> None:
        self.work.pop(id, None)

    def throttle(self, id: RequestId, on: bool) -> None:
        """It makes one voice of a clip, whoever listens."""

    def poll(self) -> Sequence[Output]:
        """Voices that are done."""
        for id in [
            id for id, work in self.work.items() if work.copied is not None and work.copied.ready
        ]:
            self._end(id, self.work.pop(id))
        return self.take_outputs()

    @torch.inference_mode()
    def launch(self) -> bool:
        """One part of the clip that came first."""
        for id, work in self.work.items():
            if work.copied is None:
                self._part(id, work)
                return True
        return False

    def _part(self, id: RequestId, work: Work) -> None:
        try:
            with self._running():
                try:
                    next(work.parts)
                except StopIteration as end:
                    work.copied = Copied.of(end.value, self.waiter)
            self.outputs.append(ToEngine(Working(id, self.name)))
        except RuntimeError as e:  # of memory, most likely
            self.cancel(id)
            self._fail(id, f"no voice can be made of this: {e}")

    def _running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def _end(self, id: RequestId, work: Work) -> None:
        assert work.copied is not None
        voice = work.copied.voice(work.text)
        if not np.isfinite(
            np.frombuffer(voice.vector, np.float32)
        ).all():  # of samples beyond all measure
            self._fail(id, "no voice can be made of this sound")
            return
        work.timings.mark(self.clock())
        self.outputs.append(ToEngine(ProductData(id), msgspec.msgpack.encode(voice)))
        self.outputs.append(ToEngine(work.timings.ended(id, self.name, Reason.STOP)))

    def _fail(self, id: RequestId, message: str) -> None:
        self.outputs.append(ToEngine(failed(id, self.name, Invalid(message, "audio"))))
