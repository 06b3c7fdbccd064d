"""A talker's frame as fused kernels: code 0, then fifteen predictor steps, each picked on the device.

The same frame as `Talker.frame` makes, for rows of persistent state: parameters, what was seen and where the sum of
embeddings goes are looked up by row inside the kernels. Called by the talker's lane inside captured steps."""

from __future__ import annotations

import torch

from stretto.kernels.fast import MAX_ROWS
from stretto.kernels.fast.linear import project
from stretto.kernels.fast.sampling import Answer, Columns, FrameOut, pick_code0, pick_last, pick_residual
from stretto.layers.fused import FusedLayers
from stretto.models.qwen3_omni.code_predictor import FrameCache
from stretto.models.qwen3_omni.talker import Talker


class FusedFrame:
    def __init__(
        self, model: Talker, layers: FusedLayers, seen: torch.Tensor, floor: torch.Tensor, code0: Columns, rest: Columns
    ) -> None:
        predictor = model.code_predictor
        self.model, self.layers = model, layers
        self.cos, self.sin = predictor.angles
        self.answer = Answer(seen, floor, model.config.talker.codec.eos)
        self.code0, self.rest = code0, rest
        self.heads = [head.get_parameter("weight") for head in predictor.lm_head]
        self.tables = [table.get_parameter("weight") for table in predictor.model.codec_embedding]

    def __call__(
        self,
        pair: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        cache: FrameCache,
        embedding: torch.Tensor,
    ) -> torch.Tensor:
        """Codes [batch, 16] from the talker's final-normed rows, which are pair[:, 0] of [batch, 2, hidden] (the other
        half is written here). The sum of the codes' embeddings goes to `embedding` [rows, hidden], by row. -1 where
        numbers went bad."""
        batch, _, size = pair.shape
        hidden = pair[:, 0]
        groups = len(self.heads) + 1
        out = FrameOut(
            hidden.new_empty(batch, groups, dtype=torch.int64), hidden.new_empty(batch, size, dtype=torch.float32)
        )
        logits = project(hidden, self.model.codec_head.weight, counters=self.layers.tiles)
        pick_code0(
            logits, rows, positions, self.code0, self.answer, self.model.suppress,
            self.model.model.codec_embedding.weight, pair[:, 1], out,
        )  # fmt: skip
        if 2 * batch <= MAX_ROWS:
            last = self._layers(pair.view(-1, size), cache, 0, 2).view(batch, 2, size)[:, 1]
        else:
            for i in (0, 1):
                last = self._layers(pair[:, i].contiguous(), cache, i, 1)
        x = hidden.new_empty(batch, size)
        for g in range(1, groups):
            logits = project(last, self.heads[g - 1], norm=self.layers.final, counters=self.layers.tiles)
            if g + 1 == groups:
                pick_last(logits, rows, positions, self.rest, g, self.tables[g - 1], embedding, out)
            else:
                pick_residual(logits, rows, positions, self.rest, g, self.tables[g - 1], x, out)
                last = self._layers(x, cache, g + 1, 1)
        return out.codes

    def _layers(self, x: torch.Tensor, cache: FrameCache, start: int, queries: int) -> torch.Tensor:
        return self.layers.frame(x, self.cos, self.sin, cache.data, start, queries)
