"""The layers of a decoder for few rows on a CPU, by numpy.

A step of a small model is some hundred operations on a few kilobytes each, and torch takes longer to begin one than to
compute it; numpy begins them in a fraction of that. Matrix products stay with torch: its threads are the ones that the
settings limit. What is computed is what the modules of `decoder.py` and `mlp.py` compute, in float32; a sum may be
rounded in another order. Called by `Decoder.forward` on the thread that runs a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from stretto.layers.mlp import DenseMLP, MoeMLP

if TYPE_CHECKING:
    from stretto.layers.decoder import AfterLayer, Decoder, DecoderLayer

MAX_ROWS = 8
Array = npt.NDArray[np.float32]


class HostAttention(Protocol):
    def on_host(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Remember k and v [rows, kv heads, dim], attend with q [rows, heads, dim]; returns q's shape."""
        ...


def product(x: Array, weight: torch.Tensor) -> Array:
    y: Array = F.linear(torch.from_numpy(x), weight).numpy()
    return y


def norm(x: Array, weight: Array, eps: float) -> Array:
    spread = np.einsum("...i,...i->...", x, x)
    spread *= 1.0 / x.shape[-1]
    spread += eps
    np.sqrt(spread, out=spread)
    y: Array = x / spread[..., None]
    y *= weight
    return y


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """x [rows, heads, dim], cos and sin [rows, 1, dim]"""
    half = x.shape[-1] // 2
    y: Array = x * cos
    y[..., :half] -= x[..., half:] * sin[..., :half]
    y[..., half:] += x[..., :half] * sin[..., half:]
    return y


def softmax(x: Array) -> Array:
    y: Array = np.exp(x - x.max(-1, keepdims=True))
    y /= y.sum(-1, keepdims=True)
    return y


def swiglu(gate_up: Array) -> Array:
    size = gate_up.shape[-1] // 2
    gate = gate_up[:, :size]
    y: Array = np.exp(-gate)
    y += 1.0
    np.divide(gate, y, out=y)
    y *= gate_up[:, size:]
    return y


def attend(q: Array, keys: Array, values: Array) -> Array:
    """One query per row: q [rows, heads, dim] over keys and values [rows, kv heads, positions, dim]."""
    rows, heads, dim = q.shape
    grouped = q.reshape(rows, keys.shape[1], -1, dim)  # the heads of a group share keys
    chances = softmax(np.matmul(grouped, keys.swapaxes(-1, -2)) * np.float32(dim**-0.5))
    y: Array = np.matmul(chances, values).reshape(rows, heads, dim)
    return y


def dense(mlp: DenseMLP) -> Callable[[Array], Array]:
    up, down = mlp.gate_up.weight, mlp.down_proj.weight
    return lambda x: product(swiglu(product(x, up)), down)


def mixture(mlp: MoeMLP) -> Callable[[Array], Array]:
    gate, up, down = mlp.gate.weight, list(mlp.experts.gate_up), list(mlp.experts.down)
    shared = None if mlp.shared_expert is None else dense(mlp.shared_expert)
    shared_gate = None if mlp.shared_expert_gate is None else mlp.shared_expert_gate.weight

    def run(x: Array) -> Array:
        chances = softmax(product(x, gate))
        best = np.argsort(-chances, axis=-1, kind="stable")[:, : mlp.top_k]
        weights = np.take_along_axis(chances, best, -1)
        if mlp.norm:
            weights /= weights.sum(-1, keepdims=True)
        y = np.zeros_like(x)
        for i, chosen in enumerate(best.tolist()):
            own = x[i : i + 1]
            for e, weight in zip(chosen, weights[i], strict=True):
                y[i] += weight * product(swiglu(product(own, up[e])), down[e])[0]
        if shared is not None and shared_gate is not None:
            y += shared(x) / (1.0 + np.exp(-product(x, shared_gate)))
        return y

    return run


@dataclass(frozen=True, slots=True, eq=False)
class HostLayer:
    before: Array
    qkv: torch.Tensor
    gains: Array  # of queries and keys, [heads + kv heads, dim]
    out: torch.Tensor
    behind: Array
    mlp: Callable[[Array], Array]
    eps: float

    @classmethod
    def of(cls, layer: DecoderLayer) -> HostLayer:
        a, m = layer.self_attn, layer.mlp
        assert a.gains is not None
        assert isinstance(m, DenseMLP | MoeMLP)
        before, behind = layer.input_layernorm.weight.numpy(), layer.post_attention_layernorm.weight.numpy()
        mlp = dense(m) if isinstance(m, DenseMLP) else mixture(m)
        eps = layer.input_layernorm.eps
        return cls(before, a.qkv.weight, a.gains.numpy(), a.o_proj.weight, behind, mlp, eps)


class HostLayers:
    def __init__(self, decoder: Decoder) -> None:
        c = decoder.config
        self.heads, self.kv_heads, self.dim, self.eps = c.num_heads, c.num_kv_heads, c.head_dim, c.rms_eps
        self.rope = decoder.rope
        self.layers = [HostLayer.of(layer) for layer in decoder.layers]  # type: ignore[arg-type]
        self.norm: Array = decoder.norm.weight.numpy()

    @staticmethod
    def fits(decoder: Decoder) -> bool:
        """Float32 on a CPU; experts whose weights are wide."""
        weight, moe = decoder.norm.weight, decoder.config.moe
        return weight.device.type == "cpu" and weight.dtype == torch.float32 and not (moe is not None and moe.float8)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, attention: HostAttention, after: AfterLayer | None
    ) -> torch.Tensor:
        cos, sin = (a.numpy()[:, None] for a in self.rope(positions, x.dtype))
        h: Array = x.numpy()
        turned = self.heads + self.kv_heads
        with np.errstate(over="ignore"):  # exp(-x) of a large negative x is infinite, and x over it is 0
            for i, layer in enumerate(self.layers):
                every = product(norm(h, layer.before, layer.eps), layer.qkv).reshape(len(h), -1, self.dim)
                qk = rotate(norm(every[:, :turned], layer.gains, layer.eps), cos, sin)
                y = attention.on_host(i, qk[:, : self.heads], qk[:, self.heads :], every[:, turned:])
                h = h + product(y.reshape(len(h), -1), layer.out)
                h = h + layer.mlp(norm(h, layer.behind, layer.eps))
                if after is not None:
                    h = after(i, torch.from_numpy(h)).numpy()
            return torch.from_numpy(norm(h, self.norm, self.eps))
