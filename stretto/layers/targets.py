"""Where a checkpoint's tensors go.

A module's parameters carry the checkpoint's names, except where several checkpoint tensors are
fused into one parameter (q/k/v, gate/up, experts). Such a module defines `own_targets(prefix)`,
which maps checkpoint names to views of its parameters. The loader only ever sees the flat map that
`targets` makes: checkpoint name -> view to fill. A view is a tensor that takes the numbers as they
are, rows of float8 that quantise them as they land, or a packed matrix, which takes the numbers of
a checkpoint that has it packed in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from stretto.kernels.reference.packed import PackedWeight
from stretto.kernels.reference.quantized import quantize


@dataclass(frozen=True, slots=True, eq=False)
class Float8Rows:
    """A float8 matrix and its rows' scales. A scale needs its whole row at once, so that is the
    least to fill."""

    # [rows, inputs] float8
    weight: torch.Tensor
    # [rows] float32
    scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def numel(self) -> int:
        return self.weight.numel()

    def split(self, rows: int) -> tuple[Float8Rows, ...]:
        parts = zip(torch.split(self.weight, rows), torch.split(self.scale, rows), strict=True)
        return tuple(Float8Rows(w, s) for w, s in parts)

    def fill(self, values: torch.Tensor) -> None:
        quantize(values, self.weight, self.scale)


Target = torch.Tensor | Float8Rows | PackedWeight


@runtime_checkable
class OwnTargets(Protocol):
    def own_targets(self, prefix: str) -> Mapping[str, Target]:
        """Checkpoint name -> view of a parameter of this module. `prefix` is the *parent's*
        ("...self_attn.")."""
        ...


def targets(module: nn.Module, prefix: str) -> dict[str, Target]:
    """Checkpoint tensor name -> destination view, for all parameters of `module`."""
    found: dict[str, Target] = {}
    for name, p in module.named_parameters(recurse=False):
        found[f"{prefix}{name}"] = p.data
    for name, child in module.named_children():
        part = (
            child.own_targets(prefix)
            if isinstance(child, OwnTargets)
            else targets(child, f"{prefix}{name}.")
        )
        found.update(part)
    return found


def frozen(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An uninitialised parameter of the current default device, and dtype unless another is
    given."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
