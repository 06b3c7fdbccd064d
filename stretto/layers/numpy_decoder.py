"""The layers of a decoder for few rows on a CPU, by numpy.

A step of a small model is some hundred operations on a few kilobytes each, and torch takes longer
to begin one than to compute it; numpy begins them in a fraction of that. Products with large
matrices stay with torch, whose threads the settings limit; those of numpy have one
(`stretto/_process.py`). What is computed is what the modules of `decoder_layer.py` and `mlp.py`
compute, in float32; a sum may be rounded in another order. Called by `Decoder.forward` on the
thread that runs a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from stretto.kernels.reference.packed import Weight
from stretto.layers.decoder_layer import AfterLayer, Angles, Array, DecoderLayer, DecoderStack
from stretto.layers.mlp import DenseMLP, Experts, MoeMLP

MAX_ROWS = 8
SMALL = 1 << 20
"""Elements of a matrix up to which it is multiplied by numpy: it stays in a core's cache, or
nearly."""
Map = Callable[[Array], Array]


class HostAttention(Protocol):
    def on_host(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Remember k and v [rows, kv heads, dim], attend with q [rows, heads, dim]; returns q's
        shape."""
        ...


def product(weight: Weight) -> Map:
    """Rows -> their products with a linear layer's weight."""
    assert isinstance(weight, torch.Tensor), "HostLayers.fits() comes first"
    if weight.numel() > SMALL:
        return lambda x: F.linear(torch.from_numpy(x), weight).numpy()
    turned: Array = weight.numpy().T
    return lambda x: x @ turned


def norm(x: Array, weight: Array, eps: float) -> Array:
    if x.ndim == 2 and len(x) == 1:
        # one row: a plain product, and the rest on numbers instead of arrays
        only = x[0]
        scaled: Array = x * np.float32(1.0 / math.sqrt(float(only @ only) / len(only) + eps))
        scaled *= weight
        return scaled
    spread = np.einsum("...i,...i->...", x, x)
    spread *= 1.0 / x.shape[-1]
    spread += eps
    np.sqrt(spread, out=spread)
    y: Array = x / spread[..., None]
    y *= weight
    return y


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """x [rows, heads, dim], cos and sin [rows, 1, dim], the sine's first half negated"""
    half = x.shape[-1] // 2
    y: Array = x * cos
    y += np.concatenate((x[..., half:], x[..., :half]), -1) * sin
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
    """One query per row: q [rows, heads, dim] over keys and values [rows, kv heads, positions,
    dim]."""
    rows, heads, dim = q.shape
    # the heads of a group share keys
    grouped = q.reshape(rows, keys.shape[1], -1, dim)
    chances = softmax(np.matmul(grouped, keys.swapaxes(-1, -2)) * np.float32(dim**-0.5))
    y: Array = np.matmul(chances, values).reshape(rows, heads, dim)
    return y


def dense(gate_up: torch.Tensor, down: torch.Tensor) -> Map:
    up, back = product(gate_up), product(down)
    return lambda x: back(swiglu(up(x)))


def shared_expert(mlp: MoeMLP) -> Map | None:
    if mlp.shared_expert is None or mlp.shared_expert_gate is None:
        return None
    shared = dense(mlp.shared_expert.gate_up.weight, mlp.shared_expert.down_proj.weight)
    gate = product(mlp.shared_expert_gate.weight)

    def run(x: Array) -> Array:
        y = shared(x)
        y /= 1.0 + np.exp(-gate(x))
        return y

    return run


def mixture(mlp: MoeMLP) -> Map:
    gate, shared = product(mlp.gate.weight), shared_expert(mlp)
    assert isinstance(mlp.experts, Experts)
    experts = [
        dense(up, down) for up, down in zip(mlp.experts.gate_up, mlp.experts.down, strict=True)
    ]

    def run(x: Array) -> Array:
        chances = softmax(gate(x))
        best = np.argsort(-chances, axis=-1, kind="stable")[:, : mlp.top_k]
        weights = np.take_along_axis(chances, best, -1)
        if mlp.norm:
            weights /= weights.sum(-1, keepdims=True)
        y = np.zeros_like(x)
        for i, chosen in enumerate(best.tolist()):
            own = x[i : i + 1]
            for e, weight in zip(chosen, weights[i], strict=True):
                y[i] += weight * experts[e](own)[0]
        if shared is not None:
            y += shared(x)
        return y

    return run


@dataclass(frozen=True, slots=True, eq=False)
class HostLayer:
    before: Array
    qkv: Map
    # of queries and keys, [heads + kv heads, dim]
    gains: Array
    out: Map
    behind: Array
    mlp: Map
    eps: float

    @classmethod
    def of(cls, layer: DecoderLayer) -> HostLayer:
        a, m = layer.self_attn, layer.mlp
        assert a.gains is not None
        assert isinstance(m, DenseMLP | MoeMLP)
        before = layer.input_layernorm.weight.numpy()
        behind = layer.post_attention_layernorm.weight.numpy()
        mlp = dense(m.gate_up.weight, m.down_proj.weight) if isinstance(m, DenseMLP) else mixture(m)
        eps = layer.input_layernorm.eps
        return cls(
            before,
            product(a.qkv.weight),
            a.gains.numpy(),
            product(a.o_proj.weight),
            behind,
            mlp,
            eps,
        )


class HostLayers:
    def __init__(self, decoder: DecoderStack) -> None:
        c = decoder.config
        self.heads = c.num_heads
        self.kv_heads = c.num_kv_heads
        self.dim = c.head_dim
        self.eps = c.rms_eps
        self.signs: Array = np.repeat(np.array([-1, 1], np.float32), self.dim // 2)
        self.layers = [HostLayer.of(layer) for layer in decoder.layers]  # type: ignore[arg-type]
        self.norm: Array = decoder.norm.weight.numpy()

    @staticmethod
    def fits(decoder: DecoderStack) -> bool:
        """Float32 on a CPU; experts whose weights are wide."""
        weight, moe = decoder.norm.weight, decoder.config.moe
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and not (moe is not None and moe.float8)
            and not decoder.config.packed
        )

    def __call__(
        self, x: torch.Tensor, angles: Angles, attention: HostAttention, after: AfterLayer | None
    ) -> torch.Tensor:
        cos, sin = (a.numpy()[:, None] for a in angles)
        sin = sin * self.signs
        h: Array = x.numpy()
        turned = self.heads + self.kv_heads
        with np.errstate(over="ignore"):
            # exp(-x) of a large negative x is infinite, and x over it is 0
            for i, layer in enumerate(self.layers):
                every = layer.qkv(norm(h, layer.before, layer.eps)).reshape(len(h), -1, self.dim)
                qk = rotate(norm(every[:, :turned], layer.gains, layer.eps), cos, sin)
                y = attention.on_host(
                    i, qk[:, : self.heads], qk[:, self.heads :], every[:, turned:]
                )
                h = h + layer.out(y.reshape(len(h), -1))
                h = h + layer.mlp(norm(h, layer.behind, layer.eps))
                if after is not None:
                    h = after(i, torch.from_numpy(h)).numpy()
            return torch.from_numpy(norm(h, self.norm, self.eps))
