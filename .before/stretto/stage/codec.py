"""The vocoder's stage: codec frames in, samples out, many streams in step.

There are no blocks and no tokens here. A stream holds a slot of the vocoder's state from its first frame to its last
sample; frames that arrive wait in a bounded queue. Each step takes the waiting frames of all streams that have some
(up to a captured size, the most urgent streams deciding), runs the leading slots that are in use, and copies the
samples to the host behind it. All methods belong to the loop thread; `turn` never waits.

Streams that have not sounded yet, or will soon run dry, do not wait for those that have much in hand: they get a step
of just their size, and no step is so large that the next would be late."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stretto.errors import Bug, Busy, Gone, StageDead, StrettoError
from stretto.layers.capture import Captured, capture_graphs
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.stage.request import Reason
from stretto.stage.runner.waiter import Waiter
from stretto.types import RequestId


@dataclass(frozen=True, slots=True)
class CodecConfig:
    slots: int = 128  # streams at once
    max_waiting: int = 256  # announced streams without a slot
    max_pending: int = 4096  # frames that one stream may have waiting
    frame_sizes: tuple[int, ...] = (1, 2, 4, 8)  # frames per step; packets grow to no more by default
    slot_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    overlap_depth: int = 2
    max_cells: int = 256  # slots x frames of a step (unless it is of one frame): larger ones save nothing more
    urgent_s: float = 0.1  # a stream that runs dry within so long goes before those that do not
    spare_cells: int = 0  # a step may be padded by so many slots x frames to be of a size that there is already

    def sizes_for(self, slots: int) -> tuple[int, ...]:
        """Frames per step that steps of so many slots come in, smallest first. The smallest is never padded: it is a
        stream's first packet."""
        first, *more = sorted(self.frame_sizes)
        kept: list[int] = []
        for frames in reversed([f for f in more if f * slots <= self.max_cells]):
            if not kept or slots * (kept[0] - frames) > self.spare_cells:
                kept.insert(0, frames)
        return first, *kept

    def shapes(self) -> list[tuple[int, int]]:
        """All (slots, frames) that steps come in."""
        widths = sorted({*(n for n in self.slot_sizes if n < self.slots), self.slots})
        return [(slots, frames) for slots in widths for frames in self.sizes_for(slots)]

    def captured(self) -> CodecConfig:
        """The same in fewer shapes, for steps that are captured. Each shape costs a second or more at start, as the
        library tries its convolutions anew. On the hardware that we know a captured step takes about 1.5 ms and 0.04 ms
        more per slot and frame: 48 of them are 2 ms, of the 160 ms or more that a packet to be padded plays. On a CPU,
        where a step takes as long as its cells, padding would not be cheap."""
        return replace(self, slot_sizes=(1, 8, 16, 32, 64, 128), spare_cells=48)


@dataclass(frozen=True, slots=True, eq=False)
class AudioOutput:
    """Samples [start, start + len) of a stream. The last one of a stream says why it ended."""

    request: RequestId
    start: int
    samples: npt.NDArray[np.float32]
    frames: int  # decoded so far, these included
    reason: Reason | None
    error: StrettoError | None = None


@dataclass(slots=True, eq=False)
class Stream:
    request: RequestId
    arrival: int
    slot: int | None = None
    pending: deque[npt.NDArray[np.int64]] = field(default_factory=deque)  # codes [n, 16] each
    num_pending: int = 0
    launched: int = 0  # frames
    done: int = 0  # frames whose samples are out
    ended: Reason | None = None  # no more frames will come
    deadline: float | None = None  # when the sound sent so far runs out; None: nothing sent yet
    in_flight: int = 0
    gone: bool = False

    @property
    def order(self) -> tuple[float, int]:
        return float("-inf") if self.deadline is None else self.deadline, self.arrival


@dataclass(slots=True, eq=False)
class CodecStep:
    parts: list[tuple[Stream, int, int, int]]  # stream, frames before, frames, frames' end in the queue's count
    host: torch.Tensor  # [slots, samples], pinned
    copied: torch.cuda.Event | None
    error: StrettoError | None = None

    @property
    def ready(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class CodecStats:
    steps: int = 0
    frames: int = 0
    slots: int = 0  # slots run, used or not: frames / (slots * step size) is the fill
    launch_ns: int = 0
    retire_ns: int = 0


class Staging:
    """Host memory that steps read their frames from and write their samples to, pinned where there is a GPU. It goes
    round: a place comes up again when the step that used it has long been retired."""

    def __init__(self, config: CodecConfig, groups: int, rate: int, device: torch.device) -> None:
        self._groups, self._pin = groups, device.type == "cuda"
        self._places = config.overlap_depth + 2
        frames = config.slots * max(config.frame_sizes)
        size = frames * groups + config.slots
        self._in = [torch.zeros(size, dtype=torch.int64, pin_memory=self._pin) for _ in range(self._places)]
        self._out: list[torch.Tensor | None] = [None] * self._places
        self._samples = frames * rate
        self._turn = 0

    def inputs(self, slots: int, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The next place: codes [slots, groups, size] to be filled in, and counts [slots], all 0. (What older steps
        left in the codes is never looked at, but it is codes or counts, so nothing that a table would not hold.)"""
        self._turn = (self._turn + 1) % self._places
        codes, counts = split(self.host(slots, size), slots, size)
        counts.zero_()
        return codes.numpy(), counts.numpy()

    def host(self, slots: int, size: int) -> torch.Tensor:
        """The place as one piece, for one copy."""
        return self._in[self._turn][: slots * (self._groups * size + 1)]

    def output(self, wav: torch.Tensor) -> torch.Tensor:
        """Where the step's samples go."""
        place = self._out[self._turn]
        if place is None or place.numel() < wav.numel():
            size = max(self._samples, wav.numel())
            place = self._out[self._turn] = torch.empty(size, dtype=wav.dtype, pin_memory=self._pin)
        return place[: wav.numel()].view(wav.shape)


def split(given: torch.Tensor, slots: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [slots, groups, size] and counts [slots] in one piece of memory, as views."""
    codes = given.numel() - slots
    return given[:codes].view(slots, -1, size), given[codes:]


def on_host(codes: torch.Tensor) -> npt.NDArray[Any]:
    host: npt.NDArray[Any] = (codes.cpu() if codes.is_cuda else codes).numpy()
    return host


class CodecStage:
    def __init__(
        self,
        model: Code2Wav,
        emit: Callable[[AudioOutput], None],
        config: CodecConfig | None = None,
        waiter: Waiter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is what deadlines are told by."""
        self.model, self.emit, self.waiter, self.clock = model, emit, waiter, clock
        self.config = c = config or CodecConfig()
        self.state = model.state(c.slots, max(c.frame_sizes))
        self.device = self.state.frames.device
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":  # the listener waits for this stage: its kernels go before all others
            self.stream = torch.cuda.Stream(self.device, priority=-2)  # type: ignore[no-untyped-call]
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.stats = CodecStats()
        self._free = list(range(c.slots))  # a heap: the lowest slots are used first
        self._streams: dict[RequestId, Stream] = {}
        self._queue: deque[Stream] = deque()  # without a slot
        self._seated: dict[int, Stream] = {}
        self._steps: deque[CodecStep] = deque()
        self._arrivals = 0
        self._sizes = {slots: c.sizes_for(slots) for slots, _ in c.shapes()}
        self._graphs: dict[tuple[int, int], Captured[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._staging = Staging(c, model.config.num_quantizers, model.config.samples_per_frame, self.device)

    # -- streams

    def open(self, id: RequestId) -> None:
        """Announce a stream. It gets a slot when its first frames are there and a slot is free."""
        if id in self._streams:
            raise Bug(f"stream {id} opened twice")
        if len(self._queue) >= self.config.max_waiting:
            raise Busy(f"{self.config.max_waiting} streams are waiting for the vocoder already")
        self._streams[id] = stream = Stream(id, self._arrivals)
        self._arrivals += 1
        self._queue.append(stream)

    def room(self, id: RequestId) -> int:
        """How many more frames the stream may have waiting."""
        return self.config.max_pending - self._stream(id).num_pending

    def push(self, id: RequestId, codes: torch.Tensor, last: Reason | None = None) -> None:
        """Frames [n, 16] of a stream, in order; `last` says that no more will come. n may be 0 with it. They are
        best on the host: a step takes the frames of all its streams to the device in one copy."""
        stream = self._stream(id)
        if stream.ended is not None:
            raise Bug(f"stream {id}: frames after its end")
        if stream.num_pending + len(codes) > self.config.max_pending:
            raise Busy(f"stream {id}: more than {self.config.max_pending} frames are waiting")
        if len(codes):
            stream.pending.append(on_host(codes).astype(np.int64))  # a copy: the sender's memory goes back
            stream.num_pending += len(codes)
        stream.ended = last
        if last is not None and not stream.num_pending and not stream.in_flight:
            self._finish(stream, np.zeros(0, np.float32), self.model.num_samples(stream.done))

    def cancel(self, id: RequestId) -> bool:
        """Drop a stream at once; samples on their way are never emitted."""
        stream = self._streams.pop(id, None)
        if stream is None:
            return False
        stream.gone = True
        self._give_up(stream)
        return True

    def set_deadline(self, id: RequestId, deadline: float | None) -> None:
        self._stream(id).deadline = deadline

    def __contains__(self, id: RequestId) -> bool:
        return id in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_in_flight(self) -> int:
        return len(self._steps)

    @property
    def num_free(self) -> int:
        """Slots that no stream holds."""
        return len(self._free)

    @property
    def idle(self) -> bool:
        return not self._steps and not self._streams and len(self._free) == self.config.slots

    # -- steps

    def turn(self) -> bool:
        did = False
        while self._steps and self._steps[0].ready:
            start = time.perf_counter_ns()
            self._retire(self._steps.popleft())
            self.stats.retire_ns += time.perf_counter_ns() - start
            did = True
        if len(self._steps) < self.config.overlap_depth:
            start = time.perf_counter_ns()
            parts = self._schedule()
            if parts:
                self._launch(parts)
                self.stats.launch_ns += time.perf_counter_ns() - start
                did = True
        return did

    def wait(self) -> None:
        if self._steps and self._steps[0].copied is not None:
            self._steps[0].copied.synchronize()

    def _schedule(self) -> list[tuple[Stream, int]]:
        """Streams with waiting frames and how many of them this step takes."""
        self._seat()
        ready = [s for s in self._seated.values() if s.num_pending]
        if not ready:
            return []
        dry = self.clock() + self.config.urgent_s
        urgent = [s for s in ready if s.deadline is None or s.deadline < dry]
        # A first packet goes out in the smallest step that holds it; then come those that are about to run dry.
        most = max(s.num_pending for s in ([s for s in urgent if s.deadline is None] or urgent or ready))
        size = next((f for f in self.config.frame_sizes if f >= most), self.config.frame_sizes[-1])
        chosen = ready
        if urgent:
            chosen = [s for s in ready if s.num_pending <= size or s.deadline is None or s.deadline < dry]
        size = self._num_frames(self._num_slots(chosen), size)
        return [(s, min(s.num_pending, size)) for s in chosen]

    def _num_slots(self, streams: Sequence[Stream]) -> int:
        """The leading slots that a step for these streams runs."""
        top = 1 + max(s.slot for s in streams if s.slot is not None)
        return next((n for n in sorted(self.config.slot_sizes) if top <= n <= self.config.slots), self.config.slots)

    def _num_frames(self, slots: int, wanted: int) -> int:
        """Of a step that shall hold `wanted` frames per stream, or as many of them as it can."""
        sizes = self._sizes[slots]
        return next((f for f in sizes if f >= wanted), sizes[-1])

    def _seat(self) -> None:
        if not self._free or not self._queue:
            return
        for stream in sorted((s for s in self._queue if s.num_pending), key=lambda s: s.order):
            if not self._free:
                break
            stream.slot = heapq.heappop(self._free)
            self._seated[stream.slot] = stream
            self._queue.remove(stream)
            with self.on_stream():
                self.state.reset(stream.slot)

    @torch.inference_mode()
    def _launch(self, parts: list[tuple[Stream, int]]) -> None:
        slots = self._num_slots([s for s, _ in parts])
        size = self._num_frames(slots, max(n for _, n in parts))
        taken = []
        codes, counts = self._staging.inputs(slots, size)
        for stream, n in parts:
            assert stream.slot is not None
            self._take(stream, n, codes[stream.slot])
            counts[stream.slot] = n
            taken.append((stream, stream.launched, n, stream.launched + n))
            stream.launched += n
            stream.in_flight += 1
        with self.on_stream():
            try:
                step = CodecStep(taken, *self._run(slots, size))
            except RuntimeError as e:
                step = CodecStep(taken, torch.empty(0), None, StageDead(f"a vocoder step failed: {e}"))
        self._steps.append(step)
        self.stats.steps += 1
        self.stats.slots += slots
        self.stats.frames += sum(n for _, n in parts)
        if self.waiter is not None and step.copied is not None:
            self.waiter.watch(step.copied)

    def _run(self, slots: int, size: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """One step on what was staged."""
        found = self._graphs.get((slots, size))
        if found is not None:
            graph, (given, wav) = found
            given.copy_(self._staging.host(slots, size), non_blocking=True)
            graph.replay()
        else:
            given = self._staging.host(slots, size).to(self.device, non_blocking=True, copy=True)
            inputs, counts = split(given, slots, size)
            wav = self.model.step(self.state.head(slots), inputs, counts)
        if self.stream is None:
            return wav, None
        host = self._staging.output(wav)
        host.copy_(wav, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self.stream)
        return host, copied

    def _take(self, stream: Stream, n: int, into: npt.NDArray[np.int64]) -> None:
        """The first n waiting frames, as columns of `into`."""
        stream.num_pending -= n
        at = 0
        while at < n:
            head = stream.pending.popleft()
            if len(head) > n - at:
                stream.pending.appendleft(head[n - at :])
                head = head[: n - at]
            into[:, at : at + len(head)] = head.T
            at += len(head)

    def _retire(self, step: CodecStep) -> None:
        wav = step.host.numpy()
        for stream, before, n, end in step.parts:
            stream.in_flight -= 1
            if stream.gone:
                if not stream.in_flight:
                    self._release(stream)
                continue
            if step.error is not None:
                self._fail(stream, step.error)
                continue
            assert stream.slot is not None
            span = self.model.valid(before, n)
            # Copied: the step's buffer is shared by all streams and must not be kept alive by a slow reader.
            samples = wav[stream.slot, span.start : span.stop].copy()
            stream.done = end
            start = self.model.num_samples(before)
            if stream.ended is not None and not stream.num_pending and not stream.in_flight:
                self._finish(stream, samples, start)
            else:
                self.emit(AudioOutput(stream.request, start, samples, stream.done, None))

    def _finish(self, stream: Stream, samples: npt.NDArray[np.float32], start: int) -> None:
        del self._streams[stream.request]
        self._give_up(stream)
        self.emit(AudioOutput(stream.request, start, samples, stream.done, stream.ended))

    def _fail(self, stream: Stream, error: StrettoError) -> None:
        self._streams.pop(stream.request, None)
        stream.gone = True
        self._give_up(stream)
        start = self.model.num_samples(stream.done)
        none = np.zeros(0, np.float32)
        self.emit(AudioOutput(stream.request, start, none, stream.done, Reason.FAILED, error))

    def _give_up(self, stream: Stream) -> None:
        stream.pending.clear()
        stream.num_pending = 0
        if stream.slot is None:
            if stream in self._queue:
                self._queue.remove(stream)
        elif not stream.in_flight:
            self._release(stream)

    def _release(self, stream: Stream) -> None:
        """The slot is free once no step in flight writes to it."""
        if stream.slot is not None:
            del self._seated[stream.slot]
            heapq.heappush(self._free, stream.slot)
            stream.slot = None

    def _stream(self, id: RequestId) -> Stream:
        try:
            return self._streams[id]
        except KeyError:
            raise Gone(f"stream {id} is not here (any more)") from None

    def on_stream(self) -> AbstractContextManager[Any]:
        """Whatever touches frames on the device happens on the stage's own stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    # -- graphs

    def capture(self, sizes: Sequence[tuple[int, int]] | None = None) -> None:
        """Capture steps of (slots, frames). Streams must not be running."""
        assert self.stream is not None, "graphs need a GPU"
        todo = sorted(set(sizes or self.config.shapes()), key=lambda t: -t[0] * t[1])
        self._graphs = capture_graphs(todo, self._prepare, self.stream, warmups=2)

    def _prepare(self, shape: tuple[int, int]) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """A step of no frames, so that the state stays as it is: -> what it is given, its samples."""
        slots, frames = shape
        numbers = slots * (self.model.config.num_quantizers * frames + 1)
        given = torch.zeros(numbers, dtype=torch.int64, device=self.device)
        head, (inputs, counts) = self.state.head(slots), split(given, slots, frames)
        return lambda: (given, self.model.step(head, inputs, counts))
