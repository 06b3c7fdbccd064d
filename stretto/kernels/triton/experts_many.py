"""The mixture of experts for several rows: each expert that somebody chose is read once.

`experts_choice` makes a table of who chose whom for `up` and `down`, whose grids go over all
experts: a program whose expert nobody chose leaves at once, the others put the rows that chose it
through the matrix units (many rows gathered, a tile at a time); a last kernel adds each row's
results in order, so that the sum never depends on which program came first. Weights, shared pieces
and launch protocol as in `experts`, reference too. Called by `layers.fused`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.triton.device import fitting, protocol
from stretto.kernels.triton.experts import ExpertWeights, chunk, common, tuned_for, up_scales
from stretto.kernels.triton.experts_choice import Choice, choose, route, takers
from stretto.kernels.triton.linear import Gained, dot, raw, tile_rows, widen


@triton.jit
def _times(w, x, acc, SWAP: tl.constexpr):
    """acc + x @ w.T, or its transpose, w [BN, BK] in whatever it is stored in."""
    if SWAP:
        return dot(widen(w, x), x.T, acc)
    else:
        return dot(x, widen(w, x).T, acc)


@triton.jit
def _none(BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr):
    return tl.zeros([BN if SWAP else BM, BM if SWAP else BN], tl.float32)


@triton.jit
def _up_tile(
    x, row_scales, gate, apart, scales, out, places, e, n,
    K: tl.constexpr, SIZE: tl.constexpr, SCALED: tl.constexpr, SLOTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    taken, m = places >= 0, places // SLOTS
    scale = tl.load(row_scales + m, mask=taken, other=0.0)[:, None]
    from_x = x + m[:, None] * K + tl.arange(0, BK)[None, :]
    a = _none(BM, BN, SWAP)
    b = _none(BM, BN, SWAP)
    for i in range(0, K, BK):
        xi = tl.load(from_x + i, mask=taken[:, None], other=0.0)
        a = _times(tl.load(gate + i), xi, a, SWAP)
        b = _times(tl.load(gate + apart + i), xi, b, SWAP)
    if SWAP:
        a, b = a.T, b.T
    of_gate, of_up = up_scales(scales, e, n, SIZE, SCALED)
    a *= scale * of_gate[None, :]
    h = a * tl.sigmoid(a) * (b * (scale * of_up[None, :]))
    tl.store(
        out + places[:, None] * SIZE + n[None, :], h.to(out.dtype.element_ty), mask=taken[:, None]
    )


@triton.jit(do_not_specialize=["M"])
def _up_matrix(
    x, row_scales, table, gate_up, scales, shared_gate_up, out, M,
    K: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr,
    SCALED: tl.constexpr, TOP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, SWAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The rows that chose one expert (as `Gained`, with what their norm comes to) through BN of its
    columns; results to their slots [rows, slots, SIZE]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.program_id(1)
    places, count = takers(table, e, 0, M, E, PIECES, TOP, BM, BR)
    SLOTS: tl.constexpr = TOP + PIECES
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    base = gate_up + e.to(tl.int64) * (2 * SIZE * K)
    apart = SIZE * K
    if PIECES > 0:
        if e >= E:
            base = shared_gate_up + (e - E) % PIECES * (SIZE * K)
            apart = PIECES * SIZE * K
    gate = base + n[:, None] * K + tl.arange(0, BK)[None, :]
    if BR == BM:
        # one tile holds them all: half the registers of the loop, and the next kernel gets in
        # sooner
        if count > 0:
            _up_tile(
                x,
                row_scales,
                gate,
                apart,
                scales,
                out,
                places,
                e,
                n,
                K,
                SIZE,
                SCALED,
                SLOTS,
                BM,
                BN,
                BK,
                SWAP,
            )
    else:
        for tile in range(tl.cdiv(count, BM)):
            if tile > 0:
                places, _ = takers(table, e, tile, M, E, PIECES, TOP, BM, BR)
            _up_tile(
                x,
                row_scales,
                gate,
                apart,
                scales,
                out,
                places,
                e,
                n,
                K,
                SIZE,
                SCALED,
                SLOTS,
                BM,
                BN,
                BK,
                SWAP,
            )


@triton.jit
def _down_tile(
    h, at, scales, weights, out, places, e, n,
    H: tl.constexpr, SIZE: tl.constexpr, SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    taken = places >= 0
    from_h = h + places[:, None] * SIZE + tl.arange(0, BK)[None, :]
    acc = _none(BM, BN, SWAP)
    for i in range(0, SIZE, BK):
        hi = tl.load(from_h + i, mask=taken[:, None], other=0.0)
        acc = _times(tl.load(at + i), hi, acc, SWAP)
    if SWAP:
        acc = acc.T
    if SCALED:
        acc *= tl.load(scales + e * H + n)[None, :]
    acc *= tl.load(weights + places, mask=taken, other=0.0)[:, None]
    tl.store(out + places[:, None] * H + n[None, :], acc, mask=taken[:, None])


@triton.jit(do_not_specialize=["M"])
def _down_matrix(
    h, table, down, scales, shared_down, weights, out, M,
    H: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr,
    SCALED: tl.constexpr, TOP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, SWAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The weighted results of one expert for the rows that chose it, to their slots [rows, slots,
    H], float32."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(1)
    places, count = takers(table, e, 0, M, E, PIECES, TOP, BM, BR)
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
            _down_tile(h, at, scales, weights, out, places, e, n, H, SIZE, SCALED, BM, BN, BK, SWAP)
    else:
        for tile in range(tl.cdiv(count, BM)):
            if tile > 0:
                places, _ = takers(table, e, tile, M, E, PIECES, TOP, BM, BR)
            _down_tile(h, at, scales, weights, out, places, e, n, H, SIZE, SCALED, BM, BN, BK, SWAP)


@triton.jit
def _add_slots(
    parts, x, idle, next_gain, gained, squares,
    H: tl.constexpr, BN: tl.constexpr, SLOTS: tl.constexpr, EMIT: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x += the sum of a row's slots, in order. EMIT: also as `Gained`. Nobody wrote to the slots of
    padding."""
    m = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    g = tl.zeros([BN], tl.float32)
    if EMIT:
        g = tl.load(next_gain + n).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.load(x + m * H + n).to(tl.float32)
    here = tl.full([BN], 1, tl.int1)
    if PADDED:
        here &= tl.load(idle + m) == 0
    for s in tl.static_range(SLOTS):
        acc += tl.load(parts + (m * SLOTS + s) * H + n, mask=here, other=0.0)
    rounded = acc.to(x.dtype.element_ty)
    tl.store(x + m * H + n, rounded)
    if EMIT:
        value = rounded.to(tl.float32)
        tl.store(gained + m * H + n, (value * g).to(gained.dtype.element_ty))
        tl.store(squares + tl.program_id(0) * tl.num_programs(1) + m, tl.sum(value * value, 0))


def _tiles(rows: int, w: ExpertWeights, c: dict[str, int]) -> tuple[int, dict[str, int]]:
    """The experts' extent of the grid, and the rows of a tile: all, or of many 16 (few choose the
    same expert)."""
    tile = c.get("BM", tile_rows(rows) if rows <= 32 else 16)
    return w.num_experts + w.pieces * triton.cdiv(rows, tile), {
        "BM": tile,
        "BR": max(tile, tile_rows(rows)),
    }


def up(
    gained: Gained, choice: Choice, w: ExpertWeights, tuned: dict[str, int] | None = None
) -> torch.Tensor:
    """silu(gate) * up of each row's experts: [rows, slots, expert size]."""
    rows, hidden = gained.x.shape
    size = w.down.shape[2]
    default = {"BN": 32, "BK": chunk(hidden, 256), "warps": 4, "stages": 3}
    c = (
        tuned_for("up_matrix", w, (tile_rows(rows), size, hidden), default)
        if tuned is None
        else tuned
    )
    h = gained.x.new_empty(rows, w.slots, size)
    numbers, tiles = _tiles(rows, w, c)
    _up_matrix[(size // c["BN"], numbers)](
        gained.x, choice.scales, choice.table, raw(w.gate_up),
        choice.scales if w.scales is None else w.scales[0],
        w.gate_up if w.shared_gate_up is None else w.shared_gate_up, h, rows,
        K=hidden, TOP=w.top_k, BN=c["BN"], BK=c["BK"], SWAP=bool(c.get("swap", 0)),
        num_warps=c["warps"], **tiles, **common(gained.x, w),
        num_stages=fitting(c["stages"], h, tiles["BM"], w.gate_up, 2 * c["BN"], c["BK"]),
    )  # fmt: skip
    return h


def down(
    h: torch.Tensor,
    choice: Choice,
    w: ExpertWeights,
    x: torch.Tensor,
    following: tuple[torch.Tensor, float] | None = None,
    tuned: dict[str, int] | None = None,
    idle: torch.Tensor | None = None,
) -> Gained | None:
    """x += the weighted sum of each row's experts, in place; also as `Gained` for the `following`
    norm, if it is given (its weight and epsilon). `idle` as in `choose`: those rows stay as they
    are."""
    rows, hidden = x.shape
    size = w.down.shape[2]
    default = {"BN": 64, "BK": chunk(size, 128), "warps": 4, "stages": 3}
    c = (
        tuned_for("down_matrix", w, (tile_rows(rows), hidden, size), default)
        if tuned is None
        else tuned
    )
    parts = x.new_empty(rows, w.slots, hidden, dtype=torch.float32)
    numbers, tiles = _tiles(rows, w, c)
    _down_matrix[(hidden // c["BN"], numbers)](
        h, choice.table, raw(w.down), x if w.scales is None else w.scales[1],
        w.down if w.shared_down is None else w.shared_down, choice.weights, parts, rows,
        H=hidden, TOP=w.top_k, BN=c["BN"], BK=c["BK"], SWAP=bool(c.get("swap", 0)),
        num_warps=c["warps"], **tiles, **common(x, w),
        num_stages=fitting(c["stages"], h, tiles["BM"], w.down, c["BN"], c["BK"]),
    )  # fmt: skip
    return add_slots(parts, x, w.slots, following, idle)


def add_slots(
    parts: torch.Tensor,
    x: torch.Tensor,
    slots: int,
    following: tuple[torch.Tensor, float] | None,
    idle: torch.Tensor | None,
) -> Gained | None:
    """x += the sum of each row's slots, in place: `parts` [rows, slots, hidden] float32. The rest
    as in `down`."""
    rows, hidden = x.shape
    block = chunk(hidden, 512)
    gained = None if following is None else Gained.empty(x, hidden // block, following[1])
    _add_slots[(hidden // block, rows)](
        parts, x, x if idle is None else idle, x if following is None else following[0],
        x if gained is None else gained.x, x if gained is None else gained.squares,
        H=hidden, BN=block, SLOTS=slots, EMIT=gained is not None, PADDED=idle is not None,
        num_warps=4, **protocol(x),
    )  # fmt: skip
    return gained


def mixture(
    x: torch.Tensor,
    gained: Gained,
    w: ExpertWeights,
    following: tuple[torch.Tensor, float] | None = None,
    idle: torch.Tensor | None = None,
) -> Gained | None:
    """The same for several rows; `gained` as in `route`, `following` and `idle` as in `down`."""
    choice = choose(route(gained, w), gained, w, idle)
    return down(up(gained, choice, w), choice, w, x, following, idle=idle)
