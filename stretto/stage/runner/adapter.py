"""What the runner needs of a model: one adapter per autoregressive stage.

The runner knows rows, steps and graphs; an adapter knows what an input row is, how to run the
model, and how to pick. What it needs of a request beside the ids is `StageRequest.input`, which the
stage gives to `StageCore.submit`. `device_input`, `forward` without extras, and `pick` make up a
decode step: fixed shapes, device data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from stretto.kernels.reference.paged import KVCache, Paging
from stretto.kernels.triton import MAX_ROWS
from stretto.stage.request import StageRequest
from stretto.stage.runner.columns import SamplingMode
from stretto.stage.runner.rows import DeviceRows
from stretto.stage.scheduler.batch import RowJoin
from stretto.types import SamplingParams

E = TypeVar("E")


@dataclass(frozen=True, slots=True, eq=False)
class HostInput(Generic[E]):
    """Input rows that come from the host's side: a run of a prompt, or rows to be computed
    again."""

    # [rows, hidden]
    x: torch.Tensor
    # [3, rows] float32
    positions: torch.Tensor
    extra: E | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Picked:
    """What the sampling rows of a step gave. `tokens` < 0 marks a row whose numbers went bad."""

    # [rows, columns] int64; column 0 is what the scheduler calls the token
    tokens: torch.Tensor
    # [rows, hidden] that they were picked from, of an adapter with a `DeviceRows.head`
    hidden: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class SideRows:
    """Rows that a step hands out beside its tokens, by span index: places in the sequence, and
    their values."""

    places: dict[int, list[int]] = field(default_factory=dict)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)


class ModelAdapter(Protocol[E]):
    rows: DeviceRows
    cache: KVCache
    # of `Picked.tokens`
    columns: int
    # there is a `fused_step`, which serves rows of any sampling parameters
    fused: bool

    def sampling(self, request: StageRequest) -> tuple[SamplingParams, ...]: ...

    def join(self, join: RowJoin) -> None:
        """A request takes a row: write what the row must hold before its first step."""
        ...

    def confirm(self, request: StageRequest, row: Sequence[int]) -> None:
        """A pick became certain: keep what is needed to compute its row again."""
        ...

    def decode_value(self, request: StageRequest, position: int) -> int:
        """The one host value that the decode step at `position` takes beside its device row."""
        ...

    def device_input(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Input rows and rotary positions of rows whose last pick is on the device."""
        ...

    def host_input(
        self, request: StageRequest, start: int, stop: int, publish_from: int
    ) -> HostInput[E]:
        """Input rows [start, stop) of a request from what the host knows; output is wanted from
        `publish_from` on."""
        ...

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        paging: Paging,
        extras: list[tuple[int, int, E]],
    ) -> tuple[torch.Tensor, SideRows]:
        """Run the model. `extras`: (span index, first row of the pass, extra)."""
        ...

    def pick(
        self, rows: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, mode: SamplingMode
    ) -> Picked:
        """Pick for rows at `positions` (their last computed ones) and leave the pick in their
        device rows."""
        ...

    def fused_step(
        self, rows: torch.Tensor, positions: torch.Tensor, values: torch.Tensor
    ) -> Picked:
        """All of a decode step (`device_input`, `forward`, `pick`) as fused kernels."""
        ...


def decode_step(
    adapter: ModelAdapter[Any],
    rows: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    mode: SamplingMode,
    width: int | None = None,
) -> Picked:
    """One decode step for rows whose inputs are on the device. It can be captured."""
    if adapter.fused and rows.shape[0] <= MAX_ROWS:
        return adapter.fused_step(rows, positions, values)
    x, rope = adapter.device_input(rows, positions, values)
    hidden, _ = adapter.forward(x, rope, adapter.rows.decode_paging(rows, positions, width), [])
    return adapter.pick(rows, positions, hidden, mode)
