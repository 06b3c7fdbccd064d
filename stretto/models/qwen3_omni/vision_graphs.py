"""The vision encoder's blocks and mergers, captured by number of patches of one frame.

Some three hundred launches for a small image would take the host longer than the device needs for
them. One frame goes into static buffers with zeros behind it, up to the graph's size; its number of
patches says which keys count. Owned by the thinker stage's `Encoders`, captured once at
start; run on that stage's thread and stream alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.layers.capture import Captured, capture_graphs
from stretto.models.qwen3_omni.vision_encoder import Rope, VisionEncoder, VisionRows, attend

SIZES = (256, 576, 832, 1024, 1280, 2048)
"""Patches, for images of 256x256, 384x384, 448x448 (784), 512x512, 640x480 (1,200), and 640x640 or
800x600 (1,600 and 1,900): padding costs the device as much as an image does. 1024x768 has 3,072,
which should keep the device busy for longer than the host needs to launch them. Multiples of 16, as
the kernels want a mask to be.

Memory at the released size in bf16, by calculation: 5 MB of buffers, 25 MB of results, and 80 MB
that the graphs share for the activations of the largest. It comes out of the memory plan's reserve,
as that of the other graphs does."""


class FrameGraphs:
    def __init__(self, encoder: VisionEncoder, sizes: Sequence[int] = SIZES) -> None:
        self.encoder = encoder
        self.sizes = sorted(sizes)
        c, weight = encoder.config, encoder.pos_embed.weight
        assert all(size % c.merge**2 == 0 for size in sizes), (
            f"sizes of whole groups of {c.merge**2}, got {sizes}"
        )
        max_size, half = max(sizes), c.hidden_size // c.num_heads // 2
        self.rows = torch.zeros(max_size, c.hidden_size, device=weight.device, dtype=weight.dtype)
        # cos and sin
        self.turns = torch.zeros(2, max_size, 1, half, device=weight.device, dtype=torch.float32)
        # never 0: some kernels would make NaN
        self.count = torch.ones(1, dtype=torch.int64, device=weight.device)
        self.graphs: dict[int, Captured[torch.Tensor]] = {}

    def capture(self, stream: torch.cuda.Stream) -> None:
        self.graphs = capture_graphs(
            self.sizes[::-1], lambda size: lambda: self.forward(size), stream
        )

    def run(self, x: torch.Tensor, rope: Rope) -> VisionRows | None:
        """One frame as `embed` makes it: rows [patches, hidden] and their turns. The result is the
        caller's to keep; None if no graph fits."""
        size = next((s for s in self.sizes if s >= len(x) and s in self.graphs), None)
        if size is None:
            return None
        self.fill(x, rope, size)
        graph, out = self.graphs[size]
        graph.replay()
        # A copy: the graph's output is overwritten by its next replay.
        main, *deep = out[:, : len(x) // self.encoder.config.merge**2].clone().unbind()
        return VisionRows(main, tuple(deep))

    def fill(self, x: torch.Tensor, rope: Rope, size: int) -> None:
        """Put a frame where the graphs read it. Rows behind its end are masked, which keeps
        everything out but what is not a number: so nothing of an earlier frame is left there."""
        n = len(x)
        assert 0 < n <= size, f"a frame of {n} patches for a graph of {size}"
        self.rows[:n].copy_(x)
        for place, turn in zip(self.turns, rope, strict=True):
            place[:n].copy_(turn)
        if n < size:
            self.rows[n:size].zero_()
            self.turns[:, n:size].zero_()
        self.count.fill_(n)

    def forward(self, size: int) -> torch.Tensor:
        """The pass over the static buffers, as it is captured: [main and DeepStack levels, size /
        merge**2, out]. Rows behind the frame's own are meaningless."""
        # Added to the scores of all heads and queries. Of the rows' type, made once: a mask of
        # truth values would be turned into this one in every block.
        mask = torch.zeros(size, device=self.rows.device, dtype=self.rows.dtype)
        mask.masked_fill_(torch.arange(size, device=self.rows.device) >= self.count, float("-inf"))
        cos, sin = self.turns[:, :size]
        seen = self.encoder.transform(
            self.rows[:size],
            (cos, sin),
            lambda q, k, v: attend(q, k, v, 1, mask.view(1, 1, 1, size)),
        )
        return torch.stack([seen.main, *seen.deep])
