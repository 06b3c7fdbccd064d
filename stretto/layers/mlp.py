"""The two kinds of feed-forward block: dense SwiGLU, and mixture of experts with an optional shared
expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from stretto.kernels.formats import FLOAT8_ROWS, WeightFormat
from stretto.kernels.reference import moe
from stretto.kernels.reference.packed import PackedWeight
from stretto.kernels.reference.quantized import FLOAT8, quantize
from stretto.layers.config import MoeConfig
from stretto.layers.linear import FusedLinear, Linear, PackedMatrix
from stretto.layers.targets import Float8Rows, Target, frozen


class DenseMLP(nn.Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_up = FusedLinear(hidden, {"gate_proj": size, "up_proj": size})
        self.down_proj = Linear(size, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(moe.swiglu(self.gate_up(x)))
        return out


class Experts(nn.Module):
    """All experts of a layer; per-expert tensors in the checkpoint, two fused ones in memory.

    Either both are of the model's dtype and there are no scales, or both are float8 with a scale
    per output row (`stretto.kernels.reference.quantized`): from the start with `float8`, or from
    `quantize()` on."""

    # [experts, 2 * size] float32
    gate_up_scale: torch.Tensor | None
    # [experts, hidden] float32
    down_scale: torch.Tensor | None

    def __init__(self, num_experts: int, hidden: int, size: int, float8: bool = False) -> None:
        super().__init__()
        dtype = FLOAT8 if float8 else None
        self.gate_up = frozen(num_experts, 2 * size, hidden, dtype=dtype)
        self.down = frozen(num_experts, hidden, size, dtype=dtype)
        rows = (num_experts, 2 * size), (num_experts, hidden)
        scales = [torch.empty(n, dtype=torch.float32) if float8 else None for n in rows]
        self.register_buffer("gate_up_scale", scales[0])
        self.register_buffer("down_scale", scales[1])

    @property
    def scales(self) -> moe.Scales | None:
        if self.gate_up_scale is None or self.down_scale is None:
            return None
        return self.gate_up_scale, self.down_scale

    @torch.no_grad()
    def quantize(self) -> None:
        """To float8, in place; the wide weights are given back, one tensor after the other."""
        assert self.scales is None, "quantised already"
        self.gate_up, self.gate_up_scale = _quantized(self.gate_up)
        self.down, self.down_scale = _quantized(self.down)

    def rows(self) -> tuple[Target, Target]:
        """Both weights as matrices, one expert's rows after another's."""
        gate_up, down = self.gate_up.data.flatten(0, 1), self.down.data.flatten(0, 1)
        if self.scales is None:
            return gate_up, down
        s, t = self.scales
        return Float8Rows(gate_up, s.flatten()), Float8Rows(down, t.flatten())

    def own_targets(self, prefix: str) -> dict[str, Target]:
        return _expert_targets(prefix, *self.rows(), len(self.down))


class PackedExperts(nn.Module):
    """The same with packed weights. A shared expert beside them stays wide."""

    def __init__(self, num_experts: int, hidden: int, size: int, form: WeightFormat) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.packed_gate_up = PackedMatrix(form, num_experts, 2 * size, hidden)
        self.packed_down = PackedMatrix(form, num_experts, hidden, size)

    @property
    def gate_up(self) -> PackedWeight:
        return self.packed_gate_up.weight

    @property
    def down(self) -> PackedWeight:
        return self.packed_down.weight

    @property
    def scales(self) -> None:
        """A packed weight has its own."""

    def rows(self) -> tuple[PackedWeight, PackedWeight]:
        """Both weights as matrices, one expert's rows after another's."""
        return self.gate_up.flat(), self.down.flat()

    def own_targets(self, prefix: str) -> dict[str, Target]:
        return _expert_targets(prefix, *self.rows(), self.num_experts)


def _expert_targets(
    prefix: str, gate_up: Target, down: Target, num_experts: int
) -> dict[str, Target]:
    """Each expert's parts of all experts' rows; gate, up, gate, up, ..."""
    found: dict[str, Target] = {}
    halves = gate_up.split(gate_up.shape[0] // num_experts // 2)
    for e, rows in enumerate(down.split(down.shape[0] // num_experts)):
        name = f"{prefix}experts.{e}"
        found[f"{name}.gate_proj.weight"] = halves[2 * e]
        found[f"{name}.up_proj.weight"] = halves[2 * e + 1]
        found[f"{name}.down_proj.weight"] = rows
    return found


def _quantized(wide: torch.Tensor) -> tuple[nn.Parameter, torch.Tensor]:
    weight = torch.empty_like(wide, dtype=FLOAT8)
    scale = wide.new_empty(wide.shape[:-1], dtype=torch.float32)
    quantize(wide, weight, scale)
    return nn.Parameter(weight, requires_grad=False), scale


class MoeMLP(nn.Module):
    def __init__(self, hidden: int, m: MoeConfig) -> None:
        super().__init__()
        self.top_k = m.top_k
        self.norm = m.norm_topk
        self.gate = Linear(hidden, m.num_experts)
        sizes = m.num_experts, hidden, m.expert_size
        self.experts: Experts | PackedExperts
        if m.format is None or m.format == FLOAT8_ROWS:
            self.experts = Experts(*sizes, m.float8)
        else:
            self.experts = PackedExperts(*sizes, m.format)
        self.shared_expert = DenseMLP(hidden, m.shared_size) if m.shared_size is not None else None
        self.shared_expert_gate = Linear(hidden, 1) if m.shared_size is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = moe.route(self.gate(x), self.top_k, self.norm)
        out = moe.experts(
            x, self.experts.gate_up, self.experts.down, weights, ids, self.experts.scales
        )
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out


class ResizeMLP(nn.Module):
    """Two linear maps with bias and a SiLU between: from one model's width to another's."""

    def __init__(self, inputs: int, size: int, outputs: int) -> None:
        super().__init__()
        self.linear_fc1 = Linear(inputs, size, bias=True)
        self.linear_fc2 = Linear(size, outputs, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear_fc2(F.silu(self.linear_fc1(x)))
        return out
