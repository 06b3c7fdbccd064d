"""The shape of a decoder, whichever model it belongs to. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    top_k: int
    expert_size: int
    norm_topk: bool
    # width of the shared expert; None: there is none
    shared_size: int | None
    # the experts' weights in 8 bits; no property of a checkpoint, but how it is to be loaded
    float8: bool = False


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder with grouped-query attention and normed queries and keys; dense, or a mixture of
    experts."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    # None: plain 1-D positions
    mrope_section: tuple[int, int, int] | None
    max_positions: int
    # width of a dense MLP; exactly one of dense_size and moe is set
    dense_size: int | None
    moe: MoeConfig | None
