"""A decoder's pass over many rows with the fast kernels: about a dozen launches per layer.

The same function as `Decoder.forward` over a paged cache, cut differently: each kernel ends where a
matrix product begins. Nothing in it depends on values on the host, so `PrefillGraphs` captures it;
passes too large for a graph run it as it is. Called on the stage's thread, on the current
stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from stretto.kernels.reference.paged import KVCache, Paging
from stretto.layers.decoder_layer import AfterLayer, DecoderLayer, DecoderStack, RMSNorm
from stretto.layers.mlp import DenseMLP, MoeMLP, PackedExperts
from stretto.layers.upload import to_device

# int32 values in 16 bytes: a kernel is compiled anew for a pointer that is less aligned
ALIGNED = 4


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Where the rows of a pass are, all of it on the device. Rows behind `count` are padding."""

    # [rows] int64: block * block_size + offset of each row's own key and value
    slots: torch.Tensor
    # [sequences, blocks] int32
    tables: torch.Tensor
    # [sequences] int32: keys visible to the sequence's last query
    lengths: torch.Tensor
    # [sequences + 1] int32: where each sequence's rows begin; it may have none
    starts: torch.Tensor
    # [1] int32: real rows, the last of `starts`
    count: torch.Tensor

    @classmethod
    def of(cls, paging: Paging) -> Ragged:
        host = pack_starts(paging, paging.lengths.shape[0])
        starts, count = split_starts(
            to_device(host, paging.slots.device, torch.int32), paging.lengths.shape[0]
        )
        return cls(paging.slots, paging.tables, paging.lengths, starts, count)


def pack_starts(paging: Paging, num_sequences: int) -> np.ndarray:
    """`starts` and `count` of a pass as one array for one copy; sequences beyond those of the pass
    are empty."""
    queries = [1] * paging.num_decode + [n for n, _ in paging.prefills]
    ends = np.cumsum(queries)
    packed = np.full(packed_size(num_sequences), ends[-1], dtype=np.int32)
    packed[0] = 0
    packed[1 : len(ends) + 1] = ends
    return packed


def packed_size(num_sequences: int) -> int:
    return -(-(num_sequences + 1) // ALIGNED) * ALIGNED + ALIGNED


def split_starts(packed: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of both; `count` is as aligned as a tensor of its own."""
    return packed[: num_sequences + 1], packed[-ALIGNED : 1 - ALIGNED]


def run_prefill(
    decoder: DecoderStack,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: KVCache,
    ragged: Ragged,
    counters: torch.Tensor | None,
    after: AfterLayer | None = None,
) -> torch.Tensor:
    """Input rows x [rows, hidden] at angles cos, sin [rows, head dim] -> final-normed rows; padding
    gives zeros. `counters` are those of the decoder's fused kernels, zero between kernels."""
    from stretto.kernels.triton.prefill import add_norm

    norms = [_first_norm(layer) for layer in decoder.layers] + [decoder.norm]
    stream, normed = add_norm(x, None, norms[0].weight, norms[0].eps, ragged.count)
    for i, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        mixed = _attention(layer, normed, cos, sin, cache.data[i], ragged, counters)
        norm = layer.post_attention_layernorm
        stream, normed = add_norm(stream, mixed, norm.weight, norm.eps, ragged.count)
        stream, normed = _mlp(layer.mlp, stream, normed, norms[i + 1], ragged.count)
        if after is not None:
            changed = after(i, stream)
            if changed is not stream:
                stream, normed = add_norm(
                    changed, None, norms[i + 1].weight, norms[i + 1].eps, ragged.count
                )
    return normed


def _first_norm(layer: torch.nn.Module) -> RMSNorm:
    assert isinstance(layer, DecoderLayer)
    return layer.input_layernorm


def _attention(
    layer: DecoderLayer, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    kv: torch.Tensor, ragged: Ragged,
    counters: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    from stretto.kernels.triton.attention_prefill import attend
    from stretto.kernels.triton.packed_prompts import linear
    from stretto.kernels.triton.prefill import qkv_write

    a = layer.self_attn
    qkv = linear(normed, a.qkv.weight)
    q = qkv_write(
        qkv,
        a.q_norm.weight,
        a.k_norm.weight,
        a.q_norm.eps,
        cos,
        sin,
        kv,
        ragged.slots,
        ragged.count,
    )
    mixed = attend(q, kv, ragged.starts, ragged.lengths, ragged.tables, counters=counters)
    return linear(mixed.flatten(1), a.o_proj.weight)


def _mlp(
    mlp: torch.nn.Module,
    stream: torch.Tensor,
    normed: torch.Tensor,
    norm: RMSNorm,
    count: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream after a layer's feed-forward block, and its norm for the next layer."""
    from stretto.kernels.triton.grouped import experts, route
    from stretto.kernels.triton.packed_prompts import sorted_experts
    from stretto.kernels.triton.prefill import add_norm, combine, swiglu

    if isinstance(mlp, DenseMLP):
        h, _ = swiglu(F.linear(normed, mlp.gate_up.weight), count)
        return add_norm(stream, F.linear(h, mlp.down_proj.weight), norm.weight, norm.eps, count)
    assert isinstance(mlp, MoeMLP)
    routed = route(F.linear(normed, mlp.gate.weight), mlp.top_k, mlp.norm, count)
    places = None
    if isinstance(mlp.experts, PackedExperts):
        y = sorted_experts(normed, mlp.experts.gate_up, mlp.experts.down, routed)
    else:
        own = mlp.experts
        y, places = experts(normed, own.gate_up, own.down, routed, own.scales)
    shared = gate = None
    if mlp.shared_expert is not None and mlp.shared_expert_gate is not None:
        both = F.linear(normed, mlp.shared_expert.gate_up.weight)
        h, gate = swiglu(both, count, normed, mlp.shared_expert_gate.weight)
        shared = F.linear(h, mlp.shared_expert.down_proj.weight)
    return combine(stream, y, routed.weights, norm.weight, norm.eps, count, places, shared, gate)
