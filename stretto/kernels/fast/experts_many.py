"""The mixture of experts for several rows: each expert that somebody chose is read once.

The router is a plain product; `choose` makes a table of who chose whom for `up` and `down`, whose grids go over all
experts: a program whose expert nobody chose leaves at once, the others put the rows that chose it through the matrix
units (of many rows, gathered a tile at a time); a last kernel adds each row's results in order, so that the sum never
depends on which program came first. Weights, shared pieces and launch protocol as in `experts`, reference too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.fast.experts import ExpertWeights, chunk, common, sortable, tuned_for, up_scales, without
from stretto.kernels.fast.linear import Gained, dot, project, protocol, tile_rows, widen


@triton.jit
def _ranks(logits, E: tl.constexpr, TOP: tl.constexpr, RENORM: tl.constexpr):
    """Of one row's logits [E]: at which place each expert was chosen (TOP: not at all; ties: the lower number goes
    first), and its weight, if it was. One warp takes the largest of 128 integers in a few instructions, so it is done
    TOP times; comparing all with all took five times as long."""
    scores, order = sortable(logits, E)
    rank = tl.zeros([E], tl.int32) + TOP
    for i in tl.static_range(TOP):
        largest = tl.max(order, 0)
        rank = tl.where(order == largest, i, rank)
        order = without(order, largest)
    parts = tl.exp(scores - tl.max(scores, 0))
    if RENORM:
        total = tl.sum(tl.where(rank < TOP, parts, 0.0), 0)
    else:
        total = tl.sum(parts, 0)
    return rank, parts / total


@triton.jit(do_not_specialize=["P"])
def _top(
    logits, squares, table, weights, scales, eps, P,
    K: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr, BP: tl.constexpr, RENORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One of several rows: its column of the table [E, rows] (the slot of each expert, or -1), the weights of its slots
    [rows, SLOTS], and the factor that its norm comes to [rows]."""
    m, M = tl.program_id(0), tl.num_programs(0)
    e, p = tl.arange(0, E), tl.arange(0, BP)
    row = logits + m * (E + (1 if SLOTS > TOP else 0))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.sum(tl.load(squares + p * M + m, mask=p < P, other=0.0), 0)
    rank, weight = _ranks(row, E, TOP, RENORM)
    tl.store(table + e * M + m, tl.where(rank < TOP, rank, -1).to(tl.int8))
    tl.store(weights + m * SLOTS + rank, weight.to(logits.dtype.element_ty).to(tl.float32), mask=rank < TOP)
    tl.store(scales + m, tl.rsqrt(total / K + eps))
    if SLOTS > TOP:
        slot = tl.arange(0, triton.next_power_of_2(SLOTS))
        shared = tl.sigmoid(tl.load(row + E).to(tl.float32)).to(logits.dtype.element_ty).to(tl.float32)
        tl.store(weights + m * SLOTS + slot, shared + slot * 0.0, mask=(slot >= TOP) & (slot < SLOTS))


@triton.jit
def _takers(
    table, e, tile, M,
    E: tl.constexpr, PIECES: tl.constexpr, TOP: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Who chose expert e, by the table [E, M]: the places in [rows, slots] of the tile-th BM of them (-1: nobody),
    and how many there are. BR: M rows fit into it. A piece of the shared expert has a number for every BM rows."""
    SLOTS: tl.constexpr = TOP + PIECES
    j, m = tl.arange(0, BM), tl.arange(0, BR)
    # Past the first-level cache, as before every wait: it may be older than this step.
    slot = tl.load(table + e * M + m, mask=(m < M) & (e < E), other=-1, cache_modifier=".cg").to(tl.int32)
    rows = (slot >= 0).to(tl.int32)
    count = tl.sum(rows, 0)
    place = m * SLOTS + slot
    if BR == BM:
        places = tl.where(rows > 0, place, -1)
    else:
        number = tl.where(rows > 0, tl.cumsum(rows, 0) - 1, -1)
        places = tl.sum(tl.where(number[None, :] == (tile * BM + j)[:, None], place[None, :] + 1, 0), 1) - 1
    if PIECES > 0:
        if e >= E:
            row = (e - E) // PIECES * BM + j
            places = tl.where(row < M, row * SLOTS + TOP + (e - E) % PIECES, -1)
            count = count * 0 + 1
    return places, count


@triton.jit
def _times(w, x, acc, SWAP: tl.constexpr, PDL: tl.constexpr):
    """acc + x @ w.T, or its transpose, w [BN, BK] in whatever it is stored in."""
    if SWAP:
        return dot(widen(w, x, PDL), x.T, acc, PDL)
    else:
        return dot(x, widen(w, x, PDL).T, acc, PDL)


@triton.jit
def _none(BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr):
    return tl.zeros([BN if SWAP else BM, BM if SWAP else BN], tl.float32)


@triton.jit
def _up_tile(
    x, row_scales, gate, apart, scales, out, places, e, n,
    K: tl.constexpr, SIZE: tl.constexpr, SCALED: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SWAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    taken, m = places >= 0, places // SLOTS
    scale = tl.load(row_scales + m, mask=taken, other=0.0)[:, None]
    from_x = x + m[:, None] * K + tl.arange(0, BK)[None, :]
    a = _none(BM, BN, SWAP)
    b = _none(BM, BN, SWAP)
    for i in range(0, K, BK):
        xi = tl.load(from_x + i, mask=taken[:, None], other=0.0)
        a = _times(tl.load(gate + i), xi, a, SWAP, PDL)
        b = _times(tl.load(gate + apart + i), xi, b, SWAP, PDL)
    if SWAP:
        a, b = a.T, b.T
    of_gate, of_up = up_scales(scales, e, n, SIZE, SCALED)
    a *= scale * of_gate[None, :]
    h = a * tl.sigmoid(a) * (b * (scale * of_up[None, :]))
    tl.store(out + places[:, None] * SIZE + n[None, :], h.to(out.dtype.element_ty), mask=taken[:, None])


@triton.jit(do_not_specialize=["M"])
def _up_matrix(
    x, row_scales, table, gate_up, scales, shared_gate_up, out, M,
    K: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, SCALED: tl.constexpr, TOP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, SWAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The rows that chose one expert (as `Gained`, with what their norm comes to) through BN of its columns; results to
    their slots [rows, slots, SIZE]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.program_id(1)
    places, count = _takers(table, e, 0, M, E, PIECES, TOP, BM, BR)
    SLOTS: tl.constexpr = TOP + PIECES
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    base = gate_up + e.to(tl.int64) * (2 * SIZE * K)
    apart = SIZE * K
    if PIECES > 0:
        if e >= E:
            base = shared_gate_up + (e - E) % PIECES * (SIZE * K)
            apart = PIECES * SIZE * K
    gate = base + n[:, None] * K + tl.arange(0, BK)[None, :]
    if BR == BM:  # one tile holds them all: half the registers of the loop, and the next kernel gets in sooner
        if count > 0:
            _up_tile(
                x, row_scales, gate, apart, scales, out, places, e, n, K, SIZE, SCALED, SLOTS, BM, BN, BK, SWAP, PDL
            )
    else:
        for tile in range(tl.cdiv(count, BM)):
            if tile > 0:
                places, _ = _takers(table, e, tile, M, E, PIECES, TOP, BM, BR)
            _up_tile(
                x, row_scales, gate, apart, scales, out, places, e, n, K, SIZE, SCALED, SLOTS, BM, BN, BK, SWAP, PDL
            )


@triton.jit
def _down_tile(
    h, at, scales, weights, out, places, e, n,
    H: tl.constexpr, SIZE: tl.constexpr, SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    taken = places >= 0
    from_h = h + places[:, None] * SIZE + tl.arange(0, BK)[None, :]
    acc = _none(BM, BN, SWAP)
    for i in range(0, SIZE, BK):
        hi = tl.load(from_h + i, mask=taken[:, None], other=0.0)
        acc = _times(tl.load(at + i), hi, acc, SWAP, PDL)
    if SWAP:
        acc = acc.T
    if SCALED:
        acc *= tl.load(scales + e * H + n)[None, :]
    acc *= tl.load(weights + places, mask=taken, other=0.0)[:, None]
    tl.store(out + places[:, None] * H + n[None, :], acc, mask=taken[:, None])


@triton.jit(do_not_specialize=["M"])
def _down_matrix(
    h, table, down, scales, shared_down, weights, out, M,
    H: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, SCALED: tl.constexpr, TOP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, SWAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weighted results of one expert for the rows that chose it, to their slots [rows, slots, H], float32."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(1)
    places, count = _takers(table, e, 0, M, E, PIECES, TOP, BM, BR)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    base = down + e.to(tl.int64) * (H * SIZE)
    width = SIZE
    if PIECES > 0:
        if e >= E:
            base = shared_down + (e - E) % PIECES * SIZE
            width = PIECES * SIZE
    at = base + n[:, None] * width + tl.arange(0, BK)[None, :]
    if BR == BM:  # as in `_up_matrix`
        if count > 0:
            _down_tile(h, at, scales, weights, out, places, e, n, H, SIZE, SCALED, BM, BN, BK, SWAP, PDL)
    else:
        for tile in range(tl.cdiv(count, BM)):
            if tile > 0:
                places, _ = _takers(table, e, tile, M, E, PIECES, TOP, BM, BR)
            _down_tile(h, at, scales, weights, out, places, e, n, H, SIZE, SCALED, BM, BN, BK, SWAP, PDL)


@triton.jit
def _add_slots(
    parts, x, next_gain, gained, squares,
    H: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr, EMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x += the sum of a row's slots, in order. EMIT: also as `Gained`."""
    m = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    g = tl.zeros([BN], tl.float32)
    if EMIT:
        g = tl.load(next_gain + n).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.load(x + m * H + n).to(tl.float32)
    for s in tl.static_range(SLOTS):
        acc += tl.load(parts + (m * SLOTS + s) * H + n)
    rounded = acc.to(x.dtype.element_ty)
    tl.store(x + m * H + n, rounded)
    if EMIT:
        value = rounded.to(tl.float32)
        tl.store(gained + m * H + n, (value * g).to(gained.dtype.element_ty))
        tl.store(squares + tl.program_id(0) * tl.num_programs(1) + m, tl.sum(value * value, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Which experts several rows go to."""

    table: torch.Tensor  # [experts, rows] int8: at which of the row's slots, or -1
    weights: torch.Tensor  # [rows, slots] float32
    scales: torch.Tensor  # [rows] float32: what the rows' norm comes to


def route(gained: Gained, w: ExpertWeights, counters: torch.Tensor | None = None) -> torch.Tensor:
    """By what rows choose their experts: logits [rows, experts], with a column more for a shared expert. `gained` are
    the rows for the norm in front of the experts, `counters` as for `project`."""
    return project(gained, w.router, counters=counters)


def choose(logits: torch.Tensor, gained: Gained, w: ExpertWeights) -> Choice:
    rows, summed = len(logits), len(gained.squares)
    choice = Choice(
        table=logits.new_empty(w.num_experts, rows, dtype=torch.int8),
        weights=logits.new_empty(rows, w.slots, dtype=torch.float32),
        scales=logits.new_empty(rows, dtype=torch.float32),
    )
    _top[(rows,)](
        logits, gained.squares, choice.table, choice.weights, choice.scales, gained.eps, summed,
        K=gained.x.shape[1], E=w.num_experts, TOP=w.top_k, SLOTS=w.slots, BP=triton.next_power_of_2(summed),
        RENORM=w.norm_topk, num_warps=1, **protocol(logits),
    )  # fmt: skip
    return choice


def _tiles(rows: int, w: ExpertWeights, c: dict[str, int]) -> tuple[int, dict[str, int]]:
    """The experts' extent of the grid, and the rows of a tile: all, or of many 16 (few choose the same expert)."""
    tile = c.get("BM", tile_rows(rows) if rows <= 32 else 16)
    return w.num_experts + w.pieces * triton.cdiv(rows, tile), {"BM": tile, "BR": max(tile, tile_rows(rows))}


def up(gained: Gained, choice: Choice, w: ExpertWeights, tuned: dict[str, int] | None = None) -> torch.Tensor:
    """silu(gate) * up of each row's experts: [rows, slots, expert size]."""
    rows, hidden = gained.x.shape
    size = w.down.shape[2]
    default = {"BN": 32, "BK": chunk(hidden, 256), "warps": 4, "stages": 3}
    c = tuned_for("up_matrix", w, (tile_rows(rows), size, hidden), default) if tuned is None else tuned
    h = gained.x.new_empty(rows, w.slots, size)
    numbers, tiles = _tiles(rows, w, c)
    _up_matrix[(size // c["BN"], numbers)](
        gained.x, choice.scales, choice.table, w.gate_up, choice.scales if w.scales is None else w.scales[0],
        w.gate_up if w.shared_gate_up is None else w.shared_gate_up, h, rows,
        K=hidden, TOP=w.top_k, BN=c["BN"], BK=c["BK"], SWAP=bool(c.get("swap", 0)),
        num_warps=c["warps"], num_stages=c["stages"], **tiles, **common(gained.x, w),
    )  # fmt: skip
    return h


def down(
    h: torch.Tensor,
    choice: Choice,
    w: ExpertWeights,
    x: torch.Tensor,
    following: tuple[torch.Tensor, float] | None = None,
    tuned: dict[str, int] | None = None,
) -> Gained | None:
    """x += the weighted sum of each row's experts, in place; also as `Gained` for the `following` norm, if it is given
    (its weight and epsilon)."""
    rows, hidden = x.shape
    size = w.down.shape[2]
    default = {"BN": 64, "BK": chunk(size, 128), "warps": 4, "stages": 3}
    c = tuned_for("down_matrix", w, (tile_rows(rows), hidden, size), default) if tuned is None else tuned
    parts = x.new_empty(rows, w.slots, hidden, dtype=torch.float32)
    numbers, tiles = _tiles(rows, w, c)
    _down_matrix[(hidden // c["BN"], numbers)](
        h, choice.table, w.down, x if w.scales is None else w.scales[1],
        w.down if w.shared_down is None else w.shared_down, choice.weights, parts, rows,
        H=hidden, TOP=w.top_k, BN=c["BN"], BK=c["BK"], SWAP=bool(c.get("swap", 0)),
        num_warps=c["warps"], num_stages=c["stages"], **tiles, **common(x, w),
    )  # fmt: skip
    block = chunk(hidden, 512)
    gained = None if following is None else Gained.empty(x, hidden // block, following[1])
    _add_slots[(hidden // block, rows)](
        parts, x, x if following is None else following[0], x if gained is None else gained.x,
        x if gained is None else gained.squares,
        H=hidden, BN=block, SLOTS=w.slots, EMIT=gained is not None, num_warps=4, **protocol(x),
    )  # fmt: skip
    return gained


def mixture(
    x: torch.Tensor,
    gained: Gained,
    w: ExpertWeights,
    following: tuple[torch.Tensor, float] | None = None,
    counters: torch.Tensor | None = None,
) -> Gained | None:
    """The same for several rows; `gained` and `counters` as in `route`, `following` as in `down`."""
    choice = choose(route(gained, w, counters), gained, w)
    return down(up(gained, choice, w), choice, w, x, following)
