"""The same weights without an engine: the whole sequence for each token, one request, greedy. What
is served must be equal to this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from stretto.layers.decoder_layer import Array
from tiny_text.model import TinyTextModel


class CausalAttention:
    """Over all rows of one pass; nothing is remembered."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        query, key, value = (t.transpose(0, 1) for t in (q, k, v))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1)

    def on_host(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        return self(layer, *(torch.from_numpy(a) for a in (q, k, v))).numpy()


@torch.inference_mode()
def answer(model: TinyTextModel, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
    ids = list(prompt)
    for _ in range(max_tokens):
        x = model.embed_tokens(torch.tensor(ids))
        hidden = model.decoder(x, torch.arange(len(ids)).float(), CausalAttention())
        ids.append(int(model.lm_head(hidden[-1:]).argmax()))
        yield ids[-1]
        if ids[-1] == model.config.end:
            return
