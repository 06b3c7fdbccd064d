"""Attention of many queries over the paged cache: prompt chunks of several sequences, decoding rows among them.

A tile is some queries of one sequence times all heads that share a kv head, so that keys are read once per group. Which
sequence a tile belongs to is found on the device, so a captured launch serves any mix of sequences up to its size.
With few tiles, the keys of those that have many are split over several programs, and a second kernel adds the parts
up: a short turn at the end of a long conversation. Called on the stage's thread, on the current stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.kernels.fast.linear import precision
from stretto.kernels.fast.tuning import config

LOG2_E = 1.4426950408889634
MAX_SPLITS = 8
PROGRAMS = 264  # to have at work: two for each multiprocessor of an H200


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


@triton.jit
def _used(keys, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """How many splits have work: each has at least so many keys, if there is more than one."""
    return tl.minimum(tl.maximum(keys // KEYS, 1), SPLITS)


@triton.jit(do_not_specialize=["num_sequences", "rows", "table_stride", "num_blocks"])
def _attend(
    q, cache, out, parts, tops, norms, splits, starts, lengths, tables, num_sequences, rows, table_stride, num_blocks,
    scale,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, SEARCH: tl.constexpr,
    PRECISION: tl.constexpr,
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
    row = (begin + query).to(tl.int64) * (KV_HEADS * GROUP) + kv * GROUP + head
    place = row[:, None] * DIM + d[None, :]
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
    last = tl.maximum(tl.minimum(hidden + first + QUERIES, keys), 0)
    low = 0
    if SPLITS > 1:
        used = _used(last, KEYS, SPLITS)
        split = tl.program_id(2)
        if split >= used:
            return
        share = (last + used * N - 1) // (used * N) * N
        low = tl.minimum(split * share, last)
        last = tl.minimum(low + share, last)
        whole = tl.minimum(tl.maximum(whole, low), last)
    mixed, top, norm = _attend_keys(
        tile_q, mixed, top, norm, low, whole, keys, seen, keys_at, values_at, table, scale,
        block_stride, DIM, BLOCK, N, False, PRECISION,
    )  # fmt: skip
    mixed, top, norm = _attend_keys(
        tile_q, mixed, top, norm, whole, last, keys, seen, keys_at, values_at, table, scale,
        block_stride, DIM, BLOCK, N, True, PRECISION,
    )  # fmt: skip
    if SPLITS > 1:
        if split == 0:
            tl.store(splits + row, tl.zeros_like(head) + used, mask=mine)
        if used > 1:
            part = row * SPLITS + split
            tl.store(parts + part[:, None] * DIM + d[None, :], mixed, mask=mine[:, None])
            tl.store(tops + part, top, mask=mine)
            tl.store(norms + part, norm, mask=mine)
            return
    mixed = mixed / tl.where(norm == 0.0, 1.0, norm)[:, None]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=mine[:, None])


@triton.jit
def _add_up(out, parts, tops, norms, splits, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """The parts of one query and head, where there are several."""
    row = tl.program_id(0).to(tl.int64)
    used = tl.load(splits + row)
    if used == 1:
        return
    s, d = tl.arange(0, SPLITS), tl.arange(0, DIM)
    there = s < used
    top = tl.load(tops + row * SPLITS + s, mask=there, other=float("-inf"))
    share = tl.exp2(top - tl.max(top, 0))  # the first split has a key that every query sees
    norm = tl.sum(share * tl.load(norms + row * SPLITS + s, mask=there, other=0.0), 0)
    at = parts + (row * SPLITS + s)[:, None] * DIM + d[None, :]
    mixed = tl.sum(tl.load(at, mask=there[:, None], other=0.0) * share[:, None], 0)
    tl.store(out + row * DIM + d, (mixed / norm).to(out.dtype.element_ty))


def launch_for(heads: int, kv_heads: int, dim: int, rows: int) -> dict[str, int]:
    # With few rows there are few tiles: smaller ones, to have more of them at work, and their keys split.
    few = rows <= 128
    tiles = kv_heads * -(-rows // 8)
    splits = min(MAX_SPLITS, 1 << max(0, (PROGRAMS // tiles).bit_length() - 1)) if few else 1
    default = {"QUERIES": 8 if few else 16, "N": 64, "KEYS": 128, "SPLITS": splits, "num_warps": 4 if few else 8,
               "num_stages": 3}  # fmt: skip
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
    launch = launch_for(heads, kv_heads, dim, rows) | (launch or {})
    queries = max(launch["QUERIES"], -(-16 // groups))
    out = torch.empty_like(q)
    splits = launch["SPLITS"]
    parts = q.new_empty(rows, heads, splits, dim, dtype=torch.float32) if splits > 1 else None
    tops, norms = q.new_empty(2, rows, heads, splits, dtype=torch.float32) if splits > 1 else (None, None)
    used = q.new_empty(rows, heads, dtype=torch.int32) if splits > 1 else None
    _attend[(kv_heads, rows // queries + sequences + 1, splits)](
        q, cache, out, parts, tops, norms, used, starts, lengths, tables, sequences, rows, tables.stride(0),
        cache.shape[1], dim**-0.5 * LOG2_E,
        GROUP=group, GROUPS=groups, KV_HEADS=kv_heads, DIM=dim, BLOCK=block,
        SEARCH=max(16, triton.next_power_of_2(sequences + 1)),
        PRECISION=precision(q), **launch | {"QUERIES": queries},
    )  # fmt: skip
    if splits > 1:
        _add_up[(rows * heads,)](out, parts, tops, norms, used, DIM=dim, SPLITS=splits, num_warps=1)
    return out
