"""The code predictor: codes 1..15 of a frame, one after the other, from the talker's hidden row and
code 0.

A frame is 16 positions of a small dense decoder: the hidden row and code 0's embedding first, then
one position per code. Its keys and values live in a static buffer that each frame overwrites;
nothing is paged and nothing prefilled again. All rows of a batch are always at the same position,
so the loop has fixed shapes and no branches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stretto.layers.config import DecoderConfig
from stretto.layers.decoder import Decoder
from stretto.layers.decoder_layer import Array
from stretto.layers.linear import Embedding, Linear
from stretto.layers.numpy_decoder import attend

Pick = Callable[[torch.Tensor, int], torch.Tensor]
"""(logits [rows, codebook], code index 1..15) -> codes [rows]."""


class FrameCache:
    """Keys and values of the frames in progress, one per row."""

    def __init__(
        self, c: DecoderConfig, rows: int, positions: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (c.num_layers, 2, rows, c.num_kv_heads, positions, c.head_dim)
        self.data = torch.zeros(shape, device=device, dtype=dtype)
        # causal masks of a pass that starts at 0 with two positions, and of one that adds position
        # i
        self.seen = torch.ones(positions, positions, dtype=torch.bool, device=device).tril()


class FramePass:
    """Attention of one pass: every row adds the positions [start, start + queries)."""

    def __init__(self, cache: FrameCache, rows: int, start: int, queries: int) -> None:
        self.cache = cache
        self.rows = rows
        self.start = start
        self.queries = queries

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        stop = self.start + self.queries
        keys, values = self.cache.data[layer, :, : self.rows]
        split = (self.rows, self.queries)
        keys[:, :, self.start : stop] = torch.unflatten(k, 0, split).transpose(1, 2)
        values[:, :, self.start : stop] = torch.unflatten(v, 0, split).transpose(1, 2)
        keys, values = keys[:, :, :stop], values[:, :, :stop]
        group = q.shape[1] // k.shape[1]
        # the heads of a group share keys: fold them into the queries
        q5 = torch.unflatten(torch.unflatten(q, 0, split), 2, (-1, group)).permute(0, 2, 3, 1, 4)
        folded = q5.reshape(self.rows, -1, group * self.queries, q.shape[-1])
        mask = (
            None
            if self.queries == 1
            else self.cache.seen[self.start : stop, :stop].repeat(group, 1)
        )
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        return out.view(q5.shape).permute(0, 3, 1, 2, 4).reshape(q.shape)

    def on_host(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        if self.queries > 1:
            return self(layer, *(torch.from_numpy(a) for a in (q, k, v))).numpy()
        keys, values = self.cache.data[layer, :, : self.rows].numpy()
        keys[:, :, self.start], values[:, :, self.start] = k, v
        return attend(q, keys[:, :, : self.start + 1], values[:, :, : self.start + 1])


class PredictorModel(Decoder):
    def __init__(self, c: DecoderConfig, num_groups: int, width: int) -> None:
        super().__init__(c)
        self.codec_embedding = nn.ModuleList(
            Embedding(c.vocab_size, width) for _ in range(num_groups - 1)
        )


class CodePredictor(nn.Module):
    """`width` is the talker's. Where the predictor is narrower, each of its inputs passes a
    projection; the sum of a frame's embeddings, which is the talker's next input, does not."""

    def __init__(self, c: DecoderConfig, num_groups: int, width: int) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.model = PredictorModel(c, num_groups, width)
        self.small_to_mtp_projection = (
            Linear(width, c.hidden_size, bias=True) if width != c.hidden_size else None
        )
        self.lm_head = nn.ModuleList(
            Linear(c.hidden_size, c.vocab_size) for _ in range(num_groups - 1)
        )

    def prepare(self, device: torch.device) -> None:
        self.model.prepare(device)
        positions = torch.arange(self.num_groups, dtype=torch.float32, device=device)
        # of every position of a frame
        self.angles = self.model.rope(positions, self.model.norm.weight.dtype)

    def fitted(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of the talker's width as inputs."""
        if self.small_to_mtp_projection is None:
            return x
        out: torch.Tensor = self.small_to_mtp_projection(x)
        return out

    def cache(self, rows: int, device: torch.device, dtype: torch.dtype) -> FrameCache:
        return FrameCache(self.model.config, rows, self.num_groups, device, dtype)

    def forward(
        self, hidden: torch.Tensor, first: torch.Tensor, cache: FrameCache, pick: Pick
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Talker rows `hidden` and embeddings of code 0 `first` (both [rows, width]).

        Returns the codes [rows, groups - 1] and the embeddings of all the frame's codes, summed:
        [rows, width]."""
        rows = hidden.shape[0]
        x = self.fitted(torch.stack((hidden, first), 1).flatten(0, 1))
        cos, sin = self.angles
        out = self.model(
            x, (cos[:2].repeat(rows, 1), sin[:2].repeat(rows, 1)), FramePass(cache, rows, 0, 2)
        )
        last = out.view(rows, 2, -1)[:, 1]
        codes, embedded = [], [first]
        for g in range(self.num_groups - 1):
            code = pick(self.lm_head[g](last), g + 1)
            row = self.model.codec_embedding[g](code)
            codes.append(code)
            embedded.append(row)
            if g + 2 < self.num_groups:
                at = cos[g + 2].expand(rows, -1), sin[g + 2].expand(rows, -1)
                last = self.model(self.fitted(row), at, FramePass(cache, rows, g + 2, 1))
        # one sum in float32, rounded once
        total = torch.stack(embedded, 1).sum(1, dtype=torch.float32).to(hidden.dtype)
        return torch.stack(codes, 1), total
