"""The search of `stretto tune`: launch parameters of one kernel after the other, in the steps of
all stages. Called by the command, on its main thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.kernels.triton import tuning
from stretto.kernels.triton.candidates import candidates
from stretto.kernels.triton.descent import Descent, Table
from stretto.models.compile_ahead import CompileAhead
from stretto.models.tune_steps import EventTimer, StageTrials, Timer, TunedStage


@dataclass(slots=True, eq=False)
class TuneSearch:
    """Steps of all stages and numbers of rows, one after the other."""

    compile_ahead: CompileAhead
    model: str
    steps: Sequence[tuple[str, int]]  # stage, rows
    context: int
    layers: int
    limit: float
    device: str
    kernels: tuple[str, ...]
    out: Path | None  # instead of the cache folder's
    timer: Timer | None  # instead of the device's
    show: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    replays: int = 30

    def run(self) -> Table:
        begin = self.clock()
        found: Table = {}
        for i, (stage, rows) in enumerate(self.steps):
            left = self.limit - (self.clock() - begin)
            until = self.clock() + left / (len(self.steps) - i)
            found |= self.step(stage, rows, until)
        faster = f"{len(found)} kernels are faster now" if found else "nothing was found faster"
        self.show(f"{faster}; {self.file} has {'them' if found else 'what it had'}")
        return found

    @property
    def file(self) -> Path:
        return self.out or tuning.own_file()

    def step(self, stage: str, rows: int, until: float) -> Table:
        """What is faster for one step, saved."""
        what = TunedStage(
            self.compile_ahead, self.model, stage, self.device, rows, self.context, self.layers
        )
        name = f"{stage}, {rows} row{'s' * (rows > 1)}"
        self.show(f"{name}: building")
        with torch.inference_mode():
            trials = StageTrials(what, self.timer or EventTimer(), self.replays)
            descent = Descent(
                trials,
                candidates,
                selects=lambda kernel: kernel.startswith(self.kernels),
                late=lambda: self.clock() > until,
            )
            descent.round(lambda kernel, tried: self.report(name, kernel, tried))
        if descent.changes:
            tuning.save(self.file, descent.changes)
        return descent.changes

    def report(self, step: str, kernel: str, tried: Sequence[Mapping[str, Any]]) -> None:
        adopted = [row for row in tried if row.get("adopted")]
        for row in adopted:
            self.show(f"{step}: {kernel} {row['gain']:+.1%} of the step with {row['config']}")
