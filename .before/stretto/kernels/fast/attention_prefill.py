"""Attention of many queries over the paged cache: prompt chunks of several sequences, decoding rows among them.

A tile is some queries of one sequence times all heads that share a kv head, so that keys are read once per group. Which
sequence a tile belongs to is found on the device, so a captured launch serves any mix of sequences up to its size.
Called on the stage's thread, on the current stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.kernels.fast.linear import precision
from stretto.kernels.fast.tuning import config

LOG2_E = 1.4426950408889634


@triton.jit
def _attend_keys(
    q, mixed, top, norm, begin, end, keys, seen, keys_at, values_at, table, scale,
    BLOCK_STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Go through keys [begin, end) in tiles of N. `seen` [m]: how many keys each query may see."""
    d = tl.arange(0, DIM)
    for start in range(begin, end, N):
        place = start + tl.arange(0, N)
        if MASKED:
            real = place < keys
            block = tl.load(table + place // BLOCK, mask=real, other=0).to(tl.int64)
        else:
            block = tl.load(table + place // BLOCK).to(tl.int64)
        at = (block * BLOCK_STRIDE + (place % BLOCK) * DIM)[:, None] + d[None, :]
        if MASKED:
            k = tl.load(keys_at + at, mask=real[:, None], other=0.0)
        else:
            k = tl.load(keys_at + at)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            scores = tl.where(place[None, :] < seen[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A query that sees none of these keys and saw none before: its top is -inf, and -inf - -inf is no number.
        floor = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        p = tl.exp2(scores - floor[:, None])
        fade = tl.exp2(top - floor)
        norm = norm * fade + tl.sum(p, 1)
        mixed = mixed * fade[:, None]
        if MASKED:
            v = tl.load(values_at + at, mask=real[:, None], other=0.0)
        else:
            v = tl.load(values_at + at)
        mixed = tl.dot(p.to(v.dtype), v, mixed, input_precision=PRECISION)
        top = new_top
    return mixed, top, norm


@triton.jit(do_not_specialize=["num_sequences", "rows", "table_stride", "num_blocks"])
def _attend(
    q, cache, out, starts, lengths, tables, num_sequences, rows, table_stride, num_blocks, scale,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, N: tl.constexpr, SEARCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Long tiles are those at the end of a sequence: start with them, so that the short ones fill the gaps.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    kv = tl.program_id(0)
    # The tiles of sequence s begin at starts[s] // QUERIES + s: far enough apart whatever the lengths. Padding rows
    # are one more sequence, without keys.
    s = tl.arange(0, SEARCH)
    known = s <= num_sequences
    start = tl.load(starts + s, mask=known, other=0)
    before = known & (start // QUERIES + s <= tile)
    sequence = tl.sum(before.to(tl.int32), 0) - 1
    begin = tl.max(tl.where(before, start, 0), 0)
    end = tl.min(tl.where(known & (s > sequence), start, rows), 0)
    first = (tile - (begin // QUERIES + sequence)) * QUERIES  # of this tile's queries, in its sequence
    if first >= end - begin:
        return
    keys = tl.load(lengths + sequence, mask=sequence < num_sequences, other=0)
    m = tl.arange(0, QUERIES * GROUPS)
    query, head = first + m // GROUPS, m % GROUPS
    d = tl.arange(0, DIM)
    mine = (query < end - begin) & (head < GROUP)
    place = ((begin + query).to(tl.int64) * (KV_HEADS * GROUP) + kv * GROUP + head)[:, None] * DIM + d[None, :]
    tile_q = tl.load(q + place, mask=mine[:, None] & (keys > 0), other=0.0)
    hidden = keys - (end - begin)  # keys before the sequence's first query
    seen = tl.minimum(hidden + query + 1, keys)
    table = tables + sequence.to(tl.int64) * table_stride
    block_stride: tl.constexpr = KV_HEADS * BLOCK * DIM
    keys_at = cache + kv * (BLOCK * DIM)
    values_at = keys_at + tl.cast(num_blocks, tl.int64) * block_stride
    mixed = tl.zeros((QUERIES * GROUPS, DIM), tl.float32)
    top = tl.full((QUERIES * GROUPS,), float("-inf"), tl.float32)
    norm = tl.zeros((QUERIES * GROUPS,), tl.float32)
    whole = tl.minimum(hidden + first + 1, keys) // N * N  # every query of the tile sees all of these
    whole = tl.maximum(whole, 0)
    last = tl.minimum(hidden + first + QUERIES, keys)
    mixed, top, norm = _attend_keys(
        tile_q, mixed, top, norm, 0, whole, keys, seen, keys_at, values_at, table, scale,
        block_stride, DIM, BLOCK, N, False, PRECISION,
    )  # fmt: skip
    mixed, top, norm = _attend_keys(
        tile_q, mixed, top, norm, whole, last, keys, seen, keys_at, values_at, table, scale,
        block_stride, DIM, BLOCK, N, True, PRECISION,
    )  # fmt: skip
    mixed = mixed / tl.where(norm == 0.0, 1.0, norm)[:, None]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=mine[:, None])


def launch_for(heads: int, kv_heads: int, dim: int, rows: int) -> dict[str, int]:
    # With few rows there are few tiles: smaller ones, to have more of them at work.
    default = {"QUERIES": 16 if rows > 128 else 8, "N": 64, "num_warps": 8 if rows > 128 else 4, "num_stages": 3}
    return config("prefill_attend", (heads, kv_heads, dim, int(triton.next_power_of_2(rows))), default)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    launch: dict[str, int] | None = None,
) -> torch.Tensor:
    """Causal attention of q [rows, heads, dim] over one layer's cache [2, blocks, kv heads, block size, dim].

    Sequence s has the queries of rows starts[s] to starts[s + 1] (int32, one more entry than sequences), the last of
    its lengths[s] keys, whose blocks are in tables[s]. It may have none. Rows behind starts[-1] come out as zeros."""
    rows, heads, dim = q.shape
    _, _, kv_heads, block, _ = cache.shape
    sequences = lengths.shape[0]
    group = heads // kv_heads
    groups = triton.next_power_of_2(group)
    launch = launch or launch_for(heads, kv_heads, dim, rows)
    queries = max(launch["QUERIES"], -(-16 // groups))
    out = torch.empty_like(q)
    grid = (kv_heads, rows // queries + sequences + 1)
    _attend[grid](
        q, cache, out, starts, lengths, tables, sequences, rows, tables.stride(0), cache.shape[1], dim**-0.5 * LOG2_E,
        GROUP=group, GROUPS=groups, KV_HEADS=kv_heads, DIM=dim, BLOCK=block,
        SEARCH=max(16, triton.next_power_of_2(sequences + 1)),
        PRECISION=precision(q), **launch | {"QUERIES": queries},
    )  # fmt: skip
    return out
