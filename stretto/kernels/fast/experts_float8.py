"""Float8 experts for several bfloat16 rows, multiplied as they are: weights go from memory to the tensor cores without
passing through registers.

Rows come as two float8 rows each (`halves`, which loses nothing to speak of), high and low in turns, so that one
product of a weight takes both; what `up` hands to `down` is of the same kind, with a scale for each block of columns
that one program made. Weights are the left operand: a warp group takes 64 of their rows at a time. It computes what
`experts_many` does by widening, which calls this; its table, grid and launch protocol hold here too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.fast.experts import ExpertWeights, chunk, up_scales
from stretto.kernels.fast.experts_choice import Choice, takers, tiles
from stretto.kernels.fast.halves import Halves, fitting, halves, in_turns, magnitude, times
from stretto.kernels.fast.linear import protocol, tile_rows
from stretto.kernels.fast.tuning import config


@triton.jit
def _up_tile(
    x, row_scales, gate, scales, planes, plane_scales, places, e, n,
    K: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    taken, m = places >= 0, places // SLOTS
    lines, out = in_turns(tl.where(taken, m, -1), BM), in_turns(places, BM)
    from_x = x + lines[:, None] * K + tl.arange(0, BK)[None, :]
    a = tl.zeros([BN, BM], tl.float32)
    b = tl.zeros([BN, BM], tl.float32)
    for i in range(0, K, BK):
        xi = tl.load(from_x + i, mask=(lines >= 0)[:, None], other=0.0)
        a += times(tl.load(gate + i), xi, BM, BN, PDL)
        b += times(tl.load(gate + SIZE * K + i), xi, BM, BN, PDL)
    of_gate, of_up = up_scales(scales, e, n, SIZE, True)
    scale = tl.load(row_scales + m, mask=taken, other=0.0)[None, :]
    a *= scale * of_gate[:, None]
    h = a * tl.sigmoid(a) * (b * (scale * of_up[:, None]))
    h = h.to(tl.bfloat16).to(tl.float32)  # as everywhere else; and `halves` holds no more
    scale, inverse = fitting(tl.max(magnitude(h), 0))
    high, low = halves(h, inverse[None, :])
    both = tl.reshape(tl.join(high, low), (BN, 2 * BM)).T
    tl.store(planes + out[:, None] * SIZE + n[None, :], both, mask=(out >= 0)[:, None])
    tl.store(plane_scales + places * (SIZE // BN) + tl.program_id(0), scale, mask=taken)


@triton.jit(do_not_specialize=["M"])
def _up_native(
    x, row_scales, table, gate_up, scales, planes, plane_scales, M,
    K: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The rows that chose one expert (as `Halves`, with what their norm and scale come to) through BN of its columns;
    results to their slots [rows, slots, 2, SIZE], their scales to [rows, slots, SIZE // BN]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: `down` may read the table before its own
    e = tl.program_id(1)
    places, count = takers(table, e, 0, M, E, 0, SLOTS, BM, BR)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    gate = gate_up + e.to(tl.int64) * (2 * SIZE * K) + n[:, None] * K + tl.arange(0, BK)[None, :]
    if BR == BM:  # one tile holds them all: fewer registers than the loop, and the next kernel gets in sooner
        if count > 0:
            _up_tile(x, row_scales, gate, scales, planes, plane_scales, places, e, n, K, SIZE, SLOTS, BM, BN, BK, PDL)
    else:
        for tile in range(tl.cdiv(count, BM)):
            if tile > 0:
                places, _ = takers(table, e, tile, M, E, 0, SLOTS, BM, BR)
            _up_tile(x, row_scales, gate, scales, planes, plane_scales, places, e, n, K, SIZE, SLOTS, BM, BN, BK, PDL)


@triton.jit
def _down_tile(
    planes, plane_scales, at, scales, weights, out, places, e, n,
    H: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    taken, lines = places >= 0, in_turns(places, BM)
    from_h = planes + lines[:, None] * SIZE + tl.arange(0, BK)[None, :]
    from_scales = plane_scales + places * (SIZE // BLOCK)
    acc = tl.zeros([BN, BM], tl.float32)
    # Stages are asked for at the loop, so that the scales too are on their way ahead: by itself the compiler does that
    # for operands of the product only.
    for i in tl.range(0, SIZE, BK, num_stages=STAGES):
        hi = tl.load(from_h + i, mask=(lines >= 0)[:, None], other=0.0)
        scale = tl.load(from_scales + i // BLOCK, mask=taken, other=0.0)
        acc += times(tl.load(at + i), hi, BM, BN, PDL) * scale[None, :]
    factor = tl.load(weights + places, mask=taken, other=0.0)[None, :] * tl.load(scales + e * H + n)[:, None]
    tl.store(out + places[:, None] * H + n[None, :], (acc * factor).T, mask=taken[:, None])


@triton.jit(do_not_specialize=["M"])
def _down_native(
    planes, plane_scales, table, down, scales, weights, out, M,
    H: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weighted results of one expert for the rows that chose it, to their slots [rows, slots, H], float32. EARLY:
    look at the table before the wait (no program of `up` let this kernel start before the table was there), so that
    programs whose expert nobody chose are gone when it ends."""
    e = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    places, count = takers(table, e, 0, M, E, 0, SLOTS, BM, BR)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = down + e.to(tl.int64) * (H * SIZE) + n[:, None] * SIZE + tl.arange(0, BK)[None, :]
    if PDL and EARLY:
        if count > 0:
            gdc_wait()
    if BR == BM:  # as in `_up_native`
        if count > 0:
            _down_tile(
                planes, plane_scales, at, scales, weights, out, places, e, n, H, SIZE, BLOCK, BM, BN, BK, STAGES, PDL
            )
    else:
        for tile in range(tl.cdiv(count, BM)):
            if tile > 0:
                places, _ = takers(table, e, tile, M, E, 0, SLOTS, BM, BR)
            _down_tile(
                planes, plane_scales, at, scales, weights, out, places, e, n, H, SIZE, BLOCK, BM, BN, BK, STAGES, PDL
            )


def up(planes: torch.Tensor, choice: Choice, w: ExpertWeights, tuned: dict[str, int] | None = None) -> Halves:
    """silu(gate) * up of each row's experts, [rows, slots, expert size]; `planes` are the rows, as in `Choice`."""
    assert w.scales is not None
    rows, _, hidden = planes.shape
    size = w.down.shape[2]
    default = {"BN": chunk(size, 64), "BK": chunk(hidden, 128), "warps": 4, "stages": 3}
    c = config("up_native", (tile_rows(rows), size, hidden), default) if tuned is None else tuned
    blocks = size // c["BN"]
    h = Halves(planes.new_empty(rows, w.top_k, 2, size), planes.new_empty(rows, w.top_k, blocks, dtype=torch.float32))
    _up_native[(blocks, w.num_experts)](
        planes, choice.scales, choice.table, w.gate_up, w.scales[0], h.planes, h.scales, rows,
        K=hidden, E=w.num_experts, SIZE=size, SLOTS=w.top_k, BN=c["BN"], BK=c["BK"],
        num_warps=c["warps"], num_stages=c["stages"], **tiles(rows, c, 8, 16), **protocol(planes),
    )  # fmt: skip
    return h


def down(h: Halves, choice: Choice, w: ExpertWeights, tuned: dict[str, int] | None = None) -> torch.Tensor:
    """What each row's experts make of it, weighted: [rows, slots, hidden] float32, to be added up."""
    assert w.scales is not None
    rows, _, _, size = h.planes.shape
    hidden = w.down.shape[1]
    default = {"BN": chunk(hidden, 64), "BK": chunk(size, 64), "warps": 4, "stages": 6, "early": 0}
    c = config("down_native", (tile_rows(rows), hidden, size), default) if tuned is None else tuned
    block = size // h.scales.shape[2]
    parts = h.planes.new_empty(rows, w.top_k, hidden, dtype=torch.float32)
    _down_native[(hidden // c["BN"], w.num_experts)](
        h.planes, h.scales, choice.table, w.down, w.scales[1], choice.weights, parts, rows,
        H=hidden, E=w.num_experts, SIZE=size, SLOTS=w.top_k, BLOCK=block, BN=c["BN"], BK=min(c["BK"], block),
        STAGES=c["stages"], EARLY=bool(c.get("early", 0)), num_warps=c["warps"], **tiles(rows, c, 8, 16),
        **protocol(parts),
    )  # fmt: skip
    return parts
