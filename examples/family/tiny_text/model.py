"""The model: an embedding, the package's decoder, and a head. Weights only; what a request
remembers is in the KV cache that each pass is given."""

from __future__ import annotations

import torch
from torch import nn

from stretto.kernels.reference.paged import KVCache, Paging
from stretto.layers.decoder import Decoder, PagedPass
from stretto.layers.linear import Embedding, Linear
from tiny_text.config import TinyTextConfig


class TinyTextModel(nn.Module):
    def __init__(self, config: TinyTextConfig) -> None:
        super().__init__()
        c = config.decoder
        self.config = config
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.decoder = Decoder(c)
        self.lm_head = Linear(c.hidden_size, c.vocab_size)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def prepare(self) -> None:
        """Derived constants; once, after the weights are in place."""
        self.decoder.prepare(self.device)

    def cache(self, num_blocks: int, block_size: int) -> KVCache:
        return self.decoder.cache(num_blocks, block_size, self.device, self.lm_head.weight.dtype)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, cache: KVCache, paging: Paging
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.decoder(x, positions, PagedPass(cache, paging))
        return hidden
