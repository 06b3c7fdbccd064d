"""Attention of a decode step: norm and rotation of the new query and key, the cache write, and the
attention itself.

`decode` works on the paged cache, one query per row: the keys of a row are split over several
programs, and the last of them to finish adds their parts up. What was in the cache before this step
is asked for while the kernel before this one still runs; the new key and value come from registers.
`frame` does the same for the code predictor, whose rows all stand at one position of a small cache.
Launch protocol as in `linear`. Reference: `stretto.kernels.reference.paged` and
`stretto.models.speech.code_predictor.FramePass`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.triton.device import protocol
from stretto.kernels.triton.linear import dot
from stretto.kernels.triton.tuning import config

MAX_SPLITS = 32  # programs per row and key head


@triton.jit
def _halves(at, D: tl.constexpr):
    """A vector [D] twice: as it is, and with its halves exchanged."""
    d = tl.arange(0, D)
    return tl.load(at + d).to(tl.float32), tl.load(at + (d + D // 2) % D).to(tl.float32)


@triton.jit
def _turned(x, y, gain, crossed, cos, sin, eps, D: tl.constexpr):
    """Heads x [rows, D], and y, the same with their halves exchanged (and so their gain,
    `crossed`): normalised and rotated, in float32."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    x = x * scale * gain[None, :]
    y = y * scale * crossed[None, :]
    y = tl.where((tl.arange(0, D) < D // 2)[None, :], -y, y)
    return x * cos[None, :] + y * sin[None, :]


@triton.jit
def _used(past, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """How many splits have work. Tiles of keys go round them, so that the first of each is the same
    at any length."""
    return tl.minimum(tl.maximum((past + BLOCK - 1) // BLOCK, 1), SPLITS)


@triton.jit
def _keys(
    layer, plane, table, key, known, past, HK: tl.constexpr, D: tl.constexpr, BS: tl.constexpr
):
    """Keys and values at positions `key` before `past`; where they lie is looked up for those that
    are `known`. (Past the first-level cache: before the wait it could be older than this step.)"""
    block = tl.load(table + key // BS, mask=known, other=0, cache_modifier=".cg").to(tl.int64)
    at = layer + (block * (HK * BS * D) + (key % BS) * D)[:, None] + tl.arange(0, D)[None, :]
    seen = (key < past)[:, None]
    k = tl.load(at, mask=seen, other=0.0, cache_modifier=".cg")
    return k, tl.load(at + plane, mask=seen, other=0.0, cache_modifier=".cg")


@triton.jit
def _add_up(
    out, parts, maxima, sums, first, used,
    D: tl.constexpr, GP: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The splits of the heads from `first` on, added up. Every load is on its way before the first
    is looked at (as volatile ones they were a round trip each), and past the first-level cache,
    which does not hear of others' writes. No thread needs anything from another."""
    g, d = tl.arange(0, GP), tl.arange(0, D)
    heads, mine = g < GROUP, (first + g) * SPLITS
    high = tl.where(heads, float("-inf"), 0.0)
    for i in tl.static_range(SPLITS):
        mask = heads & (i < used)
        high = tl.maximum(
            high, tl.load(maxima + mine + i, mask=mask, other=float("-inf"), cache_modifier=".cg")
        )
    total = tl.where(heads, 0.0, 1.0)
    acc = tl.zeros([GP, D], tl.float32)
    for i in tl.static_range(SPLITS):
        mask = heads & (i < used)
        top = tl.load(maxima + mine + i, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            parts + (mine + i)[:, None] * D + d[None, :],
            mask=mask[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        share = tl.exp(top - high)
        total += share * tl.load(sums + mine + i, mask=mask, other=0.0, cache_modifier=".cg")
        acc += part * share[:, None]
    to = out + (first + g)[:, None] * D + d[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), heads[:, None])


@triton.jit(do_not_specialize=["num_blocks"])
def _decode(
    qkv, q_gain, k_gain, cos, sin, cache, slots, tables, lengths, out, parts, maxima, sums,
    counters,
    eps, scale, num_blocks, width,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, GROUP: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, SOON: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one row and key head. Split 0 also has the new key, which it writes.
    The parts are added up by the last program to finish. SOON: the next kernel may start, and read
    its weights, as soon as the queries are there; with many rows those weights would stand in the
    way of keys that are still to come."""
    m, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # Before the wait, nothing may come from the first-level cache: it could be older than this
    # step.
    past = tl.load(lengths + m, cache_modifier=".cg") - 1  # keys in the cache before this step
    table = tables + m * width
    used = _used(past, BLOCK, SPLITS)
    if split < used:
        g = tl.arange(0, GP)
        heads = g < GROUP
        d = tl.arange(0, D)
        plane = num_blocks.to(tl.int64) * (HK * BS * D)  # from keys to values
        layer = cache + head * (BS * D)
        key = split * BLOCK + tl.arange(0, BLOCK)
        # Where the first ones lie does not wait for the length: what is found beyond it is never
        # used.
        k, v = _keys(layer, plane, table, key, key // BS < width, past, HK, D, BS)
        # Small things that are far away: asked for before the wait too, and the new rows all at
        # once after it.
        gain_q, crossed_q = _halves(q_gain, D)
        gain_k, crossed_k = _halves(k_gain, D)
        cosine = tl.load(cos + m * D + d, cache_modifier=".cg").to(tl.float32)
        sine = tl.load(sin + m * D + d, cache_modifier=".cg").to(tl.float32)
        slot = tl.load(slots + m, cache_modifier=".cg")
        one = tl.arange(0, 1)
        other = (d + D // 2) % D
        row = qkv + m * ((HQ + 2 * HK) * D)
        from_q = row + ((head * GROUP + g) * D)[:, None]
        from_k = row + ((HQ + head) * D + one)[:, None]
        if PDL:
            gdc_wait()
        x = tl.load(from_q + d[None, :], mask=heads[:, None], other=0.0).to(tl.float32)
        y = tl.load(from_q + other[None, :], mask=heads[:, None], other=0.0).to(tl.float32)
        new_x = tl.load(from_k + d[None, :]).to(tl.float32)
        new_y = tl.load(from_k + other[None, :]).to(tl.float32)
        new_v = tl.load(row + (HQ + HK + head) * D + d)
        q = (_turned(x, y, gain_q, crossed_q, cosine, sine, eps, D) * scale).to(k.dtype)
        if PDL and SOON:
            gdc_launch_dependents()
        acc = tl.zeros([GP, D], tl.float32)
        top = tl.zeros([GP], tl.float32) + float("-inf")
        total = tl.zeros([GP], tl.float32)
        if split == 0:
            new_k = tl.reshape(
                _turned(new_x, new_y, gain_k, crossed_k, cosine, sine, eps, D), [D]
            ).to(k.dtype)
            to = layer + (slot // BS) * (HK * BS * D) + (slot % BS) * D + d
            tl.store(to, new_k)
            tl.store(to + plane, new_v)
            top = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1)
            total += 1.0
            acc += new_v.to(tl.float32)[None, :]
        first = split * BLOCK
        while first < past:
            scores = dot(q, k.T, tl.zeros([GP, BLOCK], tl.float32))
            scores = tl.where((key < past)[None, :], scores, float("-inf"))
            high = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(high == float("-inf"), 0.0, high)
            p = tl.exp(scores - safe[:, None])
            fade = tl.exp(top - safe)
            total = total * fade + tl.sum(p, 1)
            acc = dot(p.to(v.dtype), v, acc * fade[:, None])
            top = high
            first += SPLITS * BLOCK
            key += SPLITS * BLOCK
            k, v = _keys(layer, plane, table, key, key < past, past, HK, D, BS)
        if PDL and not SOON:
            gdc_launch_dependents()
        mine = m * HQ + head * GROUP + g
        if used == 1:
            tl.store(
                out + mine[:, None] * D + d[None, :],
                (acc / total[:, None]).to(out.dtype.element_ty),
                heads[:, None],
            )
        else:
            tl.store(maxima + mine * SPLITS + split, top, heads)
            tl.store(sums + mine * SPLITS + split, total, heads)
            tl.store(parts + (mine * SPLITS + split)[:, None] * D + d[None, :], acc, heads[:, None])
            tl.debug_barrier()
            if tl.atomic_add(counters + m * HK + head, 1, sem="acq_rel") == used - 1:
                tl.store(counters + m * HK + head, 0)
                first = m * HQ + head * GROUP
                _add_up(
                    out,
                    parts,
                    maxima,
                    sums,
                    first,
                    used,
                    D,
                    triton.next_power_of_2(GROUP),
                    GROUP,
                    SPLITS,
                )


@triton.jit(do_not_specialize=["start"])
def _frame(
    qkv, q_gain, k_gain, cos, sin, cache, out, eps, scale, start, plane, row_stride,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and key head of the code predictor: positions [start, start + QUERIES), keys in
    [rows, HK, P, D]."""
    m, head = tl.program_id(0), tl.program_id(1)
    d, g, p, one = tl.arange(0, D), tl.arange(0, GROUP), tl.arange(0, P), tl.arange(0, 1)
    at = cache + m * row_stride + head * (P * D) + p[:, None] * D + d[None, :]
    past = (p < start)[:, None]
    k = tl.load(at, mask=past, other=0.0, cache_modifier=".cg").to(
        tl.float32
    )  # before the wait: as in `_decode`
    v = tl.load(at + plane, mask=past, other=0.0, cache_modifier=".cg").to(tl.float32)
    gain_q, crossed_q = _halves(q_gain, D)
    gain_k, crossed_k = _halves(k_gain, D)
    other = (d + D // 2) % D
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in tl.static_range(QUERIES):
        here = start + i
        row = qkv + (m * QUERIES + i) * ((HQ + 2 * HK) * D)
        from_q = row + ((head * GROUP + g) * D)[:, None]
        from_k = row + ((HQ + head) * D + one)[:, None]
        x = tl.load(from_q + d[None, :]).to(tl.float32)
        y = tl.load(from_q + other[None, :]).to(tl.float32)
        new_x = tl.load(from_k + d[None, :]).to(tl.float32)
        new_y = tl.load(from_k + other[None, :]).to(tl.float32)
        new_v = tl.load(row + (HQ + HK + head) * D + d)
        cosine = tl.load(cos + here * D + d).to(tl.float32)
        sine = tl.load(sin + here * D + d).to(tl.float32)
        new_k = _turned(new_x, new_y, gain_k, crossed_k, cosine, sine, eps, D)
        new_k = tl.reshape(new_k, [D]).to(cache.dtype.element_ty)
        to = cache + m * row_stride + head * (P * D) + here * D + d
        tl.store(to, new_k)
        tl.store(to + plane, new_v)
        k = tl.where((p == here)[:, None], new_k.to(tl.float32)[None, :], k)
        v = tl.where((p == here)[:, None], new_v.to(tl.float32)[None, :], v)
        q = _turned(x, y, gain_q, crossed_q, cosine, sine, eps, D)
        q = q.to(cache.dtype.element_ty).to(tl.float32) * scale
        scores = tl.sum(q[:, None, :] * k[None, :, :], 2)
        scores = tl.where((p <= here)[None, :], scores, float("-inf"))
        share = tl.exp(scores - tl.max(scores, 1)[:, None])
        share = share / tl.sum(share, 1)[:, None]
        value = tl.sum(share[:, :, None] * v[None, :, :], 1)
        to_out = out + (m * QUERIES + i) * (HQ * D) + (head * GROUP + g)[:, None] * D + d[None, :]
        tl.store(to_out, value.to(out.dtype.element_ty))


def decode(
    qkv: torch.Tensor,
    gains: tuple[torch.Tensor, torch.Tensor, float],
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    counters: torch.Tensor,
    heads: int,
    tuned: dict[str, int] | None = None,
) -> torch.Tensor:
    """qkv [rows, (heads + 2 kv heads) * dim] of one layer -> attention output [rows, heads * dim].

    `gains`: weights of the query and key norms, and their epsilon. `cache` is the layer's, [2,
    blocks, kv heads, block size, dim]; `tables` [rows, blocks] int32 say where the rows' keys lie;
    `counters` [rows * kv heads] int32 are 0 between calls."""
    rows = qkv.shape[0]
    _, blocks, kv_heads, block_size, dim = cache.shape
    group = heads // kv_heads
    splits = triton.next_power_of_2(max(1, min(MAX_SPLITS // 2, 512 // (rows * kv_heads))))
    default = {"BLOCK": 64, "SPLITS": splits, "warps": 4, "soon": int(rows <= 8)}
    c = (
        config("decode", (triton.next_power_of_2(rows), heads, kv_heads), default)
        if tuned is None
        else tuned
    )
    splits = c["SPLITS"]
    out = qkv.new_empty(rows, heads * dim)
    parts = qkv.new_empty(rows, heads, splits, dim, dtype=torch.float32)
    scores = qkv.new_empty(2, rows, heads, splits, dtype=torch.float32)
    _decode[(rows, kv_heads, splits)](
        qkv, gains[0], gains[1], cos, sin, cache, slots, tables, lengths, out, parts, scores[0],
        scores[1],
        counters, gains[2], dim**-0.5, blocks, tables.stride(0),
        HQ=heads, HK=kv_heads, D=dim, BS=block_size, GROUP=group, GP=max(16,
        triton.next_power_of_2(group)),
        BLOCK=c["BLOCK"], SPLITS=splits, SOON=bool(c.get("soon", 0)), num_warps=c["warps"],
        **protocol(qkv),
    )  # fmt: skip
    return out


def frame(
    qkv: torch.Tensor,
    gains: tuple[torch.Tensor, torch.Tensor, float],
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    start: int,
    queries: int,
    heads: int,
) -> torch.Tensor:
    """The code predictor's attention: qkv [rows * queries, ...] at positions from `start` on, `cos`
    and `sin` of all positions [positions, dim], one layer's cache [2, rows or more, kv heads,
    positions, dim]."""
    rows = qkv.shape[0] // queries
    c = config("frame", (1 if rows == 1 else 2, heads), {"warps": 4})
    _, _, kv_heads, positions, dim = cache.shape
    out = qkv.new_empty(qkv.shape[0], heads * dim)
    _frame[(rows, kv_heads)](
        qkv, gains[0], gains[1], cos, sin, cache, out, gains[2], dim**-0.5, start, cache.stride(0),
        cache.stride(1),
        HQ=heads, HK=kv_heads, D=dim, P=positions, GROUP=heads // kv_heads, QUERIES=queries,
        num_warps=c["warps"], **protocol(qkv),
    )  # fmt: skip
    return out
