"""Captured passes over prompt rows, one per number of rows.

A pass of some fifty layers is hundreds of launches; for a short prompt the host would need longer
for them than the device for the work. A graph takes any mix of sequences (prompt chunks, decoding
rows) up to its rows and its number of sequences; what is missing is padding, which reads nothing
and writes nowhere. Inputs are copied into static buffers, which all graphs share, on the stage's
stream; a replay's results stay valid on that stream until the next one. Owned by an adapter,
captured once at start, run on the stage's thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.kernels.reference.paged import KVCache, Paging
from stretto.layers.capture import Captured, capture_graphs
from stretto.layers.decoder import Decoder
from stretto.layers.prefill import Ragged, pack_starts, packed_size, split_starts
from stretto.stage.runner.rows import DeviceRows

# 1152: a full chunk and 128 answers
SIZES = (
    16,
    32,
    64,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    1152,
    1536,
    2048,
    2560,
)
STAGED = 8


class PrefillGraphs:
    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        rows: DeviceRows,
        accept_layer: int | None = None,
        sizes: Sequence[int] = SIZES,
        max_sequences: int | None = None,
    ) -> None:
        """`accept_layer`: after how many layers the residual stream is handed out; None: never. A
        request is at most once in a pass, so there are never more sequences than rows of
        requests."""
        max_sequences = max_sequences or rows.num_rows
        self.decoder = decoder
        self.cache = cache
        self.accept_layer = accept_layer
        self.sizes = sorted(sizes)
        self.max_sequences = max_sequences
        device, max_size = rows.device, max(sizes)
        hidden = decoder.config.hidden_size
        self.x = torch.zeros(max_size, hidden, dtype=cache.data.dtype, device=device)
        self.positions = torch.zeros(3, max_size, device=device)
        self.slots = torch.zeros(max_size, dtype=torch.int64, device=device)
        self.tables = torch.zeros(
            max_sequences, rows.tables.shape[1], dtype=torch.int32, device=device
        )
        self.lengths = torch.zeros(max_sequences, dtype=torch.int32, device=device)
        self.graphs: dict[int, Captured[tuple[torch.Tensor, torch.Tensor | None]]] = {}
        # Starts on their way to the device. A slot comes up again only after STAGED more passes,
        # when the pass that read it has long been retired (there are never that many in flight).
        self.packed = torch.zeros(packed_size(max_sequences), dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staged = [
            torch.zeros(len(self.packed), dtype=torch.int32, pin_memory=pinned)
            for _ in range(STAGED)
        ]
        self._next_buffer = 0

    @classmethod
    def where_usable(
        cls, decoder: Decoder, cache: KVCache, rows: DeviceRows, accept_layer: int | None = None
    ) -> PrefillGraphs | None:
        """None where the kernels that a graph is made of do not apply."""
        return cls(decoder, cache, rows, accept_layer) if decoder.fused is not None else None

    def capture(self, stream: torch.cuda.Stream) -> None:
        """All sizes, over empty passes."""
        self.graphs = capture_graphs(
            self.sizes[::-1], lambda size: lambda: self.forward(size), stream
        )

    def run(
        self, x: torch.Tensor, positions: torch.Tensor, paging: Paging
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Hidden rows and the accept layer's rows (if there is one) of one pass; None if no graph
        fits.

        Both are overwritten by the next run: take what is needed from them, on this stream, before
        it."""
        rows = x.shape[0]
        size = next((s for s in self.sizes if s >= rows and s in self.graphs), None)
        if (
            size is None
            or paging.lengths.shape[0] > self.max_sequences
            or torch.cuda.is_current_stream_capturing()
        ):
            return None
        self.fill(x, positions, paging)
        graph, (hidden, accept) = self.graphs[size]
        graph.replay()
        return hidden[:rows], None if accept is None else accept[:rows]

    def fill(self, x: torch.Tensor, positions: torch.Tensor, paging: Paging) -> None:
        """Put a pass's inputs where the graphs read them. What is left there of earlier passes is
        never looked at."""
        rows, (sequences, width) = x.shape[0], paging.tables.shape
        staged = self._staged[self._next_buffer % STAGED]
        self._next_buffer += 1
        staged.numpy()[:] = pack_starts(paging, self.max_sequences)
        self.packed.copy_(staged, non_blocking=True)
        self.x[:rows].copy_(x)
        self.positions[:, :rows].copy_(positions)
        self.slots[:rows].copy_(paging.slots)
        self.tables[:sequences, :width].copy_(paging.tables)
        self.lengths[:sequences].copy_(paging.lengths)

    def forward(self, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The pass over the static buffers, as it is captured: hidden rows, accept layer's rows."""
        starts, count = split_starts(self.packed, self.max_sequences)
        ragged = Ragged(self.slots[:size], self.tables, self.lengths, starts, count)
        # Kept alive until after the capture, so that no later layer of this graph gets its memory.
        accepted: list[torch.Tensor] = []

        def after(layer: int, stream: torch.Tensor) -> torch.Tensor:
            if layer + 1 == self.accept_layer:
                accepted.append(stream)
            return stream

        x = self.x[:size]
        cos, sin = self.decoder.rope(self.positions[:, :size], x.dtype)
        hidden = self.decoder.prefill(x, cos, sin, self.cache, ragged, after)
        if self.accept_layer is None:
            return hidden, None
        if self.accept_layer == 0:
            return hidden, x
        # The last state a model reports is the normed one.
        return hidden, hidden if self.accept_layer >= len(self.decoder.layers) else accepted[0]
