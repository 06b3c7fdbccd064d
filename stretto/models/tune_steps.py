"""Decode steps with other launch parameters, timed: what `stretto tune` searches.

A step is a stage's own, at full width with fewer layers and random weights, its rows at a given
position with different inputs each, as a captured graph. Two versions of it run in turns, so that
neither has the quieter time. One thread, one stream. `bench/kernels/in_step.py` times steps of its
own by the same rules."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stretto._imports import load
from stretto.kernels.triton import sampling, tuning
from stretto.kernels.triton.descent import Pair, Table, TrialFailed
from stretto.models.compile_ahead import CompileAhead, CompileJob, StageModel, Task
from stretto.stage.request import BlockId
from stretto.stage.runner.adapter import decode_step
from stretto.stage.runner.columns import SamplingMode
from stretto.stage.runner.rows import DeviceRows

BLOCK = 16
INPUTS = 8
"""Different ones, so that steps choose different experts."""
WARM = 4
"""Replays before those that count."""
MODE = SamplingMode(True, True)
Run = Callable[[], object]


class Timer(Protocol):
    """When something has happened on the device."""

    def mark(self) -> Any: ...
    def between(self, start: Any, stop: Any) -> float:
        """Milliseconds; both have happened."""
        ...


class EventTimer:
    """CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return float(start.elapsed_time(stop))


@dataclass(frozen=True, slots=True)
class TunedStage:
    """A stage of a checkpoint whose steps are tuned."""

    compile_ahead: CompileAhead
    model: str
    name: str
    device: str
    rows: int
    context: int
    layers: int

    @property
    def row_blocks(self) -> int:
        return -(-(self.context + 1) // BLOCK)

    def build(self) -> StageModel:
        job = CompileJob(
            adapter=self.compile_ahead.adapter,
            model=self.model,
            device=self.device,
            dtype="bfloat16" if self.device.startswith("cuda") else "float32",
            max_rows=self.rows,
            max_context=self.row_blocks * BLOCK,
            block_size=BLOCK,
            blocks=self.rows * self.row_blocks + 1,
            tasks=(Task(self.name, "decode", (self.rows,)),),
            formats=dict(self.compile_ahead.formats(self.compile_ahead.read(self.model))),
            layers=self.layers,
        )
        stage: StageModel = load(job.adapter)(job)
        return stage


class StepTrials(ABC):
    """One step, to be run, checked and timed with any launch parameters: a `descent.TrialStep`.
    Where its model comes from and how it is captured is a subclass's."""

    def __init__(self, rows: DeviceRows, timer: Timer, replays: int) -> None:
        """`rows`: of the step's adapter, on the device where it runs."""
        self.rows = rows
        self.timer = timer
        self.replays = replays
        cuda = rows.device.type == "cuda"
        self.stream = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        self._base: tuple[Table, Run] | None = None
        self._reference: list[torch.Tensor] | None = None

    @abstractmethod
    def set_inputs(self, i: int) -> None:
        """Replace what the last step left by the i-th inputs."""

    @abstractmethod
    def run(self) -> object: ...

    @abstractmethod
    def capture(self, stream: torch.cuda.Stream) -> Run: ...

    def checked(self) -> AbstractContextManager[Any]:
        """Holds while the step's questions and outputs are looked at."""
        return nullcontext()

    @property
    def num_checked(self) -> int:
        """Inputs whose outputs are compared."""
        return 1

    def on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def finish(self) -> None:
        """Wait for what was launched; errors show here."""
        if self.stream is not None:
            self.stream.synchronize()

    def questions(self, changes: Table) -> dict[str, tuning.TuningQuestion]:
        with tuning.instead(changes) as questions, self.on_stream(), self.checked():
            self.set_inputs(0)
            self.run()
            self.finish()
        return dict(questions)

    def precompile(self, tables: Sequence[Table]) -> list[str | None]:
        """Each is compiled when it is tried."""
        return [None] * len(tables)

    def outputs(self, changes: Table) -> list[torch.Tensor]:
        """The logits of all picks."""
        found: list[torch.Tensor] = []
        with tuning.instead(changes), self.on_stream(), self.checked(), listening(found):
            for i in range(self.num_checked):
                self.set_inputs(i)
                # picks are penalised for what was picked before
                self.rows.seen.zero_()
                self.run()
            self.finish()
        return found

    def error(self, changes: Table) -> float:
        if self._reference is None:
            self._reference = self.outputs({})
        with failing():
            found = self.outputs(changes)
            pairs = zip(found, self._reference, strict=True)
            errors = [
                (a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1) for a, b in pairs
            ]
        return float(torch.cat(errors).quantile(0.5))

    def captured(self, changes: Table) -> Run:
        """A step with these parameters, to be run again and again."""
        if self.stream is None:

            def eager() -> None:
                with tuning.instead(changes):
                    self.run()

            return eager
        with tuning.instead(changes):
            return self.capture(self.stream)

    def pair(self, base: Table, changes: Table) -> Pair:
        """In turns, so that neither has the quieter time, and with the same inputs."""
        if self._base is None or self._base[0] != base:
            self._base = None  # its memory goes before new memory comes
            self._base = dict(base), self.captured(base)
        with failing():
            runs = self._base[1], self.captured(changes)
            marks: tuple[list[Any], list[Any]] = ([], [])
            with self.on_stream():
                for i in range(WARM + self.replays):
                    for side in (0, 1) if i % 2 == 0 else (1, 0):
                        self.set_inputs(i)
                        start = self.timer.mark()
                        runs[side]()
                        marks[side].append((start, self.timer.mark()))
                self.finish()
        base_ms, changed_ms = ([self.timer.between(*m) for m in side[WARM:]] for side in marks)
        ratios = [b / a for a, b in zip(base_ms, changed_ms, strict=True)]
        gain = 1 - statistics.median(ratios)
        return Pair(statistics.median(base_ms), statistics.median(changed_ms), gain)


class StageTrials(StepTrials):
    """The step of a checkpoint's stage."""

    def __init__(self, what: TunedStage, timer: Timer, replays: int = 30) -> None:
        self.what = what
        self.stage = what.build()
        super().__init__(self.stage.adapter.rows, timer, replays)
        with self.on_stream():
            self._fill_rows()

    def _fill_rows(self) -> None:
        """Blocks and a position for each row."""
        rows, width, device = self.what.rows, self.what.row_blocks, self.what.device
        for row in range(rows):
            blocks = [BlockId(i) for i in range(row * width, (row + 1) * width)]
            self.rows.join(row, blocks, 0.0, ())
        self.inputs = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self.inputs[0] = torch.arange(rows, device=device)
        self.inputs[1] = self.what.context - 1

    def set_inputs(self, i: int) -> None:
        torch.manual_seed(i % INPUTS)
        self.stage.scatter(self.what.rows)

    def run(self) -> None:
        rows, positions, values = self.inputs
        decode_step(self.stage.adapter, rows, positions, values, MODE)

    def capture(self, stream: torch.cuda.Stream) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self.run()
            with torch.cuda.graph(graph, stream=stream):
                self.run()
        return graph.replay


@contextmanager
def failing() -> Iterator[None]:
    """A candidate may ask for more than the device has, or for tiles that do not compile."""
    try:
        yield
    except Exception as e:
        raise TrialFailed(f"{type(e).__name__}: {e}"[:200]) from e


@contextmanager
def listening(found: list[torch.Tensor]) -> Iterator[None]:
    """Copies of all logits that are picked from: every pick checks them first."""
    check = sampling.check_picks

    def listen(logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        found.append(logits.clone())
        check(logits, rows, positions)

    sampling.check_picks = listen
    try:
        yield
    finally:
        sampling.check_picks = check
