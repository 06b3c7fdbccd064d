"""The layers of the transformer decoder that autoregressive stages share: weights only.

What a stream remembers (keys and values) is reached through `attention`, a callable made anew for
each pass: the paged cache of a stage, or a small static one. `decoder.py` runs the layers, by these
modules or by a faster way to compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from stretto.kernels.reference.norm import rms_norm
from stretto.kernels.reference.rope import rotate
from stretto.layers.config import DecoderConfig
from stretto.layers.linear import FusedLinear, Linear, PackedLinear
from stretto.layers.mlp import DenseMLP, MoeMLP
from stretto.layers.targets import frozen

Array = npt.NDArray[np.float32]


class AttentionPass(Protocol):
    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Remember k and v [rows, kv heads, dim], attend with q [rows, heads, dim]; returns q's
        shape."""
        ...

    def on_host(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """The same for arrays, on a CPU."""
        ...


Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of rotary positions, [rows, head dim] each."""
AfterLayer = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer index, residual stream after it) -> the residual stream to go on with."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = frozen(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Rope(nn.Module):
    """Angles of rotary positions: one axis, or three interleaved (time, height, width)."""

    def __init__(self, head_dim: int, theta: float, section: tuple[int, int, int] | None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.section = section
        # Set by prepare(): a module built uninitialised on a device must not depend on what is in
        # memory.
        self.inv_freq: torch.Tensor | None = None
        self.axes: torch.Tensor | None = None

    def prepare(self, device: torch.device) -> None:
        half = self.head_dim // 2
        powers = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self.inv_freq = (1.0 / self.theta**powers).to(device)
        if self.section is not None:
            # Frequency i turns with height at 1, 4, 7, ... and width at 2, 5, 8, ... while below
            # three times the axis's section; with time everywhere else.
            axis = [i % 3 if i % 3 and i < 3 * self.section[i % 3] else 0 for i in range(half)]
            self.axes = torch.tensor(axis, device=device)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Angles:
        """positions [3, rows] (or [rows] on one axis), float32 -> cos, sin [rows, head dim]."""
        assert self.inv_freq is not None, "prepare() comes first"
        if self.axes is None:
            angles = positions[:, None] * self.inv_freq
        else:
            angles = positions.index_select(0, self.axes).T * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class SelfAttention(nn.Module):
    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = c.head_dim
        self.heads = c.num_heads
        self.kv_heads = c.num_kv_heads
        self.sizes = [
            c.num_heads * c.head_dim,
            c.num_kv_heads * c.head_dim,
            c.num_kv_heads * c.head_dim,
        ]
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        self.qkv: FusedLinear | PackedLinear
        self.o_proj: Linear | PackedLinear
        if c.attention_format is None:
            self.qkv = FusedLinear(c.hidden_size, parts)
            self.o_proj = Linear(self.sizes[0], c.hidden_size)
        else:
            self.qkv = PackedLinear(c.hidden_size, parts, c.attention_format)
            out = {"o_proj": c.hidden_size}
            self.o_proj = PackedLinear(self.sizes[0], out, c.attention_format)
        self.q_norm = RMSNorm(c.head_dim, c.rms_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_eps)
        # [heads + kv heads, head dim]: both norms' weights, set by prepare()
        self.gains: torch.Tensor | None = None

    def prepare(self) -> None:
        q = self.q_norm.weight.expand(self.heads, -1)
        k = self.k_norm.weight.expand(self.kv_heads, -1)
        self.gains = torch.cat((q, k))

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionPass
    ) -> torch.Tensor:
        assert self.gains is not None, "prepare() comes first"
        turned, kv = self.heads + self.kv_heads, self.kv_heads
        every = self.qkv(x).view(len(x), turned + kv, self.head_dim)
        # queries and keys side by side: for few rows the number of operations is what counts
        qk = rotate(rms_norm(every[:, :turned], self.gains, self.q_norm.eps), cos, sin)
        q, k, v = qk[:, : self.heads], qk[:, self.heads :], every[:, turned:]
        out: torch.Tensor = self.o_proj(attention(self.layer, q, k, v).flatten(1))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_eps)
        self.self_attn = SelfAttention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_eps)
        self.mlp: nn.Module
        if c.moe is not None:
            self.mlp = MoeMLP(c.hidden_size, c.moe)
        else:
            assert c.dense_size is not None
            self.mlp = DenseMLP(c.hidden_size, c.dense_size)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: AttentionPass
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attention)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderStack(nn.Module):
    """The layers, the final norm and the rotary angles."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.config = c
        self.layers = nn.ModuleList(DecoderLayer(c, i) for i in range(c.num_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_eps)
        self.rope = Rope(c.head_dim, c.rope_theta, c.mrope_section)
