"""Linear maps whose weights come as several tensors in the checkpoint and are one matrix in
memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from stretto.kernels.formats import WeightFormat
from stretto.kernels.reference import packed
from stretto.kernels.reference.packed import PackedWeight
from stretto.layers.targets import frozen


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = frozen(outputs, inputs)
        self.bias = frozen(outputs) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class FusedLinear(nn.Module):
    """Several linear maps of one input as one product; the outputs lie side by side."""

    def __init__(self, inputs: int, parts: dict[str, int]) -> None:
        super().__init__()
        self.parts = parts
        self.weight = frozen(sum(parts.values()), inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def own_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        views = torch.split(self.weight.data, list(self.parts.values()))
        return {
            f"{prefix}{name}.weight": view for name, view in zip(self.parts, views, strict=True)
        }


class PackedMatrix(nn.Module):
    """A packed weight [..., outputs, inputs] as a part of a module, among whose tensors its own
    are."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    def __init__(self, form: WeightFormat, *shape: int) -> None:
        super().__init__()
        self.format = form
        made = packed.empty(form, *shape)
        self.register_buffer("codes", made.codes)
        self.register_buffer("scale", made.scale)
        self.register_buffer("zero", made.zero)

    @property
    def weight(self) -> PackedWeight:
        return PackedWeight(self.format, self.codes, self.scale, self.zero)


class PackedLinear(PackedMatrix):
    """The same as `FusedLinear`, for one map or several, with packed weights."""

    def __init__(self, inputs: int, parts: dict[str, int], form: WeightFormat) -> None:
        super().__init__(form, sum(parts.values()), inputs)
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return packed.linear(x, self.weight)

    def own_targets(self, prefix: str) -> dict[str, PackedWeight]:
        views = self.weight.split(list(self.parts.values()))
        return {
            f"{prefix}{name}.weight": view for name, view in zip(self.parts, views, strict=True)
        }


class Embedding(nn.Module):
    def __init__(self, entries: int, size: int) -> None:
        super().__init__()
        self.weight = frozen(entries, size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)
