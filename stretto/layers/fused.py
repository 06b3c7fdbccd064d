"""A decode step through a decoder's layers as fused kernels: six per layer for one row, eight for
more.

Called by `Decoder.forward` and by the code predictor, on the stream of the step; made once per
decoder, when its weights are in place. Holds no state of requests, only counters that are zero
between kernels: so one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from stretto.kernels.reference.packed import Weight
from stretto.kernels.triton import (
    MAX_ROWS,
    attention,
    experts,
    experts_many,
    packed,
    packed_experts,
)
from stretto.kernels.triton.linear import COUNTERS, Gained, normalise, project, project_onto
from stretto.kernels.triton.packed_experts import PackedExpertWeights
from stretto.layers.config import DecoderConfig
from stretto.layers.decoder_layer import AfterLayer, DecoderLayer, DecoderStack, RMSNorm
from stretto.layers.mlp import DenseMLP, MoeMLP, PackedExperts

if TYPE_CHECKING:
    from stretto.kernels.reference.paged import KVCache, Paging


def fits(c: DecoderConfig) -> bool:
    """Sizes that the kernels' tiles divide. The released models have them."""

    def power(n: int) -> bool:
        return n & (n - 1) == 0

    if not power(c.hidden_size) or c.hidden_size < 64 or not power(c.head_dim) or c.head_dim < 16:
        return False
    if not packed_fits(c):
        return False
    if c.moe is None:
        return c.dense_size is not None and c.dense_size % 16 == 0
    m = c.moe
    even_shared = m.shared_size is None or (m.shared_size % m.expert_size == 0 and not m.float8)
    return power(m.num_experts) and m.expert_size % 32 == 0 and even_shared


def packed_fits(c: DecoderConfig) -> bool:
    """The same of packed weights."""
    hidden, form = c.hidden_size, c.attention_format
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    even = packed.fits_sizes
    if form is not None and not (
        even(form.kind, form.group, heads + 2 * kv, hidden)
        and even(form.kind, form.group, hidden, heads)
    ):
        return False
    m = c.moe
    if m is None or m.format is None or m.float8:
        return True
    form, size = m.format, m.expert_size
    if m.shared_size is not None and size & (size - 1) and size % 128:
        return False
    return even(form.kind, form.group, size, hidden) and even(form.kind, form.group, hidden, size)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: tuple[torch.Tensor, float]
    qkv: Weight
    gains: tuple[torch.Tensor, torch.Tensor, float]
    o: Weight
    mlp_norm: tuple[torch.Tensor, float]
    experts: experts.ExpertWeights | PackedExpertWeights | None
    # if dense
    gate_up: torch.Tensor
    down: torch.Tensor


def _layer(layer: nn.Module) -> _Layer:
    assert isinstance(layer, DecoderLayer)
    attn, mlp, after = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    chosen: experts.ExpertWeights | PackedExpertWeights | None = None
    gate_up: torch.Tensor
    down: torch.Tensor
    if isinstance(mlp, MoeMLP):
        chosen = _experts(mlp, after)
        gate_up = mlp.gate.weight  # nobody reads these
        down = mlp.gate.weight
    else:
        assert isinstance(mlp, DenseMLP)
        gate_up = mlp.gate_up.weight
        down = mlp.down_proj.weight
    return _Layer(
        input_norm=(layer.input_layernorm.weight, layer.input_layernorm.eps),
        qkv=attn.qkv.weight,
        gains=(attn.q_norm.weight, attn.k_norm.weight, attn.q_norm.eps),
        o=attn.o_proj.weight,
        mlp_norm=(after.weight, after.eps),
        experts=chosen,
        gate_up=gate_up,
        down=down,
    )


def _experts(mlp: MoeMLP, after: RMSNorm) -> experts.ExpertWeights | PackedExpertWeights:
    shared, own_gate = mlp.shared_expert, mlp.shared_expert_gate
    router: torch.Tensor = mlp.gate.weight
    if own_gate is not None:
        router = torch.cat((router, own_gate.weight))
    shared_gate_up = None if shared is None else shared.gate_up.weight
    shared_down = None if shared is None else shared.down_proj.weight
    if isinstance(mlp.experts, PackedExperts):
        return PackedExpertWeights(
            gain=after.weight,
            eps=after.eps,
            router=router,
            gate_up=mlp.experts.gate_up,
            down=mlp.experts.down,
            top_k=mlp.top_k,
            norm_topk=mlp.norm,
            shared_gate_up=shared_gate_up,
            shared_down=shared_down,
        )
    return experts.ExpertWeights(
        gain=after.weight,
        eps=after.eps,
        router=router,
        gate_up=mlp.experts.gate_up,
        down=mlp.experts.down,
        top_k=mlp.top_k,
        norm_topk=mlp.norm,
        shared_gate_up=shared_gate_up,
        shared_down=shared_down,
        scales=mlp.experts.scales,
    )


Attend = Callable[[int, _Layer, torch.Tensor], torch.Tensor]
"""(layer index, layer, qkv rows) -> attention output."""


class FusedLayers:
    def __init__(self, decoder: DecoderStack, device: torch.device) -> None:
        c = decoder.config
        self.heads = c.num_heads
        self.layers = [_layer(layer) for layer in decoder.layers]
        self.final = (decoder.norm.weight, decoder.norm.eps)
        self.tiles = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self.split_counters = torch.zeros(
            MAX_ROWS * c.num_kv_heads, dtype=torch.int32, device=device
        )

    def paged(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVCache,
        paging: Paging,
        after: AfterLayer | None = None,
        out: torch.Tensor | None = None,
        idle: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One query per row over the paged cache; x [rows, hidden] -> final-normed rows (in `out`,
        if it is given). Rows that `idle` [rows] int8 marks are padding."""

        def attend(i: int, layer: _Layer, qkv: torch.Tensor) -> torch.Tensor:
            return attention.decode(
                qkv, layer.gains, cos, sin, cache.data[i], paging.slots, paging.tables,
                paging.lengths,
                self.split_counters, self.heads,
            )  # fmt: skip

        return normalise(self._run(x, attend, after, idle), *self.final, out=out)

    def frame(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        start: int,
        queries: int,
    ) -> torch.Tensor:
        """The code predictor's positions [start, start + queries) of every row: x [rows * queries,
        hidden]; cos and sin of all positions; cache [layers, 2, rows, kv heads, positions, dim].
        Returns the residual stream, not normed: the head takes the norm along."""

        def attend(i: int, layer: _Layer, qkv: torch.Tensor) -> torch.Tensor:
            return attention.frame(qkv, layer.gains, cos, sin, cache[i], start, queries, self.heads)

        return self._run(x, attend, None)

    def _run(
        self,
        x: torch.Tensor,
        attend: Attend,
        after: AfterLayer | None,
        idle: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._one(x, attend, after) if len(x) == 1 else self._several(x, attend, after, idle)

    def _one(self, x: torch.Tensor, attend: Attend, after: AfterLayer | None) -> torch.Tensor:
        # the first write goes to a new tensor: x is the caller's
        out: torch.Tensor | None = None
        for i, layer in enumerate(self.layers):
            qkv = packed.project(x, layer.qkv, norm=layer.input_norm)
            x = out = packed.project(attend(i, layer, qkv), layer.o, add=x, out=out)
            if isinstance(layer.experts, PackedExpertWeights):
                packed_experts.mixture_one(x, layer.experts)
            elif layer.experts is not None:
                experts.mixture_one(x, layer.experts)
            else:
                project(
                    project(x, layer.gate_up, norm=layer.mlp_norm, glu=True),
                    layer.down,
                    add=x,
                    out=x,
                )
            if after is not None:
                x = out = after(i, x)
        return x

    def _several(
        self, x: torch.Tensor, attend: Attend, after: AfterLayer | None, idle: torch.Tensor | None
    ) -> torch.Tensor:
        out: torch.Tensor | None = None
        # x for the norm in front of the next layer
        gained: Gained | None = None
        for i, layer in enumerate(self.layers):
            following = (
                self.layers[i + 1].input_norm
                if i + 1 < len(self.layers) and after is None
                else None
            )
            if gained is None:
                qkv = packed.project(x, layer.qkv, norm=layer.input_norm, counters=self.tiles)
            else:
                qkv = packed.project(gained, layer.qkv, counters=self.tiles)
            x, middle = packed.project_onto(
                x, attend(i, layer, qkv), layer.o, layer.mlp_norm, out, self.tiles
            )
            out = x
            if isinstance(layer.experts, PackedExpertWeights):
                gained = packed_experts.mixture(x, middle, layer.experts, following, idle)
            elif layer.experts is not None:
                gained = experts_many.mixture(x, middle, layer.experts, following, idle)
            else:
                h = project(middle, layer.gate_up, glu=True, counters=self.tiles)
                if following is None:
                    gained = None
                    project(h, layer.down, add=x, out=x, counters=self.tiles)
                else:
                    _, gained = project_onto(x, h, layer.down, following, x, self.tiles)
            if after is not None:
                x = out = after(i, x)
        return x
