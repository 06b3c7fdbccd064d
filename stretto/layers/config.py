"""The shape of a decoder, whichever model it belongs to. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.kernels.formats import FLOAT8_ROWS, WeightFormat


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    top_k: int
    expert_size: int
    norm_topk: bool
    # width of the shared expert; None: there is none
    shared_size: int | None
    # of the routed experts' weights in memory; None: as wide as the rest
    format: WeightFormat | None = None

    @property
    def float8(self) -> bool:
        """Are the experts in 8 bits with a scale per output row?"""
        return self.format is not None and self.format == FLOAT8_ROWS


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
    # of the projections around attention in memory; None: as wide as the rest
    attention_format: WeightFormat | None = None

    @property
    def packed(self) -> bool:
        """Do weights lie in memory as quantised numbers that are widened while they are used?
        (Experts with a scale per row have kernels of their own.)"""
        experts = self.moe is not None and self.moe.format is not None and not self.moe.float8
        return experts or self.attention_format is not None
