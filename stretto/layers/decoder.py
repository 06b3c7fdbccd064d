"""The transformer decoder that autoregressive stages share. `Decoder.forward` chooses how a pass
is computed: by the modules of `decoder_layer.py`, by fused kernels, or by numpy on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stretto.kernels.reference.paged import KVCache, Paging, paged_attention, write_kv
from stretto.kernels.triton import MAX_ROWS, usable
from stretto.layers.config import DecoderConfig
from stretto.layers.decoder_layer import (
    AfterLayer,
    Angles,
    Array,
    AttentionPass,
    DecoderLayer,
    DecoderStack,
)
from stretto.layers.numpy_decoder import MAX_ROWS as HOST_ROWS
from stretto.layers.numpy_decoder import HostLayers
from stretto.layers.prefill import Ragged, run_prefill

if TYPE_CHECKING:
    from stretto.layers.fused import FusedLayers


class PagedPass:
    """Attention of one pass over the paged cache."""

    def __init__(self, cache: KVCache, paging: Paging) -> None:
        self.cache = cache
        self.paging = paging

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        kv = self.cache.data[layer]
        write_kv(kv, k, v, self.paging.slots)
        return paged_attention(q, kv, self.paging)

    def on_host(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        return self(layer, *(torch.from_numpy(a) for a in (q, k, v))).numpy()

    def decodes(self, rows: int) -> bool:
        """Every row is the one query of its sequence, and there are few."""
        return self.paging.num_decode == rows <= MAX_ROWS


class Decoder(DecoderStack):
    """Embeddings and heads belong to the model around it."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__(c)
        # For few rows: fused kernels where they can be used, numpy on a CPU. Made by `prepare`.
        self.fused: FusedLayers | None = None
        self.host: HostLayers | None = None

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor | Angles,
        attention: AttentionPass,
        after: AfterLayer | None = None,
    ) -> torch.Tensor:
        """Input rows x [rows, hidden] at these positions, or with their angles -> final-normed
        hidden rows."""
        angles = positions if isinstance(positions, tuple) else self.rope(positions, x.dtype)
        if self.host is not None and len(x) <= HOST_ROWS:
            return self.host(x, angles, attention, after)
        cos, sin = angles
        if self.fused is not None and isinstance(attention, PagedPass):
            cache, paging = attention.cache, attention.paging
            if attention.decodes(len(x)):
                return self.fused.paged(x, cos, sin, cache, paging, after=after)
            if paging.prefills:
                return self.prefill(x, cos, sin, cache, Ragged.of(paging), after)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attention)
            if after is not None:
                x = after(i, x)
        out: torch.Tensor = self.norm(x)
        return out

    def prefill(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KVCache,
        ragged: Ragged,
        after: AfterLayer | None = None,
    ) -> torch.Tensor:
        """Many rows with the fast kernels: see `run_prefill`."""
        counters = self.fused.split_counters if self.fused is not None else None
        return run_prefill(self, x, cos, sin, cache, ragged, counters, after)

    def fused_step(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        values: torch.Tensor,
        words: torch.Tensor,
        own: torch.Tensor,
        tables: torch.Tensor,
        offset: torch.Tensor,
        cache: KVCache,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One decode step of rows of persistent state, from row numbers and positions alone: input
        rows as `kernels.triton.begin` makes them, then all layers. -> final-normed rows (in `out`,
        if it is given)."""
        from stretto.kernels.triton.begin import begin

        assert self.fused is not None
        assert self.rope.inv_freq is not None
        b = begin(
            rows,
            positions,
            values,
            words,
            own,
            tables,
            offset,
            self.rope.inv_freq,
            cache.block_size,
        )
        paging = Paging(b.slots, b.tables, b.lengths, rows.shape[0])
        return self.fused.paged(b.x, b.cos, b.sin, cache, paging, out=out, idle=b.idle)

    def prepare(self, device: torch.device) -> None:
        """Once, after the weights are in place."""
        self.rope.prepare(device)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            layer.self_attn.prepare()
        if HostLayers.fits(self):
            self.host = HostLayers(self)
        if usable(self.norm.weight):
            from stretto.layers.fused import FusedLayers, fits

            if fits(self.config):
                self.fused = FusedLayers(self, device)

    def cache(
        self, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> KVCache:
        c = self.config
        return KVCache(
            c.num_layers, num_blocks, c.num_kv_heads, block_size, c.head_dim, device, dtype
        )
