"""Captured decode steps, one per batch size and sampling mode.

A graph runs the same functions as the eager path, over static inputs (row, position, one host value
per row). A batch is padded up to the next captured size with the sink row, which belongs to nobody.
Captured once at start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stretto.config.engine import MAX_GRAPH_ROWS
from stretto.layers.capture import Captured, capture_graphs
from stretto.stage.runner.adapter import ModelAdapter, Picked, decode_step
from stretto.stage.runner.columns import SamplingMode

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, MAX_GRAPH_ROWS)
STAGED = 8


def sizes_for(max_rows: int) -> list[int]:
    """Rows of the steps that are captured for batches of up to `max_rows`: the largest batch has
    one, too."""
    return sorted({min(size, max_rows) for size in SIZES})


class DecodeGraphs:
    def __init__(
        self,
        adapter: ModelAdapter[Any],
        sizes: Sequence[int] = SIZES,
        modes: Sequence[SamplingMode] | None = None,
    ) -> None:
        self.adapter = adapter
        limit = adapter.rows.num_rows
        self.sizes = sorted({min(s, limit) for s in sizes})
        # One mode for greedy batches without a penalty, one that serves all others. Fused steps
        # have one for all.
        self.modes = list(modes) if modes is not None else [SamplingMode(True, True)]
        if modes is None and not adapter.fused:
            self.modes.insert(0, SamplingMode(False, False))
        self.graphs: dict[tuple[int, SamplingMode], Captured[tuple[torch.Tensor, Picked]]] = {}
        # Inputs on their way to the device. A slot comes up again only after STAGED more steps,
        # when the step that read it has long been retired (there are never that many in flight).
        self._staged: dict[int, list[torch.Tensor]] = {}
        self._next_buffer = 0

    def capture(self, stream: torch.cuda.Stream) -> None:
        todo = [(size, mode) for mode in self.modes for size in reversed(self.sizes)]
        self.graphs = capture_graphs(
            todo, self._prepare, stream, warmups=1 if self.adapter.fused else 2
        )
        for size in self.sizes:
            self._staged[size] = [
                torch.zeros(3, size, dtype=torch.int64, pin_memory=True) for _ in range(STAGED)
            ]

    def _prepare(self, key: tuple[int, SamplingMode]) -> Callable[[], tuple[torch.Tensor, Picked]]:
        """A step that is all padding: -> its inputs, what it picked."""
        size, mode = key
        inputs = self.inputs(size)
        return lambda: (inputs, decode_step(self.adapter, inputs[0], inputs[1], inputs[2], mode))

    def inputs(self, size: int) -> torch.Tensor:
        """Row, position and value [3, size] of a batch that is all padding."""
        inputs = torch.zeros(3, size, dtype=torch.int64, device=self.adapter.rows.device)
        inputs[0] = self.adapter.rows.sink
        return inputs

    def run(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()

    def replay(self, host: np.ndarray, mode: SamplingMode) -> Picked | None:
        """Run a batch (row, position, value) [3, rows]; None if no graph fits. The tokens are the
        caller's to keep; the hidden rows stand until the next replay."""
        rows = host.shape[1]
        size = next((s for s in self.sizes if s >= rows), None)
        captured = next(
            (m for m in self.modes if m.sampled >= mode.sampled and m.penalty >= mode.penalty), None
        )
        found = None
        if size is not None and captured is not None:
            found = self.graphs.get((size, captured))
        if found is None or size is None:
            return None
        graph, (inputs, picked) = found
        staged = self._staged[size][self._next_buffer % STAGED]
        self._next_buffer += 1
        view = staged.numpy()
        view[:, :rows], view[1:, rows:], view[0, rows:] = host, 0, self.adapter.rows.sink
        inputs.copy_(staged, non_blocking=True)
        self.run(graph)
        # The graph's output is overwritten by its next replay, and the copy to the host may still
        # be on its way then.
        hidden = picked.hidden[:rows] if picked.hidden is not None else None
        return Picked(picked.tokens[:rows].to(torch.int32, copy=True), hidden)
