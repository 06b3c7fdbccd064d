"""Attention of many queries over the paged cache: prompt chunks of several sequences, decoding rows
among them.

A tile is some queries of one sequence times all heads that share a kv head, so that keys are read
once per group. Which sequence a tile belongs to is found on the device, so a captured launch serves
any mix of sequences up to its size. With few rows there are as many programs as the device has room
for, which go from tile to tile: a captured launch has to allow for as many sequences as rows, and
programs without work would take longer than the work itself. The keys of tiles that have many are
then split over several programs, of which the last to finish adds the parts up: a short turn at the
end of a long conversation. Called on the stage's thread, on the current stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.kernels.triton.device import limits
from stretto.kernels.triton.linear import precision
from stretto.kernels.triton.tuning import config

LOG2_E = 1.4426950408889634
MAX_SPLITS = 8
PROGRAMS = 264  # to have at work: two for each multiprocessor of an H200
# programs beyond those that one sequence of all rows needs: for padding, and for a few sequences
# more
SPARE = 4


@triton.jit
def _attend_keys(
    q, mixed, top, norm, begin, end, keys, seen, keys_at, values_at, table, scale,
    BLOCK_STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr,
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
        # A query that sees none of these keys and saw none before: its top is -inf, and -inf - -inf
        # is no number.
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
    q, cache, out, parts, tops, norms, counters, starts, lengths, tables, num_sequences, rows,
    table_stride, num_blocks,
    scale,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    SEARCH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    kv, split = tl.program_id(0), tl.program_id(2)
    # How many tiles each sequence has, and where they end. Padding rows are one more sequence,
    # without keys.
    s = tl.arange(0, SEARCH)
    start = tl.load(starts + s, mask=s <= num_sequences, other=rows)
    stop = tl.load(starts + s + 1, mask=s < num_sequences, other=rows)
    tiles = (stop - start + QUERIES - 1) // QUERIES
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    m, d = tl.arange(0, QUERIES * GROUPS), tl.arange(0, DIM)
    head = m % GROUPS
    plane: tl.constexpr = BLOCK * DIM
    block_stride: tl.constexpr = KV_HEADS * plane
    keys_at = cache + kv * plane
    values_at = keys_at + num_blocks.to(tl.int64) * block_stride
    # Long tiles are those at the end of a sequence: start with them, so that the short ones fill
    # the gaps.
    for turn in range(tl.program_id(1), total, tl.num_programs(1)):
        tile = total - 1 - turn
        sequence = tl.sum((ends <= tile).to(tl.int32), 0)
        mine = s == sequence
        begin = tl.sum(tl.where(mine, start, 0), 0)
        end = tl.sum(tl.where(mine, stop, 0), 0)
        first = (
            tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)
        ) * QUERIES  # of its queries, in the sequence
        keys = tl.load(lengths + sequence, mask=sequence < num_sequences, other=0)
        hidden = keys - (end - begin)  # keys before the sequence's first query
        last = tl.maximum(tl.minimum(hidden + first + QUERIES, keys), 0)
        used = _used(last, KEYS, SPLITS)
        if split < used:
            query = first + m // GROUPS
            real = (query < end - begin) & (head < GROUP)
            row = (begin + query).to(tl.int64) * (KV_HEADS * GROUP) + kv * GROUP + head
            place = row[:, None] * DIM + d[None, :]
            tile_q = tl.load(q + place, mask=real[:, None] & (keys > 0), other=0.0)
            seen = tl.minimum(hidden + query + 1, keys)
            share = (last + used * N - 1) // (used * N) * N  # keys of a split
            low = tl.minimum(split * share, last)
            high = tl.minimum(low + share, last)
            whole = (
                tl.minimum(hidden + first + 1, keys) // N * N
            )  # every query of the tile sees all of these
            whole = tl.minimum(tl.maximum(whole, low), high)
            table = tables + sequence.to(tl.int64) * table_stride
            mixed = tl.zeros((QUERIES * GROUPS, DIM), tl.float32)
            top = tl.full((QUERIES * GROUPS,), float("-inf"), tl.float32)
            norm = tl.zeros((QUERIES * GROUPS,), tl.float32)
            mixed, top, norm = _attend_keys(
                tile_q, mixed, top, norm, low, whole, keys, seen, keys_at, values_at, table, scale,
                block_stride, DIM, BLOCK, N, False, PRECISION,
            )  # fmt: skip
            mixed, top, norm = _attend_keys(
                tile_q, mixed, top, norm, whole, high, keys, seen, keys_at, values_at, table, scale,
                block_stride, DIM, BLOCK, N, True, PRECISION,
            )  # fmt: skip
            if used == 1:
                mixed = mixed / tl.where(norm == 0.0, 1.0, norm)[:, None]
                tl.store(out + place, mixed.to(out.dtype.element_ty), mask=real[:, None])
            elif SPLITS > 1:
                part = row * SPLITS + split
                tl.store(parts + part[:, None] * DIM + d[None, :], mixed, mask=real[:, None])
                tl.store(tops + part, top, mask=real)
                tl.store(norms + part, norm, mask=real)
                tl.debug_barrier()
                counter = counters + (begin + first) * KV_HEADS + kv
                if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
                    tl.store(counter, 0)
                    _add_up(out, parts, tops, norms, row, place, real, used, d, DIM, SPLITS)


@triton.jit
def _add_up(
    out, parts, tops, norms, row, place, real, used, d, DIM: tl.constexpr, SPLITS: tl.constexpr
):
    """The parts of a tile, in their order. A query may see no key of a part but the first: its top
    is -inf there."""
    highest = tl.load(tops + row * SPLITS, mask=real, other=0.0, cache_modifier=".cg")
    for split in range(1, used):
        highest = tl.maximum(
            highest,
            tl.load(tops + row * SPLITS + split, mask=real, other=0.0, cache_modifier=".cg"),
        )
    norm = tl.zeros_like(highest)
    mixed = tl.zeros_like(place).to(tl.float32)
    for split in range(used):
        part = row * SPLITS + split
        share = tl.exp2(tl.load(tops + part, mask=real, other=0.0, cache_modifier=".cg") - highest)
        norm += share * tl.load(norms + part, mask=real, other=1.0, cache_modifier=".cg")
        values = parts + part[:, None] * DIM + d[None, :]
        mixed += share[:, None] * tl.load(
            values, mask=real[:, None], other=0.0, cache_modifier=".cg"
        )
    tl.store(out + place, (mixed / norm[:, None]).to(out.dtype.element_ty), mask=real[:, None])


def launch_for(heads: int, kv_heads: int, dim: int, rows: int) -> dict[str, int]:
    # With few rows there are few tiles: smaller ones, to have more of them at work, and their keys
    # split.
    few = rows <= 128
    tiles = kv_heads * -(-rows // 8)
    splits = min(MAX_SPLITS, 1 << max(0, (PROGRAMS // tiles).bit_length() - 1)) if few else 1
    default = {"QUERIES": 8 if few else 16, "N": 64, "KEYS": 128, "SPLITS": splits,
        "num_warps": 4 if few else 8,
               "num_stages": 3}  # fmt: skip
    return config(
        "prefill_attend", (heads, kv_heads, dim, int(triton.next_power_of_2(rows))), default
    )


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    launch: dict[str, int] | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of q [rows, heads, dim] over one layer's cache [2, blocks, kv heads, block
    size, dim].

    Sequence s has the queries of rows starts[s] to starts[s + 1] (int32, one more entry than
    sequences), the last of its lengths[s] keys, whose blocks are in tables[s]. It may have none.
    Rows behind starts[-1] come out as zeros. `counters` [rows * kv heads] int32 are 0 between calls
    and nobody else's meanwhile; without them each call makes its own."""
    rows, heads, dim = q.shape
    _, _, kv_heads, block, _ = cache.shape
    sequences = lengths.shape[0]
    group = heads // kv_heads
    groups = triton.next_power_of_2(group)
    launch = launch_for(heads, kv_heads, dim, rows) | (launch or {})
    queries = max(launch["QUERIES"], -(-16 // groups))
    if limits(q.device).capability[0] == 10 and launch["SPLITS"] == 1:
        # Triton 3.6 fails to compile this loop with products of 64 rows or more for sm_100
        queries = min(queries, max(1, 32 // groups))
    out = torch.empty_like(q)
    splits = launch["SPLITS"]
    parts = q.new_empty(rows, heads, splits, dim, dtype=torch.float32) if splits > 1 else None
    tops, norms = (
        q.new_empty(2, rows, heads, splits, dtype=torch.float32) if splits > 1 else (None, None)
    )
    if splits == 1:
        counters = None
    elif counters is None:
        counters = q.new_zeros(rows * kv_heads, dtype=torch.int32)
    assert counters is None or len(counters) >= rows * kv_heads, "a counter for each tile"
    tiles = rows // queries + min(sequences, rows) + 1  # at most
    programs = min(tiles, triton.cdiv(rows, queries) + SPARE) if splits > 1 else tiles
    _attend[(kv_heads, programs, splits)](
        q, cache, out, parts, tops, norms, counters, starts, lengths, tables, sequences, rows,
        tables.stride(0),
        cache.shape[1], dim**-0.5 * LOG2_E,
        GROUP=group, GROUPS=groups, KV_HEADS=kv_heads, DIM=dim, BLOCK=block,
        SEARCH=max(16, triton.next_power_of_2(sequences + 1)),
        PRECISION=precision(q), **launch | {"QUERIES": queries},
    )  # fmt: skip
    return out
