"""The audio encoder's transformer, captured by number of attention windows.

Some three hundred launches for a clip of ten seconds would take the host longer than the device
needs for them. Windows of any lengths, from any requests, go into static buffers, the last ones of
length 0 if there are fewer than the graph has. Owned by the thinker stage's `Encoders`, captured
once at start; run on that stage's thread and stream alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.layers.capture import Captured, capture_graphs
from stretto.layers.upload import to_device
from stretto.models.qwen3_omni.audio_encoder import AudioEncoder
from stretto.models.qwen3_omni.config import conv_length

SIZES = (1, 2, 4, 8)
"""Windows of eight seconds each. Longer clips keep the device busy for longer than the host needs
to launch them."""


class WindowGraphs:
    def __init__(self, encoder: AudioEncoder, sizes: Sequence[int] = SIZES) -> None:
        self.encoder = encoder
        self.sizes = sorted(sizes)
        c, weight = encoder.config, encoder.proj2.weight
        self.length = c.chunks_per_window * conv_length(c.chunk_frames)
        self.rows = torch.zeros(
            max(sizes), self.length, c.hidden_size, device=weight.device, dtype=weight.dtype
        )
        self.lengths = torch.zeros(max(sizes), dtype=torch.int64, device=weight.device)
        self.graphs: dict[int, Captured[torch.Tensor]] = {}

    def capture(self, stream: torch.cuda.Stream) -> None:
        self.graphs = capture_graphs(
            self.sizes[::-1], lambda size: lambda: self.forward(size), stream
        )

    def run(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Windows [t, hidden] -> [t, out] each, the caller's to keep; None if no graph fits."""
        size = next((s for s in self.sizes if s >= len(rows) and s in self.graphs), None)
        if size is None:
            return None
        self.fill(rows, size)
        graph, out = self.graphs[size]
        graph.replay()
        # A copy: the graph's output is overwritten by its next replay.
        copies = out[: len(rows)].clone()
        return [window[: len(r)] for window, r in zip(copies, rows, strict=True)]

    def fill(self, rows: Sequence[torch.Tensor], size: int) -> None:
        """Put windows where the graphs read them. Rows behind a window's length are masked, which
        keeps everything out but what is not a number: so nothing of an earlier clip is left
        there."""
        for place, window in zip(self.rows, rows, strict=False):
            place[: len(window)].copy_(window)
            if len(window) < self.length:  # at most the last one of each clip
                place[len(window) :].zero_()
        lengths = [len(window) for window in rows] + [0] * (size - len(rows))
        self.lengths[:size].copy_(to_device(lengths, self.lengths.device, torch.int64))

    def forward(self, size: int) -> torch.Tensor:
        """The pass over the static buffers, as it is captured."""
        return self.encoder.transform(self.rows[:size], self.lengths[:size])
