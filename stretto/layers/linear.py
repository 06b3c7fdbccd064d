"""Linear maps whose weights come as several tensors in the checkpoint and are one matrix in
memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

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


class Embedding(nn.Module):
    def __init__(self, entries: int, size: int) -> None:
        super().__init__()
        self.weight = frozen(entries, size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)
