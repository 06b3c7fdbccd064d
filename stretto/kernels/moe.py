"""Mixture of experts: routing, and the experts' SwiGLU over fused weights.

Weights are fused per layer: `gate_up [experts, 2 * size, hidden]` (gate rows first) and
`down [experts, hidden, size]`. Few rows read the weights of just their experts; many rows are sorted by expert and
go through one matrix product per expert (one grouped product on a GPU)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def route(logits: torch.Tensor, top_k: int, norm: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [rows, experts] -> weights and expert ids, both [rows, top_k]."""
    weights, ids = torch.softmax(logits.float(), -1).topk(top_k, -1)
    if norm:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


def experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """x [rows, hidden] through each row's experts, weighted and summed (in float32)."""
    rows, top_k = ids.shape
    few = max(16, gate_up.shape[0]) // top_k  # rows whose experts' weights are read about once at most
    if rows <= few:
        y = _few(x, gate_up, down, ids)
    elif not x.is_cuda:
        y = _sorted(x, gate_up, down, ids)
    elif x.dtype == torch.bfloat16:
        y = _grouped(x, gate_up, down, ids)
    else:  # other types are for exactness, not for speed: whatever needs no answer from the device
        y = torch.cat(
            [_few(a, gate_up, down, b) for a, b in zip(torch.split(x, few), torch.split(ids, few), strict=True)]
        )
    return (y * weights[..., None]).sum(1, dtype=torch.float32).to(x.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _few(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gather the experts' weights: static shapes, no host synchronisation."""
    rows, top_k = ids.shape
    flat = ids.reshape(-1)
    wide = x[:, None].expand(-1, top_k, -1).reshape(rows * top_k, 1, -1)
    h = swiglu(torch.bmm(wide, gate_up[flat].transpose(1, 2)))
    return torch.bmm(h, down[flat].transpose(1, 2)).view(rows, top_k, -1)


def _sorted(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows, top_k = ids.shape
    order = ids.reshape(-1).argsort(stable=True)
    counts = torch.bincount(ids.reshape(-1), minlength=gate_up.shape[0]).tolist()
    out = x.new_empty(rows * top_k, x.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            mine = order[start : start + count]
            out[mine] = swiglu(x[mine // top_k] @ gate_up[expert].T) @ down[expert].T
            start += count
    return out.view(rows, top_k, -1)


def _grouped(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows, top_k = ids.shape
    order = ids.reshape(-1).argsort(stable=True)
    ends = torch.searchsorted(ids.reshape(-1)[order], torch.arange(gate_up.shape[0], device=x.device), right=True).to(
        torch.int32
    )
    h = swiglu(torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), ends))
    y = torch._grouped_mm(h, down.transpose(1, 2), ends)
    return torch.empty_like(y).index_copy_(0, order, y).view(rows, top_k, -1)
