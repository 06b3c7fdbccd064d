"""What runs on the replayed card: the stages with their real scheduler and their real way of launching ahead, and the
vocoder in the shapes that it is captured in. Time is told to them. Imports no torch."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from stretto.planner.heard import Heard
from stretto.planner.table import StageTimes, Table, at, vocoder_ms
from stretto.stage.ahead import Ahead, Flight
from stretto.stage.pace import Pace
from stretto.stage.request import StageRequest, State
from stretto.stage.scheduler.batch import Batch, Outcome, StepResult
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.scheduler import Scheduler

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # rows that decode steps are captured with
LEAD_NS = 1_500_000  # `launch_lead_ms`
SHAPES = {1: (1, 8), 8: (1, 8), 16: (1, 4, 8), 32: (1, 2, 4, 8), 64: (1, 2, 4), 128: (1, 2)}
"""Of the vocoder's captured steps: frames, by slots."""
URGENT_S = 0.1
DEPTH = 2  # steps and calls in flight


@dataclass(slots=True)
class Step:
    batch: Batch
    left_ms: float
    starts: float  # no sooner
    flight: Flight


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
        self.most_held = 0  # blocks of its KV cache that requests had at once
        self._known: dict[int, float] = {}  # what decodes take, by rows

    def launch(self, busy: Callable[[float], float]) -> bool:
        """One step, as `stage/stage.py` has it: one that brings no prompt is held back. `busy` has the host work for
        some milliseconds and says when it is done."""
        self.due = None
        if len(self.running) + len(self.done) >= DEPTH:
            return False
        due = self.ahead.due_ns()
        if due is not None and self.scheduler.only_decodes_wait:
            self.due = due / 1e9
            return False
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        ms = self.times.launch if batch.decode_only else self.times.launch_prompt
        flight = self.ahead.launched(len(batch.spans) if batch.decode_only else None, int(1e6 * ms))
        starts = busy(ms)
        flight.launched_ns = int(1e9 * starts)
        self.running.append(Step(batch, self.takes(batch), starts, flight))
        pool = self.scheduler.pool
        self.most_held = max(self.most_held, pool.num_blocks - pool.num_available)
        return True

    def takes(self, batch: Batch) -> float:
        """Milliseconds, alone."""
        decodes = self.decodes(batch.num_decodes) if batch.num_decodes else 0.0
        if batch.decode_only:
            return decodes
        prompts = at(self.times.prompt, batch.num_tokens)
        return max(decodes, prompts) + self.times.mixed * min(decodes, prompts)

    def decodes(self, rows: int) -> float:
        if rows not in self._known:
            self._known[rows] = self.times.one if rows == 1 else at(self.times.decode, self.experts(rows))
        return self._known[rows]

    def experts(self, rows: int) -> float:
        """That a step reads: the more rows, the fewer of what another one picks are not read yet. A step that is padded
        up to a captured size has a row more, which picks as if by chance."""
        t = self.times
        read = min(t.experts, t.picks * math.pow(rows, t.spread))
        return read if rows in SIZES else read + t.picks * (1 - read / t.experts)

    def end(self) -> None:
        """The device is done with a step, and goes on with the next."""
        step = self.running.popleft()
        self.ahead.ended(step.flight)
        self.done.append(step)

    def retire(self, busy: Callable[[float], float]) -> list[Outcome]:
        """The host learns what came of a step, row by row."""
        step = self.done.popleft()
        self.ahead.retired()
        outcomes = self.scheduler.retire(step.batch, StepResult([7] * len(step.batch.spans)))
        busy(self.times.retire + self.times.retire_row * len(outcomes))
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
    slot: int | None = None
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
    left_ms: float
    starts: float


class Vocoder:
    """As `stage/codec/stage.py` has it: a step runs all slots up to the highest that it needs."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.calls: deque[Call] = deque()  # on the device
        self.done: deque[Call] = deque()  # of which the host knows nothing yet
        self._free = list(range(table.max_rows))
        self._voices: list[Voice] = []  # with frames that wait

    def push(self, voice: Voice, frames: int) -> None:
        if not voice.pending and frames:
            self._voices.append(voice)
        voice.pending += frames

    def launch(self, now: float, busy: Callable[[float], float]) -> bool:
        """One call."""
        if not self._voices or len(self.calls) + len(self.done) >= DEPTH:
            return False
        for voice in sorted(self._voices, key=lambda v: v.number):
            if voice.slot is None and self._free:
                voice.slot = heapq.heappop(self._free)
        seated = [v for v in self._voices if v.slot is not None]
        if not seated:
            return False
        urgent = [v for v in seated if v.deadline is None or v.deadline < now + URGENT_S]
        most = max(v.pending for v in ([v for v in urgent if v.deadline is None] or urgent or seated))
        size = next((n for n in (1, 2, 4, 8) if n >= most), 8)
        chosen = [v for v in seated if v.pending <= size or v in urgent] if urgent else seated
        top = 1 + max(v.slot for v in chosen if v.slot is not None)
        slots = next((n for n in SHAPES if n >= top), max(SHAPES))
        sizes = SHAPES[slots]
        size = sizes[min(bisect_left(sizes, size), len(sizes) - 1)]
        streams = [(v, min(v.pending, size)) for v in chosen]
        for voice, n in streams:
            voice.pending -= n
        self._voices = [v for v in self._voices if v.pending]
        self.calls.append(Call(streams, vocoder_ms(self.table, slots, size), busy(self.table.launch_vocoder)))
        return True

    def end(self) -> None:
        """The device is done with a call."""
        self.done.append(self.calls.popleft())

    def retire(self, busy: Callable[[float], float]) -> list[tuple[Voice, int, bool]]:
        """What came of the oldest call that is done: voice, frames, whether they are its last."""
        streams = self.done.popleft().streams
        busy(self.table.retire_vocoder + self.table.retire_packet * len(streams))
        return [(voice, n, voice.last and self.close(voice)) for voice, n in streams]

    def close(self, voice: Voice) -> bool:
        """Whether nothing of it is left here; then its slot is free."""
        if voice.pending or any(voice is v for call in (*self.calls, *self.done) for v, _ in call.streams):
            return False
        if voice.slot is not None:
            heapq.heappush(self._free, voice.slot)
            voice.slot = None
        return True
