"""Mixture of experts: routing, and the experts' SwiGLU over fused weights.

Weights are fused per layer: `gate_up [experts, 2 * size, hidden]` (gate rows first) and `down
[experts, hidden, size]`. Few rows read the weights of just their experts; many rows are sorted by
expert and go through one matrix product per expert (one grouped product on a GPU).

Weights may be float8 with a scale per output row (`stretto.kernels.reference.quantized`). A weight
is then widened to x's type, which is exact, as it is used, and the scale is applied to the product:
to gate and up before the SiLU, to down before the rows are weighted. Packed weights
(`stretto.kernels.reference.packed`) bring their scales, and are widened as they are used."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stretto.kernels.reference.packed import Weight, widen
from stretto.kernels.reference.quantized import scaled

Scales = tuple[torch.Tensor, torch.Tensor]
"""float32, of gate_up [experts, 2 * size] and of down [experts, hidden]."""


def route(logits: torch.Tensor, top_k: int, norm: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [rows, experts] -> weights and expert ids, both [rows, top_k]."""
    weights, ids = torch.softmax(logits.float(), -1).topk(top_k, -1)
    if norm:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), ids


def experts(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    weights: torch.Tensor,
    ids: torch.Tensor,
    scales: Scales | None = None,
) -> torch.Tensor:
    """x [rows, hidden] through each row's experts, weighted and summed (in float32). `scales`: of
    float8 weights."""
    rows, top_k = ids.shape
    few = (
        max(16, gate_up.shape[0]) // top_k
    )  # rows whose experts' weights are read about once at most
    wide = isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor) and scales is None
    if rows <= few and not x.is_cuda and wide:
        y = _each(x, gate_up, down, ids)
    elif rows <= few:
        y = _few(x, gate_up, down, ids, scales)
    elif not x.is_cuda:
        y = _sorted(x, gate_up, down, ids, scales)
    elif x.dtype == torch.bfloat16:
        y = _grouped(x, gate_up, down, ids, scales)
    else:  # other types are for exactness, not for speed: whatever needs no answer from the device
        y = torch.cat(
            [
                _few(a, gate_up, down, b, scales)
                for a, b in zip(torch.split(x, few), torch.split(ids, few), strict=True)
            ]
        )
    return (y * weights[..., None]).sum(1, dtype=torch.float32).to(x.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _each(x: torch.Tensor, gate_up: Weight, down: Weight, ids: torch.Tensor) -> torch.Tensor:
    """One product after the other, on a CPU: reads wide weights where they are, and its host is its
    device."""
    assert isinstance(gate_up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    chosen = ids.tolist()
    rows = [
        F.linear(swiglu(F.linear(x[i : i + 1], gate_up[e])), down[e])
        for i, own in enumerate(chosen)
        for e in own
    ]
    return torch.cat(rows).view(*ids.shape, -1)


def _few(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    ids: torch.Tensor,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Gather the experts' weights: static shapes, no host synchronisation."""
    rows, top_k = ids.shape
    flat = ids.reshape(-1)
    s, t = (None, None) if scales is None else (scale[flat][:, None] for scale in scales)
    wide = x[:, None].expand(-1, top_k, -1).reshape(rows * top_k, 1, -1)
    h = swiglu(scaled(torch.bmm(wide, widen(gate_up[flat], x.dtype).transpose(1, 2)), s))
    return scaled(torch.bmm(h, widen(down[flat], x.dtype).transpose(1, 2)), t).view(rows, top_k, -1)


def _sorted(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    ids: torch.Tensor,
    scales: Scales | None = None,
) -> torch.Tensor:
    """One expert after the other; needs to know on the host how many rows each has."""
    rows, top_k = ids.shape
    order = ids.reshape(-1).argsort(stable=True)
    counts = torch.bincount(ids.reshape(-1), minlength=gate_up.shape[0]).tolist()
    out = x.new_empty(rows * top_k, x.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            mine = order[start : start + count]
            s, t = (None, None) if scales is None else (scale[expert] for scale in scales)
            h = swiglu(scaled(x[mine // top_k] @ widen(gate_up[expert], x.dtype).T, s))
            out[mine] = scaled(h @ widen(down[expert], x.dtype).T, t)
            start += count
    return out.view(rows, top_k, -1)


def _grouped(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    ids: torch.Tensor,
    scales: Scales | None = None,
) -> torch.Tensor:
    """All experts in one product. Which of them have rows is not known on the host, so narrow
    weights are widened all, one of the two tensors at a time; where that matters, the kernels of
    `stretto.kernels.triton` do not."""
    rows, top_k = ids.shape
    chosen, order = ids.reshape(-1).sort(stable=True)
    s, t = (None, None) if scales is None else (scale[chosen] for scale in scales)
    ends = torch.searchsorted(
        chosen, torch.arange(gate_up.shape[0], device=x.device), right=True
    ).to(torch.int32)
    h = swiglu(
        scaled(
            torch._grouped_mm(x[order // top_k], widen(gate_up, x.dtype).transpose(1, 2), ends), s
        )
    )
    y = scaled(torch._grouped_mm(h, widen(down, x.dtype).transpose(1, 2), ends), t)
    return torch.empty_like(y).index_copy_(0, order, y).view(rows, top_k, -1)


def _products(x: torch.Tensor, weight: Weight, ends: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch._grouped_mm(x, widen(weight, x.dtype).transpose(1, 2), ends)
    return out
