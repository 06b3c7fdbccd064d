"""A talker's frame as fused kernels: code 0, then fifteen predictor steps, each picked on the
device.

The same frame as `FrameTalker.frame` makes, for rows of persistent state: parameters, what was seen
and where the sum of embeddings goes are looked up by row inside the kernels. Where the predictor is
narrower than the talker, it is fed from tables that were projected when the weights were there,
while sums are of the tables as they are. Called by a talker's adapter inside captured steps."""

from __future__ import annotations

import torch

from stretto.kernels.triton import MAX_ROWS
from stretto.kernels.triton.linear import project
from stretto.kernels.triton.sampling import (
    Columns,
    FrameOut,
    PickState,
    pick_code0,
    pick_last,
    pick_residual,
)
from stretto.layers.fused import FusedLayers
from stretto.models.speech.code_predictor import FrameCache
from stretto.models.speech.talker import FrameTalker


class FusedFrame:
    def __init__(
        self,
        model: FrameTalker,
        layers: FusedLayers,
        seen: torch.Tensor,
        floor: torch.Tensor,
        code0: Columns,
        rest: Columns,
    ) -> None:
        predictor = model.code_predictor
        self.model = model
        self.layers = layers
        self.cos, self.sin = predictor.angles
        self.answer = PickState(seen, floor, model.frames.eos)
        self.code0 = code0
        self.rest = rest
        self.heads = [head.get_parameter("weight") for head in predictor.lm_head]
        own = model.model.codec_embedding.weight
        self.tables = [
            own,
            *(table.get_parameter("weight") for table in predictor.model.codec_embedding),
        ]
        projection = predictor.small_to_mtp_projection
        self.width = model.frames.predictor.hidden_size
        self.projection: tuple[torch.Tensor, torch.Tensor] | None = None
        self.inputs: list[torch.Tensor | None] = [None] * len(self.tables)
        if projection is not None:
            # Tables are fixed, so their rows are projected once; at run time, only the talker's.
            assert projection.bias is not None
            self.projection = projection.weight, projection.bias.expand(MAX_ROWS, -1).contiguous()
            with torch.inference_mode():
                self.inputs = [predictor.fitted(table).contiguous() for table in self.tables[:-1]]

    def places(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the talker's final-normed rows go [batch, hidden], and the predictor's first two
        inputs [batch, 2, width]. Where both are as wide, the one is the first half of the other."""
        pair = self.heads[0].new_empty(batch, 2, self.width)
        return (
            (pair[:, 0], pair)
            if self.projection is None
            else (pair.new_empty(batch, self.tables[0].shape[1]), pair)
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        pair: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        cache: FrameCache,
        embedding: torch.Tensor,
    ) -> torch.Tensor:
        """Codes [batch, 16] from the talker's rows in their place (see `places`; the rest of `pair`
        is written here). The sum of the codes' embeddings goes to `embedding` [rows, hidden], by
        row. -1 where numbers went bad."""
        batch, size = hidden.shape
        groups = len(self.heads) + 1
        out = FrameOut(
            hidden.new_empty(batch, groups, dtype=torch.int64),
            hidden.new_empty(batch, size, dtype=torch.float32),
        )
        if self.projection is not None:
            weight, bias = self.projection
            fitted = project(hidden, weight, add=bias[:batch], counters=self.layers.tiles)
            pair[:, 0].copy_(fitted)
        logits = project(hidden, self.model.codec_head.weight, counters=self.layers.tiles)
        pick_code0(
            logits, rows, positions, self.code0, self.answer, self.model.suppress, self.tables[0],
            pair[:, 1], out,
            self.inputs[0],
        )  # fmt: skip
        if 2 * batch <= MAX_ROWS:
            last = self._layers(pair.view(-1, self.width), cache, 0, 2).view(batch, 2, self.width)[
                :, 1
            ]
        else:
            for i in (0, 1):
                last = self._layers(pair[:, i].contiguous(), cache, i, 1)
        x = hidden.new_empty(batch, self.width)
        for g in range(1, groups):
            logits = project(
                last, self.heads[g - 1], norm=self.layers.final, counters=self.layers.tiles
            )
            if g + 1 == groups:
                pick_last(logits, rows, positions, self.rest, g, self.tables[g], embedding, out)
            else:
                pick_residual(
                    logits, rows, positions, self.rest, g, self.tables[g], x, out, self.inputs[g]
                )
                last = self._layers(x, cache, g + 1, 1)
        return out.codes

    def _layers(self, x: torch.Tensor, cache: FrameCache, start: int, queries: int) -> torch.Tensor:
        return self.layers.frame(x, self.cos, self.sin, cache.data, start, queries)
