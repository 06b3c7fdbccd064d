"""Decode steps with other launch parameters, timed: what `stretto tune` searches.

A step is a stage's own, at full width with fewer layers and random weights, its rows at a given
position with different inputs each, as a captured graph. Two ways to launch it run in turns, so
that neither has the quieter time. One thread, one stream."""

from __future__ import annotations

import statistics
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

    ahead: CompileAhead
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
            adapter=self.ahead.adapter,
            model=self.model,
            device=self.device,
            dtype="bfloat16" if self.device.startswith("cuda") else "float32",
            max_rows=self.rows,
            max_context=self.row_blocks * BLOCK,
            block_size=BLOCK,
            blocks=self.rows * self.row_blocks + 1,
            tasks=(Task(self.name, "decode", (self.rows,)),),
            formats=dict(self.ahead.formats(self.ahead.read(self.model))),
            layers=self.layers,
        )
        stage: StageModel = load(job.adapter)(job)
        return stage


class StepTrials:
    """One stage's step, to be run, checked and timed with any launch parameters: a
    `descent.TrialStep`."""

    def __init__(self, what: TunedStage, timer: Timer, replays: int = 30) -> None:
        self.what, self.timer, self.replays = what, timer, replays
        self.stage = what.build()
        cuda = what.device.startswith("cuda")
        self.stream = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with self.on_stream():
            self._seat()
        self._base: tuple[Table, Run] | None = None
        self._reference: list[torch.Tensor] | None = None

    def _seat(self) -> None:
        """Blocks and a position for each row."""
        rows, width, device = self.what.rows, self.what.row_blocks, self.what.device
        for row in range(rows):
            blocks = [BlockId(i) for i in range(row * width, (row + 1) * width)]
            self.stage.adapter.rows.join(row, blocks, 0.0, ())
        self.inputs = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self.inputs[0] = torch.arange(rows, device=device)
        self.inputs[1] = self.what.context - 1

    def on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def finish(self) -> None:
        """Wait for what was launched; errors show here."""
        if self.stream is not None:
            self.stream.synchronize()

    def scatter(self, i: int) -> None:
        torch.manual_seed(i % INPUTS)
        self.stage.scatter(self.what.rows)

    def run(self) -> None:
        rows, positions, values = self.inputs
        decode_step(self.stage.adapter, rows, positions, values, MODE)

    def questions(self, changes: Table) -> dict[str, tuning.TuningQuestion]:
        with tuning.instead(changes) as asked, self.on_stream():
            self.scatter(0)
            self.run()
            self.finish()
        return dict(asked)

    def ahead(self, tables: Sequence[Table]) -> list[str | None]:
        """Each is compiled when it is tried."""
        return [None] * len(tables)

    def outputs(self, changes: Table) -> list[torch.Tensor]:
        """The logits of all picks."""
        found: list[torch.Tensor] = []
        with tuning.instead(changes), self.on_stream(), listening(found):
            self.scatter(0)
            self.stage.adapter.rows.seen.zero_()  # picks are penalised for what was picked before
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
        graph = torch.cuda.CUDAGraph()
        with tuning.instead(changes), torch.cuda.stream(self.stream):
            self.run()
            with torch.cuda.graph(graph, stream=self.stream):
                self.run()
        return graph.replay

    def pair(self, base: Table, changes: Table) -> Pair:
        if self._base is None or self._base[0] != base:
            self._base = None  # its memory goes before new memory comes
            self._base = dict(base), self.captured(base)
        with failing():
            runs = self._base[1], self.captured(changes)
            marks: tuple[list[Any], list[Any]] = ([], [])
            with self.on_stream():
                for i in range(WARM + self.replays):
                    for side in (0, 1) if i % 2 == 0 else (1, 0):
                        self.scatter(i)
                        start = self.timer.mark()
                        runs[side]()
                        marks[side].append((start, self.timer.mark()))
                self.finish()
        mine, other = ([self.timer.between(*m) for m in side[WARM:]] for side in marks)
        gain = 1 - statistics.median(b / a for a, b in zip(mine, other, strict=True))
        return Pair(statistics.median(mine), statistics.median(other), gain)


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
