"""The core of a vocoder's stage: codec frames in, samples out, many streams in step.

There are no blocks and no tokens here. A stream holds a slot of the vocoder's state from its first
frame to its last sample; frames that arrive wait in a bounded queue. Each step takes the waiting
frames of all streams that have some (up to a captured size, the most urgent streams deciding), runs
these streams alone, and copies the samples to the host behind it. All methods belong to the loop
thread, and none waits.

Streams that have not sounded yet, or will soon run dry, do not wait for those that have much in
hand: they get a step of just their size, and no step is so large that the next would be late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stretto.errors import Bug, Busy, Gone, StageDead, StrettoError
from stretto.layers.capture import Captured, capture_graphs
from stretto.observe.recorder import Recorder
from stretto.stage.request import Reason
from stretto.stage.runner.waiter import Waiter
from stretto.stage.steps import StepQueue
from stretto.stage.vocoder.config import CodecConfig
from stretto.stage.vocoder.model import VocoderModel
from stretto.stage.vocoder.primers import Primers
from stretto.stage.vocoder.staging import Staging, numbers, split
from stretto.stage.vocoder.streams import Primer, Slots, Stream
from stretto.types import RequestId


@dataclass(frozen=True, slots=True, eq=False)
class VocoderOutput:
    """Samples [start, start + len) of a stream. The last one of a stream says why it ended."""

    request: RequestId
    start: int
    samples: npt.NDArray[np.float32]
    # decoded so far, these included
    frames: int
    reason: Reason | None
    error: StrettoError | None = None


NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class VocoderBatch:
    """What one step decodes."""

    # stream, its frames before, those that the step takes of it
    parts: list[tuple[Stream, int, int]]
    # of the step, with padding
    streams: int
    # frames of each stream, with padding
    size: int


@dataclass(slots=True, eq=False)
class CodecStep:
    parts: list[tuple[Stream, int, int]]
    # [streams, samples], pinned
    host: torch.Tensor
    copied: torch.cuda.Event | None
    error: StrettoError | None = None

    @property
    def kind(self) -> str:
        return "decode"


class VocoderCore(StepQueue[CodecStep, VocoderOutput]):
    def __init__(
        self,
        model: VocoderModel,
        config: CodecConfig | None = None,
        waiter: Waiter | None = None,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
        name: str = "vocoder",
    ) -> None:
        """`clock`: of the streams' deadlines."""
        self.config = c = config or CodecConfig()
        self.state = model.state(c.slots, max(c.frame_sizes))
        self.device = self.state.frames.device
        stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            # the listener waits for this stage: its kernels go before all others
            stream = torch.cuda.Stream(self.device, priority=-2)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self.device))
        super().__init__(name, c.overlap_depth, waiter=waiter, recorder=recorder, stream=stream)
        self.model = model
        self.deadline_clock = clock
        self._slots = Slots(c.slots)
        self._streams: dict[RequestId, Stream] = {}
        self._arrivals = 0
        self.primers = Primers(self.state, c.primers)
        # by number, the smallest first
        self._sizes = {streams: c.sizes_for(streams) for streams, _ in c.shapes()}
        self.graphs: dict[tuple[int, int], Captured[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._staging = Staging(
            c, model.config.num_quantizers, model.config.samples_per_frame, self.device
        )

    # -- streams

    def open(self, id: RequestId, primer: Primer | None = None) -> None:
        """Announce a stream. It gets a slot when its first frames are there (or its primer is to be
        heard) and a slot is free."""
        if id in self._streams:
            raise Bug(f"stream {id} opened twice")
        if len(self._slots.waiting) >= self.config.max_waiting:
            raise Busy(f"{self.config.max_waiting} streams are waiting for the vocoder already")
        self._streams[id] = stream = Stream(id, self._arrivals, primer=primer)
        if primer is not None and primer not in self.primers:
            stream.add(primer.codes)
        self._arrivals += 1
        self._slots.waiting.append(stream)

    def push(self, id: RequestId, codes: torch.Tensor, last: Reason | None = None) -> None:
        """Frames [n, 16] of a stream, in order; `last` says that no more will come. n may be 0 with
        it. They are best on the host: a step takes the frames of all its streams to the device in
        one copy."""
        stream = self._streams.get(id)
        if stream is None:
            raise Gone(f"stream {id} is not here (any more)")
        if stream.ended is not None:
            raise Bug(f"stream {id}: frames after its end")
        if stream.num_pending + len(codes) > self.config.max_pending:
            raise Busy(f"stream {id}: more than {self.config.max_pending} frames are waiting")
        if len(codes):
            # a copy: the sender's memory goes back
            stream.add(codes.cpu().numpy().astype(np.int64))
        stream.ended = last
        if last is not None and not stream.num_pending and not stream.in_flight:
            self._pass_on(stream, NOTHING, stream.done, last)

    def cancel(self, id: RequestId) -> bool:
        """Drop a stream at once; samples on their way are never emitted."""
        stream = self._streams.pop(id, None)
        if stream is None:
            return False
        stream.removed = True
        self._slots.give_up(stream)
        return True

    def throttle(self, id: RequestId, on: bool) -> None:
        """What waits here is bounded: it is made though the listener is slow."""

    def set_deadline(self, id: RequestId, deadline: float | None) -> None:
        """When the sound of a stream that has left runs out. The stream may be over."""
        if id in self._streams:
            self._streams[id].deadline = deadline

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_free(self) -> int:
        """Slots that no stream holds."""
        return len(self._slots.free)

    # -- steps

    def launch(self) -> bool:
        start = self.clock()
        batch = self.schedule() if self.has_room else None
        if batch is not None:
            frames = sum(n for _, _, n in batch.parts)
            self._launched(self._launch(batch), start, frames)
        return batch is not None or self.can_retire

    def schedule(self) -> VocoderBatch | None:
        """Streams with waiting frames and how many of them the next step takes."""
        for stream, slot in self._slots.assign():
            self.stats.queue.observe((time.perf_counter_ns() - stream.since_ns) / 1e9)
            with self.on_stream():
                self.primers.begin(stream, slot)
        ready = [s for s in self._slots.by_slot.values() if s.num_pending]
        if not ready:
            return None
        dry = self.deadline_clock() + self.config.urgent_s
        urgent = [s for s in ready if s.deadline is None or s.deadline < dry]
        # A first packet goes out in the smallest step that holds it; then come those that are about
        # to run dry.
        max_ready = max(
            s.num_ready for s in ([s for s in urgent if s.deadline is None] or urgent or ready)
        )
        sizes = self.config.frame_sizes
        size = next((f for f in sizes if f >= max_ready), sizes[-1])
        chosen = ready
        if urgent:
            chosen = [
                s for s in ready if s.num_ready <= size or s.deadline is None or s.deadline < dry
            ]
        # The smallest shape that holds them, or as many of their frames as a shape can.
        streams = next(n for n in self._sizes if n >= len(chosen))
        size = next((f for f in self._sizes[streams] if f >= size), self._sizes[streams][-1])
        parts = [(s, s.launched, min(s.num_ready, size)) for s in chosen]
        return VocoderBatch(parts, streams, size)

    @torch.inference_mode()
    def _launch(self, batch: VocoderBatch) -> CodecStep:
        codes, counts, slots = self._staging.inputs(batch.streams, batch.size)
        for i, (stream, _, n) in enumerate(batch.parts):
            assert stream.slot is not None
            stream.take(n, codes[i])
            counts[i], slots[i] = n, stream.slot
            stream.launched += n
            stream.in_flight += 1
        with self.on_stream():
            try:
                host, copied = self.run(batch.streams, batch.size)
                for stream, before, n in batch.parts:
                    if before < stream.primed == before + n:
                        self.primers.keep(stream)
            except RuntimeError as e:
                error = StageDead(f"a vocoder step failed: {e}")
                return CodecStep(batch.parts, torch.empty(0), None, error)
        return CodecStep(batch.parts, host, copied)

    def run(self, streams: int, size: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """One step on what was staged."""
        found = self.graphs.get((streams, size))
        if found is not None:
            graph, (packed, wav) = found
            packed.copy_(self._staging.host(streams, size), non_blocking=True)
            graph.replay()
        else:
            packed = self._staging.host(streams, size).to(self.device, non_blocking=True, copy=True)
            wav = self.model.step(self.state, *split(packed, streams, size))
        if self.stream is None:
            return wav, None
        host = self._staging.output(wav)
        host.copy_(wav, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self.stream)
        return host, copied

    def _retire(self, step: CodecStep) -> None:
        wav = step.host.numpy()
        for i, (stream, before, n) in enumerate(step.parts):
            stream.in_flight -= 1
            if stream.removed:
                if not stream.in_flight:
                    self._slots.release(stream)
            elif step.error is not None:
                self._pass_on(stream, NOTHING, stream.done, Reason.FAILED, step.error)
            else:
                self._take_samples(stream, before, n, wav[i])

    def _describe(self, step: CodecStep) -> str:
        return f"{len(step.parts)} streams of {max(n for _, _, n in step.parts)} frames"

    def _take_samples(
        self, stream: Stream, before: int, n: int, wav: npt.NDArray[np.float32]
    ) -> None:
        """Of a step that took `n` frames of a stream behind `before` others."""
        stream.done = before + n
        last = stream.ended is not None and not stream.num_pending and not stream.in_flight
        if before >= stream.primed:
            span = self.model.valid(before, n)
            # Copied: the step's buffer is shared by all streams and must not be kept alive by a
            # slow reader.
            samples = wav[span.start : span.stop].copy()
            self._pass_on(stream, samples, before, stream.ended if last else None)
        elif last:
            # nothing came behind its primer
            self._pass_on(stream, NOTHING, before, stream.ended)

    def _pass_on(
        self,
        stream: Stream,
        samples: npt.NDArray[np.float32],
        before: int,
        reason: Reason | None,
        error: StrettoError | None = None,
    ) -> None:
        """Samples that begin behind the first `before` frames; with a reason, the last of the
        stream."""
        if reason is not None:
            del self._streams[stream.request]
            stream.removed = True
            self._slots.give_up(stream)
        unheard = self.model.num_samples(stream.primed) if stream.primed else 0
        start, frames = self.model.num_samples(before) - unheard, stream.done - stream.primed
        self._outputs.append(
            VocoderOutput(stream.request, max(0, start), samples, max(0, frames), reason, error)
        )

    def on_stream(self) -> AbstractContextManager[Any]:
        """Whatever touches frames on the device happens on the stage's own stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    # -- graphs

    def capture(self, sizes: Sequence[tuple[int, int]] | None = None) -> None:
        """Capture steps of (streams, frames). Streams must not be running."""
        assert self.stream is not None, "graphs need a GPU"
        todo = sorted(set(sizes or self.config.shapes()), key=lambda t: -t[0] * t[1])
        self.graphs = capture_graphs(todo, self._prepare, self.stream, warmups=2)

    def _prepare(self, shape: tuple[int, int]) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """A step that is all padding, so that the state stays as it is: -> its inputs, its
        samples."""
        streams, frames = shape
        packed = torch.zeros(
            numbers(streams, self.model.config.num_quantizers, frames),
            dtype=torch.int64,
            device=self.device,
        )
        codes, counts, slots = split(packed, streams, frames)
        slots.fill_(-1)
        return lambda: (packed, self.model.step(self.state, codes, counts, slots))
