"""The mixture of experts for a few rows: router, expert projections, weighted sum. Reads each chosen expert once.

One row is routed by `route_one`, where the last program to finish chooses, and then runs `up_one` and `down_one` as
matrix-vector products over its experts. With more rows the grids of `up` and `down` go over all experts, and there is
no kernel that chooses: each program counts, for every row, how many logits go before its own expert's. If nobody chose
it, it leaves; else it gathers the rows that did, a tile at a time, for the matrix units. A last kernel weighs and adds
each row's results, in an order that never depends on which program came first.

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
def _choose(
    logits, like, ids, weights, shared,
    E: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr, RENORM: tl.constexpr,
):  # fmt: skip
    """Experts of one row by its logits [E]: ids and weights [SLOTS], the weights rounded to the type of `like`, as the
    reference does. An expert's rank is how many go before it (ties: the lower number does), so all are placed at once.
    Slots from TOP on are the shared pieces E, E + 1, ..."""
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
    tl.store(ids + rank, e, mask=rank < TOP)
    tl.store(weights + rank, (parts / total).to(like.dtype.element_ty).to(tl.float32), mask=rank < TOP)
    if SLOTS > TOP:
        piece = tl.arange(0, triton.next_power_of_2(SLOTS - TOP))
        tl.store(ids + TOP + piece, E + piece, mask=piece < SLOTS - TOP)
        tl.store(weights + TOP + piece, shared + piece * 0.0, mask=piece < SLOTS - TOP)


@triton.jit
def _route(
    x, gain, router, logits, ids, weights, counter, eps,
    K: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr,
    RENORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: logits of BE experts (the one after the last: the shared expert's gate). The last program to finish
    chooses: ids and weights [SLOTS]."""
    if PDL:
        gdc_launch_dependents()
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    k = tl.arange(0, K)
    inside = e < E + (1 if SLOTS > TOP else 0)
    w = tl.load(router + e[:, None] * K + k[None, :], mask=inside[:, None], other=0.0)
    g = tl.load(gain + k).to(tl.float32)
    if PDL:
        gdc_wait()
    xs = tl.load(x + k).to(tl.float32)
    acc = tl.sum(w.to(tl.float32) * (xs * g)[None, :], 1) * tl.rsqrt(tl.sum(xs * xs, 0) / K + eps)
    # rounded as the reference's router rounds: close calls must fall the same way
    tl.store(logits + e, acc.to(router.dtype.element_ty).to(tl.float32), mask=inside)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counter, 0)
        shared = 0.0
        if SLOTS > TOP:
            shared = tl.sigmoid(tl.load(logits + E, volatile=True))
        _choose(logits, gain, ids, weights, shared, E, TOP, SLOTS, RENORM)


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
    x, gain, gate_up, scales, shared_gate_up, ids, out, ahead, eps, lines, each,
    K: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, SCALED: tl.constexpr,
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
        gdc_launch_dependents()  # after the wait: `down` may read the ids before its own
    e = tl.load(ids + slot)
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
    h, down, scales, shared_down, ids, weights, x,
    H: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, SCALED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of the weighted sum over a row's experts, added to the residual stream x in place. All slots are asked
    for at once: one tile [slots, BN, BK] per piece of the experts' width."""
    slot = tl.arange(0, triton.next_power_of_2(SLOTS))
    there = slot < SLOTS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Written before any program of the kernel in front let this one start. (Past the first-level cache, as before
    # every wait: it may be older.)
    e = tl.load(ids + slot, mask=there, other=0, cache_modifier=".cg")
    base = down + e.to(tl.int64) * (H * SIZE)
    width = slot * 0 + SIZE
    if PIECES > 0:
        base = tl.where(e >= E, shared_down + (e - E) * SIZE, base)
        width = tl.where(e >= E, PIECES * SIZE, SIZE)
    at = base[:, None, None] + n[None, :, None] * width[:, None, None] + k[None, None, :]
    mask = there[:, None, None]
    first = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    weight = tl.load(weights + slot, mask=there, other=0.0, cache_modifier=".cg")[:, None]
    factor = weight
    if SCALED:
        factor = weight * tl.load(scales + e[:, None] * H + n[None, :], mask=there[:, None], other=0.0)
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
def _scores(at, mask):
    """Logits; what is not a number goes last. (Past the first-level cache, as before every wait: it may be older.)"""
    scores = tl.load(at, mask=mask, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    return tl.where(scores == scores, scores, float("-inf"))


@triton.jit
def _takers(
    logits, e, tile, M,
    E: tl.constexpr, PIECES: tl.constexpr, TOP: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Who chose expert e, by the logits [M, E or, with a shared expert, E + 1]: the places in [rows, slots] of the
    tile-th BM of them [BM] (-1: there is none), and how many there are. A row's slot is its expert's rank (ties: the
    lower number goes first; the shared pieces come after all). BR rows are looked at together."""
    SLOTS: tl.constexpr = TOP + PIECES
    L: tl.constexpr = E + (1 if PIECES > 0 else 0)
    wanted = tile * BM + tl.arange(0, BM)
    other = tl.arange(0, E)
    found = tl.zeros([BM], tl.int32)
    count = tl.program_id(0) * 0
    for first in range(0, M, BR):
        m = first + tl.arange(0, BR)
        rows = m < M
        own = tl.minimum(e, E - 1)
        mine = _scores(logits + m * L + own, rows)
        theirs = _scores(logits + m[:, None] * L + other[None, :], rows[:, None])
        before = (theirs > mine[:, None]) | ((theirs == mine[:, None]) & (other < own)[None, :])
        rank = tl.sum(before.to(tl.int32), 1)
        if PIECES > 0:
            rank = tl.where(e < E, rank, TOP + e - E)
            rows = rows & ((rank < TOP) | (e >= E))
        else:
            rows = rows & (rank < TOP)
        number = count + tl.cumsum(rows.to(tl.int32), 0) - 1
        hit = rows[None, :] & (number[None, :] == wanted[:, None])
        found += tl.sum(tl.where(hit, (m * SLOTS + rank + 1)[None, :], 0), 1)
        count += tl.sum(rows.to(tl.int32), 0)
    return found - 1, count


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


@triton.jit(do_not_specialize=["M", "P"])
def _up_matrix(
    x, squares, logits, gate_up, scales, shared_gate_up, out, chosen, eps, M, P,
    K: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, SCALED: tl.constexpr, TOP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, SWAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The rows (as `Gained`) that chose one expert through BN of its columns; results to their slots [rows, slots,
    SIZE], and the logits that they were chosen for [rows, slots]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    SLOTS: tl.constexpr = TOP + PIECES
    L: tl.constexpr = E + (1 if PIECES > 0 else 0)
    e = tl.program_id(1)
    places, count = _takers(logits, e, 0, M, E, PIECES, TOP, BM, BR)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    base = gate_up + e.to(tl.int64) * (2 * SIZE * K)
    apart = SIZE * K
    if PIECES > 0:
        if e >= E:
            base = shared_gate_up + (e - E).to(tl.int64) * (SIZE * K)
            apart = PIECES * SIZE * K
    gate = base + n[:, None] * K + k[None, :]
    p = tl.arange(0, BP)
    for tile in range(tl.cdiv(count, BM)):
        if tile > 0:
            places, _ = _takers(logits, e, tile, M, E, PIECES, TOP, BM, BR)
        taken, m = places >= 0, places // SLOTS
        from_x = x + m[:, None] * K + k[None, :]
        a = _none(BM, BN, SWAP)
        b = _none(BM, BN, SWAP)
        for i in range(0, K, BK):
            xi = tl.load(from_x + i, mask=taken[:, None], other=0.0)
            a = _times(tl.load(gate + i), xi, a, SWAP, PDL)
            b = _times(tl.load(gate + apart + i), xi, b, SWAP, PDL)
        if SWAP:
            a, b = a.T, b.T
        there = (p < P)[:, None] & taken[None, :]
        total = tl.sum(tl.load(squares + p[:, None] * M + m[None, :], mask=there, other=0.0), 0)
        scale = tl.rsqrt(total / K + eps)[:, None]
        of_gate, of_up = _up_scales(scales, e, n, SIZE, SCALED)
        a *= scale * of_gate[None, :]
        h = a * tl.sigmoid(a) * (b * (scale * of_up[None, :]))
        tl.store(out + places[:, None] * SIZE + n[None, :], h.to(out.dtype.element_ty), mask=taken[:, None])
        if tl.program_id(0) == 0:
            score = tl.load(logits + m * L + tl.minimum(e, L - 1), mask=taken, other=0.0)
            tl.store(chosen + places, score.to(tl.float32), mask=taken)


@triton.jit(do_not_specialize=["M"])
def _down_matrix(
    h, logits, down, scales, shared_down, out, M,
    H: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, SCALED: tl.constexpr, TOP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, SWAP: tl.constexpr, EARLY: tl.constexpr,
    LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The results of one expert for the rows that chose it, to their slots [rows, slots, H], float32.

    EARLY: the weights are asked for before the wait, LINES cache lines per output, while the last of `_up_matrix` still
    run. (It lets this one start when all its programs have waited for the logits: they are complete by then.)"""
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    e = tl.program_id(1)
    places, count = _takers(logits, e, 0, M, E, PIECES, TOP, BM, BR)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    base = down + e.to(tl.int64) * (H * SIZE)
    width = SIZE
    if PIECES > 0:
        if e >= E:
            base = shared_down + (e - E) * SIZE
            width = PIECES * SIZE
    if EARLY and PDL:
        if count > 0:
            line = tl.minimum(tl.arange(0, LINES) * (SIZE // LINES), SIZE - 1)
            fetch(base + n[:, None] * width + line[None, :])
            gdc_wait()
    at = base + n[:, None] * width + k[None, :]
    for tile in range(tl.cdiv(count, BM)):
        if tile > 0:
            places, _ = _takers(logits, e, tile, M, E, PIECES, TOP, BM, BR)
        taken = places >= 0
        from_h = h + places[:, None] * SIZE + k[None, :]
        acc = _none(BM, BN, SWAP)
        for i in range(0, SIZE, BK):
            hi = tl.load(from_h + i, mask=taken[:, None], other=0.0)
            acc = _times(tl.load(at + i), hi, acc, SWAP, PDL)
        if SWAP:
            acc = acc.T
        if SCALED:
            acc *= tl.load(scales + e * H + n)[None, :]
        tl.store(out + places[:, None] * H + n[None, :], acc, mask=taken[:, None])


@triton.jit
def _add_slots(
    parts, chosen, logits, x, next_gain, gained, squares,
    H: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, PIECES: tl.constexpr, RENORM: tl.constexpr, BN: tl.constexpr,
    EMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x += the weighted sum of a row's slots; the weights are rounded to the type of x, as the reference does. EMIT:
    also as `Gained`."""
    m = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    SLOTS: tl.constexpr = TOP + PIECES
    slot = tl.arange(0, triton.next_power_of_2(SLOTS))
    row = logits + m * (E + (1 if PIECES > 0 else 0))
    g = tl.zeros([BN], tl.float32)
    if EMIT:
        g = tl.load(next_gain + n).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    before = tl.load(x + m * H + n).to(tl.float32)
    score = tl.load(chosen + m * SLOTS + slot, mask=slot < TOP, other=float("-inf"))
    there = (slot < SLOTS)[:, None]
    values = tl.load(parts + (m * SLOTS + slot)[:, None] * H + n[None, :], mask=there, other=0.0)
    high = tl.max(score, 0)
    share = tl.exp(score - high)
    if RENORM:
        total = tl.sum(share, 0)
    else:
        total = tl.sum(tl.exp(tl.load(row + tl.arange(0, E)).to(tl.float32) - high), 0)
    weight = share / total
    if PIECES > 0:
        weight = tl.where(slot < TOP, weight, tl.sigmoid(tl.load(row + E).to(tl.float32)))
    weight = weight.to(x.dtype.element_ty).to(tl.float32)
    acc = before + tl.sum(tl.where(there, values * weight[:, None], 0.0), 0)
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


def route_one(
    x: torch.Tensor, w: ExpertWeights, counter: torch.Tensor, tuned: dict[str, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which experts one row x [1, hidden] of the residual stream goes to, and with which weights: [slots] each.
    `counter` [1] int32 is 0 between calls, and nobody else's."""
    hidden, experts = x.shape[1], w.num_experts
    c = config("route", (experts, hidden), {"BE": 4, "warps": 8}) if tuned is None else tuned
    ids = x.new_empty(w.slots, dtype=torch.int32)
    weights = x.new_empty(w.slots, dtype=torch.float32)
    logits = x.new_empty(len(w.router), dtype=torch.float32)
    _route[(triton.cdiv(len(w.router), c["BE"]),)](
        x, w.gain, w.router, logits, ids, weights, counter, w.eps,
        K=hidden, E=experts, BE=c["BE"], TOP=w.top_k, SLOTS=w.slots, RENORM=w.norm_topk,
        num_warps=c["warps"], **protocol(x),
    )  # fmt: skip
    return ids, weights


def up_one(
    x: torch.Tensor,
    w: ExpertWeights,
    ids: torch.Tensor,
    ahead: torch.Tensor | None = None,
    tuned: dict[str, int] | None = None,
) -> torch.Tensor:
    """For one row x [1, hidden] of the residual stream: silu(gate) * up of its experts [slots, expert size]. `ahead`:
    weights (bfloat16, contiguous) of what comes after this layer, to get on their way."""
    hidden, size = x.shape[1], w.down.shape[2]
    c = _tuned("up_vector", w, (size, hidden), {"BN": 2, "warps": 4}) if tuned is None else tuned
    h = x.new_empty(w.slots, size)
    lines = 0 if ahead is None or not pdl(x) else min(ahead.nbytes, MOST_AHEAD) // 128
    each = triton.cdiv(lines, min(FETCHERS, size // c["BN"] * w.slots))
    _up_vector[(size // c["BN"], w.slots)](
        x, w.gain, w.gate_up, x if w.scales is None else w.scales[0],
        w.gate_up if w.shared_gate_up is None else w.shared_gate_up, ids, h, x if ahead is None else ahead,
        w.eps, lines, each,
        K=hidden, BN=c["BN"], AHEAD=triton.next_power_of_2(each) if lines else 0, num_warps=c["warps"],
        **_common(x, w),
    )  # fmt: skip
    return h


def down_one(
    h: torch.Tensor,
    w: ExpertWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    x: torch.Tensor,
    tuned: dict[str, int] | None = None,
) -> None:
    """x += the weighted sum of the row's experts, in place. Comes right after `up_one`, which its first reads rely
    on."""
    hidden, size = x.shape[1], w.down.shape[2]
    default = {"BN": 4, "BK": _chunk(size, 128), "warps": 4}
    c = _tuned("down_vector", w, (hidden, size), default) if tuned is None else tuned
    _down_vector[(hidden // c["BN"],)](
        h, w.down, x if w.scales is None else w.scales[1], w.down if w.shared_down is None else w.shared_down,
        ids, weights, x,
        H=hidden, BN=c["BN"], BK=c["BK"], SLOTS=w.slots, num_warps=c["warps"], **_common(x, w),
    )  # fmt: skip


def route(gained: Gained, w: ExpertWeights, counters: torch.Tensor | None = None) -> torch.Tensor:
    """By what rows choose their experts: logits [rows, experts], with a column more for a shared expert. `gained` are
    the rows for the norm in front of the experts, `counters` as for `project`."""
    return project(gained, w.router, counters=counters)


def _together(rows: int, c: dict[str, int]) -> dict[str, int]:
    """Rows of a tile, and rows that are looked at together for it. (Few choose the same expert: 16 will mostly do.)"""
    return {"BM": c.get("BM", 16), "BR": min(32, tile_rows(rows))}


def up(
    gained: Gained, logits: torch.Tensor, w: ExpertWeights, tuned: dict[str, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of each row's experts [rows, slots, expert size], and their logits [rows, slots]."""
    rows, hidden = gained.x.shape
    size = w.down.shape[2]
    default = {"BN": 32, "BK": _chunk(hidden, 256), "warps": 4, "stages": 3}
    c = _tuned("up_matrix", w, (tile_rows(rows), size, hidden), default) if tuned is None else tuned
    h = gained.x.new_empty(rows, w.slots, size)
    chosen = gained.x.new_empty(rows, w.slots, dtype=torch.float32)
    summed = gained.squares.shape[0]
    _up_matrix[(size // c["BN"], w.num_experts + w.pieces)](
        gained.x, gained.squares, logits, w.gate_up, logits if w.scales is None else w.scales[0],
        w.gate_up if w.shared_gate_up is None else w.shared_gate_up, h, chosen, gained.eps, rows, summed,
        K=hidden, TOP=w.top_k, BN=c["BN"], BK=c["BK"], BP=triton.next_power_of_2(summed), SWAP=bool(c.get("swap", 0)),
        num_warps=c["warps"], num_stages=c["stages"], **_together(rows, c), **_common(gained.x, w),
    )  # fmt: skip
    return h, chosen


def down(
    h: torch.Tensor,
    chosen: torch.Tensor,
    logits: torch.Tensor,
    w: ExpertWeights,
    x: torch.Tensor,
    following: tuple[torch.Tensor, float] | None = None,
    tuned: dict[str, int] | None = None,
) -> Gained | None:
    """x += the weighted sum of each row's experts, in place; also as `Gained` for the `following` norm, if it is given
    (its weight and epsilon). Comes right after `up`, which its first reads rely on."""
    rows, hidden = x.shape
    size = w.down.shape[2]
    default = {"BN": 64, "BK": _chunk(size, 128), "warps": 4, "stages": 3}
    c = _tuned("down_matrix", w, (tile_rows(rows), hidden, size), default) if tuned is None else tuned
    parts = x.new_empty(rows, w.slots, hidden, dtype=torch.float32)
    _down_matrix[(hidden // c["BN"], w.num_experts + w.pieces)](
        h, logits, w.down, x if w.scales is None else w.scales[1], w.down if w.shared_down is None else w.shared_down,
        parts, rows,
        H=hidden, TOP=w.top_k, BN=c["BN"], BK=c["BK"], SWAP=bool(c.get("swap", 0)), EARLY=bool(c.get("early", 0)),
        LINES=triton.next_power_of_2(triton.cdiv(size * w.down.itemsize, 128)),
        num_warps=c["warps"], num_stages=c["stages"], **_together(rows, c), **_common(x, w),
    )  # fmt: skip
    block = _chunk(hidden, 512)
    gained = None if following is None else Gained.empty(x, hidden // block, following[1])
    _add_slots[(hidden // block, rows)](
        parts, chosen, logits, x, x if following is None else following[0], x if gained is None else gained.x,
        x if gained is None else gained.squares,
        H=hidden, E=w.num_experts, TOP=w.top_k, PIECES=w.pieces, RENORM=w.norm_topk, BN=block, EMIT=gained is not None,
        num_warps=4, **protocol(x),
    )  # fmt: skip
    return gained


def mixture_one(x: torch.Tensor, w: ExpertWeights, counter: torch.Tensor, ahead: torch.Tensor | None = None) -> None:
    """x += experts(norm(x)), in place, for one row of the residual stream; `counter` and `ahead` as above."""
    ids, weights = route_one(x, w, counter)
    down_one(up_one(x, w, ids, ahead), w, ids, weights, x)


def mixture(
    x: torch.Tensor,
    gained: Gained,
    w: ExpertWeights,
    following: tuple[torch.Tensor, float] | None = None,
    counters: torch.Tensor | None = None,
) -> Gained | None:
    """The same for several rows; `gained` and `counters` as in `route`, `following` as in `down`."""
    logits = route(gained, w, counters)
    h, chosen = up(gained, logits, w)
    return down(h, chosen, logits, w, x, following)
