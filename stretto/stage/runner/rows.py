"""Persistent rows: what each request in the batch keeps on the device between steps.

A request holds one row from the moment it joins until it leaves, so a decode step needs only row
numbers and positions from the host; everything else is looked up by row. The last row is the sink:
padding of a captured graph reads and writes there. Written by the runner on the stage's stream;
nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stretto.errors import Bug
from stretto.kernels.reference.paged import KVCache, Paging
from stretto.layers.upload import to_device
from stretto.stage.request import BlockId
from stretto.stage.runner.columns import BiasColumns, MaskColumns
from stretto.stage.runner.logprobs import Head
from stretto.stage.scheduler.batch import RowSpan


class DeviceRows:
    """Block tables, positions and sampling state by row. What a model keeps beside them is its
    adapter's."""

    def __init__(
        self,
        num_rows: int,
        max_blocks: int,
        vocab_size: int,
        cache: KVCache,
        masks: MaskColumns | None = None,
        bias: BiasColumns | None = None,
        head: Head | None = None,
    ) -> None:
        """`masks` and `bias` are for guided requests, `head` is for log-probabilities."""
        self.device = cache.data.device
        self.cache = cache
        self.num_rows = num_rows
        self.sink = num_rows
        total = num_rows + 1
        self.tables = torch.zeros(total, max_blocks, dtype=torch.int32, device=self.device)
        # rotary position of a generated row, minus its index
        self.offset = torch.zeros(total, device=self.device)
        self.seen = torch.zeros(total, vocab_size, dtype=torch.bool, device=self.device)
        # Index of the first token of the answer that may be the end.
        self.min_end = torch.zeros(total, dtype=torch.int64, device=self.device)
        self.masks = masks
        self.bias = bias
        self.head = head

    def join(
        self,
        row: int,
        blocks: Sequence[BlockId],
        offset: float,
        seen: Sequence[int],
        min_end: int = 0,
    ) -> None:
        """A new request: its table so far, its rotary offset, the tokens that count for its
        repetition penalty, and where its answer may end."""
        self.put_blocks([(row, 0, blocks)])
        self.offset[row].fill_(offset)
        self.min_end[row].fill_(min_end)
        if self.masks is not None:
            self.masks.clear(row)
        self.seen[row].zero_()
        if seen:
            ids = to_device(seen, self.device, torch.int64)
            self.seen[row].index_fill_(0, ids, True)

    def write_guides(self, spans: Sequence[RowSpan]) -> None:
        """What guided requests may pick in this step. Their last tokens are known: they run one
        step at a time."""
        for span in spans:
            guide = span.request.spec.guide
            if guide is None or not span.samples:
                continue
            if self.masks is None or self.bias is None:
                raise Bug(f"{span.request.id}: this stage follows no guide")
            if (bits := guide.mask()) is not None:
                self.masks.write(span.row, bits)
            if (pairs := guide.bias()) is not None:
                self.bias.write(span.row, pairs)

    def put_blocks(self, runs: Sequence[tuple[int, int, Sequence[BlockId]]]) -> None:
        """Blocks (row, first index, ids) for the tables, all in one write. The scheduler counts
        blocks from 0; on the device block 0 is the sink."""
        cells = [
            (row, first + i, b + 1) for row, first, blocks in runs for i, b in enumerate(blocks)
        ]
        if cells:
            where = to_device(np.array(cells, dtype=np.int64).T, self.device, torch.int64)
            self.tables[where[0], where[1]] = where[2].to(torch.int32)

    def hold_end(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, end: int
    ) -> None:
        """Forbid the end token, in place, where the answer is still too short for it."""
        early = positions + 1 < self.min_end[rows]
        logits[:, end] = logits[:, end].masked_fill(early, float("-inf"))

    def decode_paging(
        self, rows: torch.Tensor, positions: torch.Tensor, width: int | None = None
    ) -> Paging:
        """One query per row. Made of device lookups alone, so it can be captured; `width` blocks of
        each table are read (all of them by default)."""
        tables = self.tables[rows] if width is None else self.tables[rows, :width]
        size = self.cache.block_size
        block = self.tables[rows, positions // size].long()
        return Paging(
            slots=block * size + positions % size,
            tables=tables,
            lengths=(positions + 1).to(torch.int32),
            num_decode=rows.shape[0],
        )

    def mixed_paging(self, spans: Sequence[tuple[int, int, int]]) -> Paging:
        """Spans (row, start, stop), those of one position first."""
        size, device = self.cache.block_size, self.device
        flat = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        owner = np.repeat([row for row, _, _ in spans], [stop - start for _, start, stop in spans])
        packed = to_device(np.stack([owner, flat]), device, torch.int64)
        rows, positions = packed[0], packed[1]
        head = to_device(
            np.array([[row for row, _, _ in spans], [stop for _, _, stop in spans]]),
            device,
            torch.int64,
        )
        width = -(-max(stop for _, _, stop in spans) // size)
        num_decode = sum(stop - start == 1 for _, start, stop in spans)
        return Paging(
            slots=self.tables[rows, positions // size].long() * size + positions % size,
            tables=self.tables[head[0], :width],
            lengths=head[1].to(torch.int32),
            num_decode=num_decode,
            prefills=tuple((stop - start, stop) for _, start, stop in spans[num_decode:]),
        )
