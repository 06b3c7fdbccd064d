"""A launched batch on its way back.

Three things come out of a step, each at its own time: the next token (already on the device,
ordered by the stream; the next launch needs nothing else), the host's copy of the tokens (`host`),
and rows for the next stage (`side_rows`, with an event of their own). A step keeps alive whatever
its kernels and copies still read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stretto.errors import StrettoError
from stretto.stage.runner.adapter import SideRows
from stretto.stage.runner.logprobs import StepLogprobs
from stretto.stage.scheduler.batch import Batch


@dataclass(slots=True, eq=False)
class Step:
    batch: Batch
    # spans that sampled, in the order of the rows of `tokens`
    sampling: list[int]
    # [sampling spans, columns] on the device
    tokens: torch.Tensor
    # the same in pinned memory, valid once `copied` has fired
    host: torch.Tensor
    # None on a CPU: all is done at launch
    copied: torch.cuda.Event | None
    side_rows: SideRows
    # these rows are complete
    side_rows_at: torch.cuda.Event | None
    # on the host once `copied` has fired
    logprobs: StepLogprobs | None = None
    # the launch failed; nothing ran
    error: StrettoError | None = None

    @property
    def kind(self) -> str:
        return self.batch.kind
