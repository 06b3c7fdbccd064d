"""What runs on the replayed card: the stages with their real scheduler and their real way of launching ahead, and the
vocoder in the shapes that it is captured in. Time is told to them. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stretto.planner.heard import Heard
from stretto.planner.table import BINS, SMALL, Curve, Shape, StageTimes, Table, at, bin_of, pass_of
from stretto.stage.ahead import Ahead, Flight
from stretto.stage.pace import Pace
from stretto.stage.request import StageRequest, State
from stretto.stage.scheduler.batch import Batch, Outcome, StepResult
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.scheduler import Scheduler

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # rows that decode steps are captured with
LEAD_NS = 1_500_000  # `launch_lead_ms`
URGENT_S = 0.1
DEPTH = 2  # steps and calls in flight


class HostWork(Protocol):
    """Has the host's thread work for about so many milliseconds, and says when it is done."""

    def __call__(self, ms: float, prompts: bool = False) -> float: ...


@dataclass(slots=True)
class Step:
    batch: Batch
    left_ms: float
    starts: float  # no sooner
    flight: Flight

    @property
    def size(self) -> int:
        """Where shares of speed are told: the bin of its rows, or one more if it holds prompts."""
        return bin_of(len(self.batch.spans)) if self.batch.decode_only else len(BINS)

    @property
    def small(self) -> bool:
        return self.batch.num_tokens <= SMALL


class Stage:
    def __init__(self, times: StageTimes, rows: int, mixed: bool, clock: Callable[[], int]) -> None:
        config = SchedulerConfig(
            num_blocks=max(1, times.tokens // 16), max_rows=rows, max_waiting=1 << 20, lone_prefill_chunk=2560,
            max_step_tokens=4096, prefix_cache=False, mixed=mixed,
        )  # fmt: skip
        self.times, self.scheduler = times, Scheduler(config)
        self.ahead = Ahead(SIZES, LEAD_NS, clock=clock)
        self.running: deque[Step] = deque()  # on the device
        self.done: deque[Step] = deque()  # of which the host knows nothing yet
        self.due: float | None = None  # when a launch that is held back is due
        self.gives_way: Callable[[], int | None] = lambda: None  # until when a decode step waits for others' prompts
        self.most_held = 0  # blocks of its KV cache that requests had at once
        self._known: dict[int, float] = {}  # what decodes take, by rows

    def launch(self, busy: HostWork) -> bool:
        """One step, as `stage/stage.py` has it: one that brings no prompt is held back."""
        self.due = None
        if len(self.running) + len(self.done) >= DEPTH:
            return False
        due = self.ahead.due_ns() or self.gives_way()
        if due is not None and self.scheduler.only_decodes_wait:
            self.due = due / 1e9
            return False
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        ms = self.launching(batch)
        flight = self.ahead.launched(len(batch.spans) if batch.decode_only else None, int(1e6 * ms))
        starts = busy(ms, not batch.decode_only)
        flight.launched_ns = int(1e9 * starts)
        self.running.append(Step(batch, self.takes(batch), starts, flight))
        pool = self.scheduler.pool
        self.most_held = max(self.most_held, pool.num_blocks - pool.num_available)
        return True

    @property
    def reading(self) -> bool:
        """Whether a step in flight holds prompts."""
        return any(not step.batch.decode_only for step in (*self.running, *self.done))

    def launching(self, batch: Batch) -> float:
        """Milliseconds of the host."""
        return self._host(batch, self.times.launch, self.times.launch_prompts)

    def _host(self, batch: Batch, decode: Curve, prompts: Curve) -> float:
        decodes, others = batch.num_decodes, len(batch.spans) - batch.num_decodes
        return (at(decode, decodes) if decodes else 0.0) + (at(prompts, others) if others else 0.0)

    def takes(self, batch: Batch) -> float:
        """Milliseconds, alone. Passes over prompts are padded to those that are captured."""
        if batch.decode_only:
            return self.decodes(batch.num_decodes)
        return pass_of(self.times.prompt, batch.num_tokens)

    def decodes(self, rows: int) -> float:
        if rows not in self._known:
            self._known[rows] = at(self.times.decode, rows)
        return self._known[rows]

    def end(self) -> None:
        """The device is done with a step, and goes on with the next."""
        step = self.running.popleft()
        self.ahead.ended(step.flight)
        self.done.append(step)

    def retire(self, busy: HostWork) -> list[Outcome]:
        """The host learns what came of a step, row by row."""
        step = self.done.popleft()
        self.ahead.retired()
        outcomes = self.scheduler.retire(step.batch, StepResult([7] * len(step.batch.spans)))
        busy(self._host(step.batch, self.times.retire, self.times.retire_prompts))
        return outcomes


@dataclass(slots=True, eq=False)
class Voice:
    """A request's frames on their way to the vocoder, and its text on the way to the listener."""

    number: int
    pace: Pace
    request: StageRequest
    heard: Heard
    waiting: int = 0  # frames that have not left for the vocoder
    pending: int = 0  # that wait there
    seated: bool = False  # it has one of the vocoder's slots
    deadline: float | None = None  # when what is sounded has been played; None: nothing is
    begun: float | None = None  # when it first was
    sounded_s: float = 0.0
    last: bool = False  # no more frames will come
    told: int = 0  # tokens of text
    untold: int = 0
    told_at: float = 0.0

    @property
    def stalled(self) -> bool:
        return self.request.state is State.STARVED and not self.request.in_flight


@dataclass(slots=True)
class Call:
    streams: list[tuple[Voice, int]]
    shape: Shape
    left_ms: float
    starts: float


class Vocoder:
    """As `stage/codec/stage.py` has it: a step runs the streams that have frames in it, padded to a captured shape. The
    table has all of these."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.calls: deque[Call] = deque()  # on the device
        self.done: deque[Call] = deque()  # of which the host knows nothing yet
        self._shapes: dict[int, dict[int, Shape]] = {}  # by streams and frames
        for shape in sorted(table.vocoder, key=lambda s: (s.streams, s.frames)):
            self._shapes.setdefault(shape.streams, {})[shape.frames] = shape
        self._frames = sorted({shape.frames for shape in table.vocoder})
        self._free = table.max_rows
        self._voices: list[Voice] = []  # with frames that wait

    def push(self, voice: Voice, frames: int) -> None:
        if not voice.pending and frames:
            self._voices.append(voice)
        voice.pending += frames

    def launch(self, now: float, busy: HostWork) -> bool:
        """One call."""
        if not self._voices or len(self.calls) + len(self.done) >= DEPTH:
            return False
        for voice in sorted(self._voices, key=lambda v: v.number):
            if not voice.seated and self._free:
                voice.seated, self._free = True, self._free - 1
        seated = [v for v in self._voices if v.seated]
        if not seated:
            return False
        urgent = [v for v in seated if v.deadline is None or v.deadline < now + URGENT_S]
        most = max(v.pending for v in ([v for v in urgent if v.deadline is None] or urgent or seated))
        size = up(self._frames, most)
        chosen = [v for v in seated if v.pending <= size or v in urgent] if urgent else seated
        sizes = self._shapes[up(list(self._shapes), len(chosen))]
        size = up(list(sizes), size)
        streams = [(v, min(v.pending, size)) for v in chosen]
        for voice, n in streams:
            voice.pending -= n
        self._voices = [v for v in self._voices if v.pending]
        starts = busy(at(self.table.launch_vocoder, len(streams)))
        self.calls.append(Call(streams, sizes[size], sizes[size].ms, starts))
        return True

    def end(self) -> None:
        """The device is done with a call."""
        self.done.append(self.calls.popleft())

    def retire(self, busy: HostWork) -> list[tuple[Voice, int, bool]]:
        """What came of the oldest call that is done: voice, frames, whether they are its last."""
        streams = self.done.popleft().streams
        busy(at(self.table.retire_vocoder, len(streams)))
        return [(voice, n, voice.last and self.close(voice)) for voice, n in streams]

    def close(self, voice: Voice) -> bool:
        """Whether nothing of it is left here; then its slot is free."""
        if voice.pending or any(voice is v for call in (*self.calls, *self.done) for v, _ in call.streams):
            return False
        if voice.seated:
            voice.seated, self._free = False, self._free + 1
        return True


def up(sizes: Sequence[int], wanted: int) -> int:
    """The next captured size, or the largest."""
    return sizes[min(bisect_left(sizes, wanted), len(sizes) - 1)]
