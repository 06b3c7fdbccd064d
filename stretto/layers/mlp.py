"""The two kinds of feed-forward block: dense SwiGLU, and mixture of experts with an optional shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from stretto.kernels import moe
from stretto.layers.linear import FusedLinear, Linear
from stretto.layers.targets import frozen


class DenseMLP(nn.Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_up = FusedLinear(hidden, {"gate_proj": size, "up_proj": size})
        self.down_proj = Linear(size, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(moe.swiglu(self.gate_up(x)))
        return out


class Experts(nn.Module):
    """All experts of a layer; per-expert tensors in the checkpoint, two fused ones in memory."""

    def __init__(self, num_experts: int, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_up = frozen(num_experts, 2 * size, hidden)
        self.down = frozen(num_experts, hidden, size)

    def fused(self, prefix: str) -> dict[str, torch.Tensor]:
        found = {}
        for e, (gate_up, down) in enumerate(zip(self.gate_up.data.unbind(), self.down.data.unbind(), strict=True)):
            gate, up = gate_up.chunk(2)
            name = f"{prefix}experts.{e}"
            found[f"{name}.gate_proj.weight"] = gate
            found[f"{name}.up_proj.weight"] = up
            found[f"{name}.down_proj.weight"] = down
        return found


class MoeMLP(nn.Module):
    def __init__(self, hidden: int, num_experts: int, top_k: int, size: int, norm: bool, shared: int | None) -> None:
        super().__init__()
        self.top_k, self.norm = top_k, norm
        self.gate = Linear(hidden, num_experts)
        self.experts = Experts(num_experts, hidden, size)
        self.shared_expert = DenseMLP(hidden, shared) if shared is not None else None
        self.shared_expert_gate = Linear(hidden, 1) if shared is not None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = moe.route(self.gate(x), self.top_k, self.norm)
        out = moe.experts(x, self.experts.gate_up, self.experts.down, weights, ids)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return out


class ResizeMLP(nn.Module):
    """Two linear maps with bias and a SiLU between: from the thinker's width to the talker's."""

    def __init__(self, inputs: int, size: int, outputs: int) -> None:
        super().__init__()
        self.linear_fc1 = Linear(inputs, size, bias=True)
        self.linear_fc2 = Linear(size, outputs, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear_fc2(F.silu(self.linear_fc1(x)))
        return out
