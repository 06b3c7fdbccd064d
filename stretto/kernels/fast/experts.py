"""The mixture of experts for a few rows: router, expert projections, weighted sum. Reads each chosen expert once.

The router is a plain product. One row then runs `up_one` and `down_one` as matrix-vector products over its experts,
whose programs find them in the logits by themselves. With more rows, `choose` makes a table of who chose whom for `up`
and `down`, whose grids go over all experts: a program whose expert nobody chose leaves at once, the others gather the
rows that chose it, a tile at a time, for the matrix units; a last kernel adds each row's results in order, so that the
sum never depends on which program came first.

A shared expert (all rows, weighted by a sigmoid gate) is split into pieces as wide as the others and joins them as
further experts. Weights may be float8 with a scale per output row (not beside a shared expert): half the bytes, widened
as they arrive, the scale applied to the sum. Launch protocol as in `linear`. Reference: `stretto.kernels.moe` and
`stretto.layers.mlp.MoeMLP`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.fast.linear import Gained, dot, fetch, pdl, project, protocol, tile_rows, widen
from stretto.kernels.fast.tuning import config


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One layer's experts as they lie in memory, and the norm in front of them."""

    gain: torch.Tensor
    eps: float
    router: torch.Tensor  # [experts, hidden]; with a shared expert its gate is one more row
    gate_up: torch.Tensor  # [experts, 2 * size, hidden]
    down: torch.Tensor  # [experts, hidden, size]
    top_k: int
    norm_topk: bool
    shared_gate_up: torch.Tensor | None = None  # [2 * shared size, hidden]
    shared_down: torch.Tensor | None = None  # [hidden, shared size]
    scales: tuple[torch.Tensor, torch.Tensor] | None = None  # of gate_up [experts, 2 * size] and down [experts, hidden]

    def __post_init__(self) -> None:
        assert self.scales is None or self.shared_down is None, "a shared expert is read as one of the others"

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    @property
    def pieces(self) -> int:
        """Experts that the shared one counts for."""
        return 0 if self.shared_down is None else self.shared_down.shape[1] // self.down.shape[2]

    @property
    def slots(self) -> int:
        """Expert results per row."""
        return self.top_k + self.pieces


@triton.jit
def _ranks(logits, E: tl.constexpr, TOP: tl.constexpr, RENORM: tl.constexpr):
    """Of one row's logits [E]: each expert's rank, which is how many go before it (ties: the lower number does), so all
    are placed at once; and its weight, if it is among the first TOP."""
    e = tl.arange(0, E)
    scores = tl.load(logits + e, volatile=True).to(tl.float32)
    # What is not a number compares with nothing, and places would stay empty: addresses are made from them. (The
    # weights come out as what they are, so that it shows in the end.)
    scores = tl.where(scores == scores, scores, float("-inf"))
    before = (scores[None, :] > scores[:, None]) | ((scores[None, :] == scores[:, None]) & (e[None, :] < e[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
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
def _sortable(logits, E: tl.constexpr):
    """One row's logits [E], and integers in the same order, all different: the lower bits count down the experts, so of
    equal ones the lower number is the larger. (Past the first-level cache, as before every wait: it may be older.)"""
    e = tl.arange(0, E)
    scores = tl.load(logits + e, cache_modifier=".cg").to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))  # what is not a number must leave no place empty
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if logits.dtype.element_ty == tl.float32:
        order = (bits.to(tl.int64) << 32) | (E - 1 - e)
    else:  # half of the bits are zero in what was 16 bits wide
        order = (bits & -8192) | (E - 1 - e)
    return scores, order


@triton.jit
def _without(order, largest):
    """The same, but the largest last."""
    lowest: tl.constexpr = -(2**63) if order.dtype == tl.int64 else -(2**31)
    return tl.where(order == largest, lowest, order)


@triton.jit
def _up_scales(scales, e, n, SIZE: tl.constexpr, SCALED: tl.constexpr):
    """Scales of gate and up rows n of expert e [as n]; ones if there are none."""
    gate = n * 0 + 1.0
    up = gate
    if SCALED:
        gate = tl.load(scales + e * (2 * SIZE) + n)
        up = tl.load(scales + e * (2 * SIZE) + SIZE + n)
    return gate, up


@triton.jit
def _up_vector(
    x, gain, logits, gate_up, scales, shared_gate_up, out, ahead, eps, lines, each,
    K: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, SCALED: tl.constexpr, TOP: tl.constexpr,
    BN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row through BN columns of one of its experts: silu(gate) * up. While the router still decides whose weights
    to read, memory stands idle: the first programs ask for `lines` cache lines at `ahead`, needed next."""
    slot = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, K)
    g = tl.load(gain + k).to(tl.float32)
    if AHEAD:
        first = (slot * tl.num_programs(0) + tl.program_id(0)) * each
        if first < lines:
            line = first + tl.arange(0, AHEAD)
            fetch(ahead + tl.minimum(line, lines - 1).to(tl.int64) * 64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: `down` may read the logits before its own
    _, order = _sortable(logits, E)
    largest = tl.max(order, 0)
    for _ in range(tl.minimum(slot, TOP - 1)):
        order = _without(order, largest)
        largest = tl.max(order, 0)
    e = E - 1 - (largest & (E - 1)).to(tl.int32)
    if PIECES > 0:
        e = tl.where(slot < TOP, e, E + slot - TOP)
    base = gate_up + e.to(tl.int64) * (2 * SIZE * K)
    apart = SIZE * K  # from a gate row to its up row
    if PIECES > 0:
        if e >= E:
            base = shared_gate_up + (e - E).to(tl.int64) * (SIZE * K)
            apart = PIECES * SIZE * K
    gate = base + n[:, None] * K + k[None, :]
    wg = tl.load(gate, eviction_policy="evict_first")
    wu = tl.load(gate + apart, eviction_policy="evict_first")
    of_gate, of_up = _up_scales(scales, e, n, SIZE, SCALED)
    xs = tl.load(x + k).to(tl.float32)
    scale = tl.rsqrt(tl.sum(xs * xs, 0) / K + eps)
    xs = xs * g
    a = tl.sum(wg.to(tl.float32) * xs[None, :], 1) * (scale * of_gate)
    b = tl.sum(wu.to(tl.float32) * xs[None, :], 1) * (scale * of_up)
    tl.store(out + slot * SIZE + n, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty))


@triton.jit
def _down_vector(
    h, logits, down, scales, shared_down, x,
    H: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, SCALED: tl.constexpr, TOP: tl.constexpr,
    RENORM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of the weighted sum over a row's experts, added to the residual stream x in place. All slots are asked
    for at once: one tile [slots, BN, BK] per piece of the experts' width."""
    SLOTS: tl.constexpr = TOP + PIECES
    slot = tl.arange(0, triton.next_power_of_2(SLOTS))
    there = slot < SLOTS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # The logits are complete: before any program of the kernel in front let this one start, it had waited for them.
    scores, order = _sortable(logits, E)
    e = tl.maximum(E + slot - TOP, 0)  # right from TOP on
    for i in tl.static_range(TOP):
        largest = tl.max(order, 0)
        order = _without(order, largest)
        e = tl.where(slot == i, E - 1 - (largest & (E - 1)).to(tl.int32), e)
    high = tl.max(scores, 0)
    weight = tl.exp(
        tl.load(logits + e, mask=slot < TOP, other=float("-inf"), cache_modifier=".cg").to(tl.float32) - high
    )
    if RENORM:
        weight = weight / tl.sum(weight, 0)
    else:
        weight = weight / tl.sum(tl.exp(scores - high), 0)
    base = down + e.to(tl.int64) * (H * SIZE)
    width = slot * 0 + SIZE
    if PIECES > 0:
        gate = tl.sigmoid(tl.load(logits + E, cache_modifier=".cg").to(tl.float32))
        weight = tl.where(slot < TOP, weight, gate)
        base = tl.where(e >= E, shared_down + (e - E) * SIZE, base)
        width = tl.where(e >= E, PIECES * SIZE, SIZE)
    weight = weight.to(x.dtype.element_ty).to(tl.float32)[:, None]  # rounded as the reference does
    at = base[:, None, None] + n[None, :, None] * width[:, None, None] + k[None, None, :]
    mask = there[:, None, None]
    first = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    factor = tl.where(there[:, None], weight, 0.0)
    if SCALED:
        factor = factor * tl.load(scales + e[:, None] * H + n[None, :], mask=there[:, None], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.load(x + n).to(tl.float32)
    from_h = h + slot[:, None] * SIZE + k[None, :]
    hi = tl.load(from_h, mask=there[:, None], other=0.0).to(tl.float32)
    acc = first.to(tl.float32) * hi[:, None, :]
    for i in tl.static_range(1, SIZE // BK):
        wi = tl.load(at + i * BK, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        hi = tl.load(from_h + i * BK, mask=there[:, None], other=0.0).to(tl.float32)
        acc += wi * hi[:, None, :]
    total = tl.sum(tl.sum(acc, 2) * factor, 0) + before
    tl.store(x + n, total.to(x.dtype.element_ty))


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
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    base = gate_up + e.to(tl.int64) * (2 * SIZE * K)
    apart = SIZE * K
    if PIECES > 0:
        if e >= E:
            base = shared_gate_up + (e - E) % PIECES * (SIZE * K)
            apart = PIECES * SIZE * K
    gate = base + n[:, None] * K + k[None, :]
    for tile in range(tl.cdiv(count, BM)):
        if tile > 0:
            places, _ = _takers(table, e, tile, M, E, PIECES, TOP, BM, BR)
        taken, m = places >= 0, places // (TOP + PIECES)
        scale = tl.load(row_scales + m, mask=taken, other=0.0)[:, None]
        from_x = x + m[:, None] * K + k[None, :]
        a = _none(BM, BN, SWAP)
        b = _none(BM, BN, SWAP)
        for i in range(0, K, BK):
            xi = tl.load(from_x + i, mask=taken[:, None], other=0.0)
            a = _times(tl.load(gate + i), xi, a, SWAP, PDL)
            b = _times(tl.load(gate + apart + i), xi, b, SWAP, PDL)
        if SWAP:
            a, b = a.T, b.T
        of_gate, of_up = _up_scales(scales, e, n, SIZE, SCALED)
        a *= scale * of_gate[None, :]
        h = a * tl.sigmoid(a) * (b * (scale * of_up[None, :]))
        tl.store(out + places[:, None] * SIZE + n[None, :], h.to(out.dtype.element_ty), mask=taken[:, None])


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
    k = tl.arange(0, BK)
    base = down + e.to(tl.int64) * (H * SIZE)
    width = SIZE
    if PIECES > 0:
        if e >= E:
            base = shared_down + (e - E) % PIECES * SIZE
            width = PIECES * SIZE
    at = base + n[:, None] * width + k[None, :]
    for tile in range(tl.cdiv(count, BM)):
        if tile > 0:
            places, _ = _takers(table, e, tile, M, E, PIECES, TOP, BM, BR)
        taken = places >= 0
        weight = tl.load(weights + places, mask=taken, other=0.0, cache_modifier=".cg")
        from_h = h + places[:, None] * SIZE + k[None, :]
        acc = _none(BM, BN, SWAP)
        for i in range(0, SIZE, BK):
            hi = tl.load(from_h + i, mask=taken[:, None], other=0.0)
            acc = _times(tl.load(at + i), hi, acc, SWAP, PDL)
        if SWAP:
            acc = acc.T
        if SCALED:
            acc *= tl.load(scales + e * H + n)[None, :]
        tl.store(out + places[:, None] * H + n[None, :], acc * weight[:, None], mask=taken[:, None])


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


def _chunk(size: int, most: int) -> int:
    """The largest power of two that divides `size`, up to `most`."""
    return min(size & -size, most)


FETCHERS = 1024  # programs of `_up_vector` that are there while the router decides, about
MOST_AHEAD = 24 << 20  # bytes: about half of the cache


def _common(x: torch.Tensor, w: ExpertWeights) -> dict[str, int | bool]:
    return {
        "E": w.num_experts,
        "SIZE": w.down.shape[2],
        "PIECES": w.pieces,
        "SCALED": w.scales is not None,
        **protocol(x),
    }


def _tuned(kernel: str, w: ExpertWeights, key: tuple[int, ...], default: dict[str, int]) -> dict[str, int]:
    """Launch parameters; float8 weights have their own."""
    return config(kernel if w.scales is None else f"{kernel}_float8", key, default)


def up_one(
    x: torch.Tensor,
    logits: torch.Tensor,
    w: ExpertWeights,
    ahead: torch.Tensor | None = None,
    tuned: dict[str, int] | None = None,
) -> torch.Tensor:
    """For one row x [1, hidden] of the residual stream and its router's logits: silu(gate) * up of its experts [slots,
    expert size]. `ahead`: weights (bfloat16, contiguous) of what comes after this layer, to get on their way."""
    hidden, size = x.shape[1], w.down.shape[2]
    c = _tuned("up_vector", w, (size, hidden), {"BN": 2, "warps": 4}) if tuned is None else tuned
    h = x.new_empty(w.slots, size)
    lines = 0 if ahead is None or not pdl(x) else min(ahead.nbytes, MOST_AHEAD) // 128
    each = triton.cdiv(lines, min(FETCHERS, size // c["BN"] * w.slots))
    _up_vector[(size // c["BN"], w.slots)](
        x, w.gain, logits, w.gate_up, x if w.scales is None else w.scales[0],
        w.gate_up if w.shared_gate_up is None else w.shared_gate_up, h, x if ahead is None else ahead,
        w.eps, lines, each,
        K=hidden, TOP=w.top_k, BN=c["BN"], AHEAD=triton.next_power_of_2(each) if lines else 0, num_warps=c["warps"],
        **_common(x, w),
    )  # fmt: skip
    return h


def down_one(
    h: torch.Tensor, logits: torch.Tensor, w: ExpertWeights, x: torch.Tensor, tuned: dict[str, int] | None = None
) -> None:
    """x += the weighted sum of the row's experts, in place. Comes right after `up_one`, which its first reads rely
    on."""
    hidden, size = x.shape[1], w.down.shape[2]
    default = {"BN": 4, "BK": _chunk(size, 128), "warps": 4}
    c = _tuned("down_vector", w, (hidden, size), default) if tuned is None else tuned
    _down_vector[(hidden // c["BN"],)](
        h, logits, w.down, x if w.scales is None else w.scales[1],
        w.down if w.shared_down is None else w.shared_down, x,
        H=hidden, TOP=w.top_k, RENORM=w.norm_topk, BN=c["BN"], BK=c["BK"], num_warps=c["warps"], **_common(x, w),
    )  # fmt: skip


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
        RENORM=w.norm_topk, num_warps=4, **protocol(logits),
    )  # fmt: skip
    return choice


def _tiles(rows: int, w: ExpertWeights, c: dict[str, int]) -> tuple[int, dict[str, int]]:
    """The experts' extent of the grid, and the rows of a tile. (Few rows choose the same expert: 16 will mostly do.)"""
    tile = c.get("BM", 16)
    return w.num_experts + w.pieces * triton.cdiv(rows, tile), {"BM": tile, "BR": max(tile, tile_rows(rows))}


def up(gained: Gained, choice: Choice, w: ExpertWeights, tuned: dict[str, int] | None = None) -> torch.Tensor:
    """silu(gate) * up of each row's experts: [rows, slots, expert size]."""
    rows, hidden = gained.x.shape
    size = w.down.shape[2]
    default = {"BN": 32, "BK": _chunk(hidden, 256), "warps": 4, "stages": 3}
    c = _tuned("up_matrix", w, (tile_rows(rows), size, hidden), default) if tuned is None else tuned
    h = gained.x.new_empty(rows, w.slots, size)
    numbers, tiles = _tiles(rows, w, c)
    _up_matrix[(size // c["BN"], numbers)](
        gained.x, choice.scales, choice.table, w.gate_up, choice.scales if w.scales is None else w.scales[0],
        w.gate_up if w.shared_gate_up is None else w.shared_gate_up, h, rows,
        K=hidden, TOP=w.top_k, BN=c["BN"], BK=c["BK"], SWAP=bool(c.get("swap", 0)),
        num_warps=c["warps"], num_stages=c["stages"], **tiles, **_common(gained.x, w),
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
    default = {"BN": 64, "BK": _chunk(size, 128), "warps": 4, "stages": 3}
    c = _tuned("down_matrix", w, (tile_rows(rows), hidden, size), default) if tuned is None else tuned
    parts = x.new_empty(rows, w.slots, hidden, dtype=torch.float32)
    numbers, tiles = _tiles(rows, w, c)
    _down_matrix[(hidden // c["BN"], numbers)](
        h, choice.table, w.down, x if w.scales is None else w.scales[1],
        w.down if w.shared_down is None else w.shared_down, choice.weights, parts, rows,
        H=hidden, TOP=w.top_k, BN=c["BN"], BK=c["BK"], SWAP=bool(c.get("swap", 0)),
        num_warps=c["warps"], num_stages=c["stages"], **tiles, **_common(x, w),
    )  # fmt: skip
    block = _chunk(hidden, 512)
    gained = None if following is None else Gained.empty(x, hidden // block, following[1])
    _add_slots[(hidden // block, rows)](
        parts, x, x if following is None else following[0], x if gained is None else gained.x,
        x if gained is None else gained.squares,
        H=hidden, BN=block, SLOTS=w.slots, EMIT=gained is not None, num_warps=4, **protocol(x),
    )  # fmt: skip
    return gained


def mixture_one(x: torch.Tensor, w: ExpertWeights, ahead: torch.Tensor | None = None) -> None:
    """x += experts(norm(x)), in place, for one row of the residual stream; `ahead` as in `up_one`."""
    logits = project(x, w.router, norm=(w.gain, w.eps))
    down_one(up_one(x, logits, w, ahead), logits, w, x)


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
