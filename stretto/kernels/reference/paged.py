"""The paged key/value cache: its layout, the write, and attention over it.

Layout: `[layers, 2, blocks, kv heads, block size, head dim]`. One head's share of a block is one
contiguous run, so that a decode kernel streams it and a prefill kernel loads it as a tile. Block 0
is the sink: padding rows of a captured graph write there, and no request ever owns it.

`Paging` says how the flat rows of one forward pass lie in their sequences. A pass may mix rows that
decode (one query each) with rows that prefill a chunk; the decoding ones come first. These are the
reference versions in plain PyTorch; nothing here synchronises with the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

SINK = 0


@dataclass(frozen=True, slots=True, eq=False)
class Paging:
    """Where the rows of one pass are. Device tensors, and the lengths of prefilling sequences on
    the host."""

    slots: torch.Tensor  # [rows] int64: block * block_size + offset of each row's own key and value
    tables: (
        torch.Tensor
    )  # [sequences, blocks] int32: block ids in order, padded with anything valid
    lengths: torch.Tensor  # [sequences] int32: keys visible to the sequence's last query
    num_decode: int  # the first so many sequences have one query each
    prefills: tuple[
        tuple[int, int], ...
    ] = ()  # the others: (queries, keys), host copies of the lengths

    @property
    def last_rows(self) -> list[int]:
        """Row index of each sequence's last query."""
        last, row = list(range(self.num_decode)), self.num_decode - 1
        for queries, _ in self.prefills:
            row += queries
            last.append(row)
        return last


class KVCache:
    """The pool of one stage. Holds memory, knows nothing of requests."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        # Zeros, not empty: a masked key still meets 0 * value, and 0 * nan would spread.
        shape = (num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim)
        self.data = torch.zeros(shape, device=device, dtype=dtype)

    def page(self, sequences: Sequence[tuple[Sequence[int], int, int]]) -> Paging:
        """Paging for sequences given on the host as (block table, first query position, number of
        queries)."""
        size, device = self.block_size, self.data.device
        order = [s for s in sequences if s[2] == 1] + [s for s in sequences if s[2] != 1]
        if order != list(sequences):
            raise ValueError("sequences that decode must come before those that prefill")
        slots = [
            table[p // size] * size + p % size
            for table, start, n in sequences
            for p in range(start, start + n)
        ]
        width = max(-(-(start + n) // size) for _, start, n in sequences)
        rows = [(list(table[:width]) + [SINK] * width)[:width] for table, _, _ in sequences]
        num_decode = sum(n == 1 for _, _, n in sequences)
        return Paging(
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            tables=torch.tensor(rows, dtype=torch.int32, device=device),
            lengths=torch.tensor(
                [start + n for _, start, n in sequences], dtype=torch.int32, device=device
            ),
            num_decode=num_decode,
            prefills=tuple((n, start + n) for _, start, n in sequences[num_decode:]),
        )


def write_kv(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Store rows k, v [rows, kv heads, dim] of one layer's cache [2, blocks, kv heads, block size,
    dim]."""
    block, offset = slots // cache.shape[3], slots % cache.shape[3]
    cache[0][block, :, offset] = k
    cache[1][block, :, offset] = v


def paged_attention(q: torch.Tensor, cache: torch.Tensor, paging: Paging) -> torch.Tensor:
    """Causal attention of q [rows, heads, dim] over one layer's cache; keys of these rows are
    already written."""
    n = paging.num_decode
    parts = []
    if n:
        parts.append(_decode(q[:n], cache, paging.tables[:n], paging.lengths[:n]))
    row = n
    for i, (queries, keys) in enumerate(paging.prefills, start=n):
        parts.append(_prefill(q[row : row + queries], cache, paging.tables[i], keys))
        row += queries
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(
    q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """One query per sequence. Shapes depend on the table's width alone, so it can be captured."""
    rows, heads, dim = q.shape
    kv_heads, size = cache.shape[2], cache.shape[3]
    width = tables.shape[1] * size
    k, v = (c[tables].transpose(1, 2).reshape(rows, kv_heads, width, dim) for c in cache)
    seen = torch.arange(width, device=q.device) < lengths[:, None]
    # What lies behind a sequence's end is what others left there, or write just now: if they are
    # not numbers, a weight of 0 does not keep them out. (These are copies.)
    k, v = (c.masked_fill_(~seen[:, None, :, None], 0.0) for c in (k, v))
    grouped = q.view(
        rows, kv_heads, heads // kv_heads, dim
    )  # the heads of a group share keys: one matrix product
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen[:, None, None])
    return out.reshape(rows, heads, dim)


def _prefill(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, keys: int) -> torch.Tensor:
    """A chunk of queries of one sequence, the last `len(q)` of its `keys` positions."""
    queries, heads, dim = q.shape
    kv_heads, size = cache.shape[2], cache.shape[3]
    blocks = table[: -(-keys // size)]
    k, v = (c[blocks].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :keys] for c in cache)
    place = torch.arange(keys, device=q.device)
    seen = place[None] <= place[keys - queries :, None]
    group = heads // kv_heads
    # [kv heads, group, queries, dim] against keys broadcast over the group
    q4 = q.view(queries, kv_heads, group, dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        q4,
        k[:, None].expand(-1, group, -1, -1),
        v[:, None].expand(-1, group, -1, -1),
        attn_mask=seen,
    )
    return out.permute(2, 0, 1, 3).reshape(queries, heads, dim)
