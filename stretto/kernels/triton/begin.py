"""The beginning of a decode step in one kernel: everything that follows from row numbers and
positions.

For each row of the batch: its input row (a word's embedding, or a frame's sum plus a word's), the
rotation of its position, where its key and value go, how many keys it sees and where they lie.
Launched first in a step; the kernels after it may start only when it has ended. Reference: the
adapters' `device_input`, `Rope`, `DeviceRows.decode_paging`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    x: torch.Tensor  # [batch, hidden]
    cos: torch.Tensor  # [batch, head dim]
    sin: torch.Tensor
    slots: torch.Tensor  # [batch] int64
    lengths: torch.Tensor  # [batch] int32
    tables: torch.Tensor  # [batch, blocks] int32, as far as the lengths go
    idle: torch.Tensor  # [batch] int8: 1 for padding


@triton.jit(do_not_specialize=["sink"])
def _begin(
    rows, positions, values, words, own, tables, offset, inv_freq, x, cos, sin, slots, lengths,
    used, idle, width, sink,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    row, position = tl.load(rows + m), tl.load(positions + m)
    block = tl.load(tables + row * width + position // BS).to(tl.int64)
    tl.store(slots + m, block * BS + position % BS)
    tl.store(lengths + m, (position + 1).to(tl.int32))
    tl.store(idle + m, (row == sink).to(tl.int8))
    count = position // BS + 1
    for first in range(0, count, 256):
        at = first + tl.arange(0, 256)
        tl.store(
            used + m * width + at,
            tl.load(tables + row * width + at, mask=at < count),
            mask=at < count,
        )
    half: tl.constexpr = D // 2
    d = tl.arange(0, half)
    angle = (position.to(tl.float32) + tl.load(offset + row)) * tl.load(inv_freq + d)
    c, s = tl.cos(angle).to(cos.dtype.element_ty), tl.sin(angle).to(sin.dtype.element_ty)
    tl.store(cos + m * D + d, c)
    tl.store(cos + m * D + half + d, c)
    tl.store(sin + m * D + d, s)
    tl.store(sin + m * D + half + d, s)
    k = tl.arange(0, BLOCK)
    inside = k < HIDDEN
    if SUM:
        word = tl.load(values + m)
        value = tl.load(own + row * HIDDEN + k, mask=inside).to(tl.float32)
        value += tl.load(words + word * HIDDEN + k, mask=inside).to(tl.float32)
    else:
        word = tl.load(own + row)
        value = tl.load(words + word * HIDDEN + k, mask=inside).to(tl.float32)
    tl.store(x + m * HIDDEN + k, value.to(x.dtype.element_ty), mask=inside)


def begin(
    rows: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    words: torch.Tensor,
    own: torch.Tensor,
    tables: torch.Tensor,
    offset: torch.Tensor,
    inv_freq: torch.Tensor,
    block_size: int,
) -> Begun:
    """Rows, positions and values [batch] int64. `own` by row: the last token [rows] int64, whose
    row of `words` is the input; or [rows, hidden], to which the row of `words` at `values` is
    added. The last row of `tables` is nobody's: batches are padded with it."""
    batch, hidden, dim = rows.shape[0], words.shape[1], 2 * inv_freq.shape[0]
    begun = Begun(
        x=words.new_empty(batch, hidden),
        cos=words.new_empty(batch, dim),
        sin=words.new_empty(batch, dim),
        slots=torch.empty_like(rows),
        lengths=torch.empty_like(rows, dtype=torch.int32),
        tables=tables.new_empty(batch, tables.shape[1]),
        idle=torch.empty_like(rows, dtype=torch.int8),
    )
    _begin[(batch,)](
        rows, positions, values, words, own, tables, offset, inv_freq,
        begun.x, begun.cos, begun.sin, begun.slots, begun.lengths, begun.tables, begun.idle,
        tables.shape[1], len(tables) - 1,
        HIDDEN=hidden, BLOCK=triton.next_power_of_2(hidden), D=dim, BS=block_size,
        SUM=own.dim() == 2, num_warps=4,
    )  # fmt: skip
    return begun
