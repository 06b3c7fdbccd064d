"""Mixture of experts for many rows: routing, the sort by expert, and products of sorted rows with
experts' weights.

A product's tile is some sorted rows of one expert times some columns; which expert is found on the
device from the offsets alone, so shapes and grids depend on the number of rows only and the whole
block can be captured. Rows are gathered as they are loaded and put back in their order as they are
stored: nothing is permuted in memory. There is no atomic anywhere, and the order inside an expert
is that of the rows, so equal inputs give equal bits. Called on the stage's thread, on the current
stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stretto.kernels.triton.device import fitting
from stretto.kernels.triton.linear import precision, raw, widen
from stretto.kernels.triton.prefill import swiglu
from stretto.kernels.triton.tuning import config

SCANS = (1024, 4096)  # ids looked at in one step of the sort, for few choices and for many


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """Where the rows of a pass go. A choice is one (row, expert) pair, numbered row * top_k + k."""

    weights: torch.Tensor  # [rows, top_k] float32, rounded as the reference rounds them
    ids: torch.Tensor  # [rows, top_k] int32; the number of experts where a padding row goes nowhere
    order: torch.Tensor  # [rows * top_k] int32: choices sorted by expert, padding's left out
    places: torch.Tensor  # [rows * top_k] int32: where each choice is in `order`
    offsets: torch.Tensor  # [experts + 1] int32: where each expert's choices begin in `order`


@triton.jit(do_not_specialize=["rows"])
def _route(
    logits, count, weights, ids, rows,
    EXPERTS: tl.constexpr, WIDE: tl.constexpr, TOP_K: tl.constexpr, KS: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, WIDE)
    inside = row < rows
    real = row < tl.minimum(rows, tl.load(count))
    dtype = logits.dtype.element_ty
    known = real[:, None] & (expert < EXPERTS)[None, :]
    scores = tl.load(logits + row[:, None] * EXPERTS + expert[None, :], mask=known, other=0.0).to(
        tl.float32
    )
    scores = tl.where((expert < EXPERTS)[None, :], scores, float("-inf"))
    p = tl.exp(scores - tl.max(scores, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    slot = tl.arange(0, KS)
    best = tl.zeros((ROWS, KS), tl.float32)
    chosen = tl.full((ROWS, KS), EXPERTS, tl.int32)
    for k in tl.static_range(TOP_K):
        top = tl.max(p, 1)
        # The first of equals. What is not a number equals nothing and goes to the last expert: the
        # places of every real row are read later, so each must be written, or addresses would be
        # made of what was in that memory.
        which = tl.min(tl.where(p == top[:, None], expert[None, :], EXPERTS - 1), 1)
        now = (slot == k)[None, :]
        best = tl.where(now, top[:, None], best)
        chosen = tl.where(now, which[:, None], chosen)
        p = tl.where(expert[None, :] == which[:, None], -1.0, p)
    if NORM:
        best = best / tl.sum(best, 1)[:, None]
    chosen = tl.where(real[:, None], chosen, EXPERTS)
    place = row[:, None] * TOP_K + slot[None, :]
    mine = inside[:, None] & (slot < TOP_K)[None, :]
    tl.store(weights + place, best.to(dtype).to(tl.float32), mask=mine)
    tl.store(ids + place, chosen, mask=mine)


@triton.jit(do_not_specialize=["choices"])
def _sort(ids, order, places, offsets, choices, EXPERTS: tl.constexpr, SCAN: tl.constexpr):
    """One program per expert (and one more, for the end of the last): count the choices of lower
    experts, then number its own from there."""
    expert = tl.program_id(0)
    at = tl.arange(0, SCAN)
    lower = tl.zeros((SCAN,), tl.int32)
    for start in range(0, choices, SCAN):
        id = tl.load(ids + start + at, mask=start + at < choices, other=EXPERTS)
        lower += (id < expert).to(tl.int32)
    begin = tl.sum(lower, 0)
    tl.store(offsets + expert, begin)
    if expert < EXPERTS:
        for start in range(0, choices, SCAN):
            id = tl.load(ids + start + at, mask=start + at < choices, other=EXPERTS)
            mine = id == expert
            rank = begin + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(order + rank, start + at, mask=mine)
            tl.store(places + start + at, rank, mask=mine)
            begin += tl.sum(mine.to(tl.int32), 0)


def route(logits: torch.Tensor, top_k: int, norm: bool, count: torch.Tensor) -> Routed:
    """Softmax, top-k and sort of router logits [rows, experts]; rows from `count` on go nowhere."""
    rows, experts = logits.shape
    device = logits.device
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    ids, order, places = (
        torch.empty(rows * top_k, dtype=torch.int32, device=device) for _ in range(3)
    )
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=device)
    wide, per = triton.next_power_of_2(experts), 4
    _route[(triton.cdiv(rows, per),)](
        logits, count, weights, ids, rows,
        EXPERTS=experts, WIDE=wide, TOP_K=top_k, KS=triton.next_power_of_2(top_k), ROWS=per,
        NORM=norm, num_warps=4,
    )  # fmt: skip
    scan = SCANS[rows * top_k > SCANS[0]]
    _sort[(experts + 1,)](
        ids,
        order,
        places,
        offsets,
        rows * top_k,
        EXPERTS=experts,
        SCAN=scan,
        num_warps=max(1, min(16, scan // 256)),
    )
    return Routed(weights, ids.view(rows, top_k), order, places, offsets)


@triton.jit
def _tile(offsets, tile, EXPERTS: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr):
    """(expert, first sorted row, end of the expert's rows) of a tile; none of it is real if first
    >= end.

    The tiles of expert e begin at offsets[e] // M + e: far enough apart whatever the counts."""
    e = tl.arange(0, WIDE)
    start = tl.load(offsets + e, mask=e < EXPERTS, other=0)
    total = tl.load(offsets + EXPERTS)
    before = (e < EXPERTS) & (start // M + e <= tile)
    expert = tl.sum(before.to(tl.int32), 0) - 1
    begin = tl.max(tl.where(before, start, 0), 0)
    end = tl.min(tl.where((e < EXPERTS) & (e > expert), start, total), 0)
    return expert, begin + (tile - (begin // M + expert)) * M, end


@triton.jit
def _over(scale, SWAP: tl.constexpr):
    """One number per weight row, shaped to be multiplied with a product of that orientation."""
    return scale[:, None] if SWAP else scale[None, :]


@triton.jit
def _gate_up_tile(
    x, w, scales, order, out, expert, first, end, column, HIDDEN: tl.constexpr, SIZE: tl.constexpr,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, M)
    n = column + tl.arange(0, N)
    k = tl.arange(0, K)
    token = tl.load(order + row, mask=row < end, other=0) // TOP_K
    x_at = x + token.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    inside_n = tl.where(n < SIZE, n, 0) if SIZE % N else n
    gate_at = (
        w + expert.to(tl.int64) * (2 * SIZE * HIDDEN) + inside_n[:, None] * HIDDEN + k[None, :]
    )
    up_at = gate_at + SIZE * HIDDEN
    if SWAP:
        gate, up = tl.zeros((N, M), tl.float32), tl.zeros((N, M), tl.float32)
    else:
        gate, up = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
    for start in range(0, HIDDEN, K):
        if HIDDEN % K:
            inside = (start + k < HIDDEN)[None, :]
            a = tl.load(x_at + start, mask=inside, other=0.0)
            b = tl.load(gate_at + start, mask=inside, other=0.0)
            c = tl.load(up_at + start, mask=inside, other=0.0)
        else:
            a = tl.load(x_at + start)
            b = tl.load(gate_at + start)
            c = tl.load(up_at + start)
        b, c = widen(b, a), widen(c, a)
        if SWAP:
            gate = tl.dot(b, tl.trans(a), gate, input_precision=PRECISION)
            up = tl.dot(c, tl.trans(a), up, input_precision=PRECISION)
        else:
            gate = tl.dot(a, tl.trans(b), gate, input_precision=PRECISION)
            up = tl.dot(a, tl.trans(c), up, input_precision=PRECISION)
    dtype = out.dtype.element_ty
    if SCALED:
        gate *= _over(tl.load(scales + expert * (2 * SIZE) + inside_n), SWAP)
        up *= _over(tl.load(scales + expert * (2 * SIZE) + SIZE + inside_n), SWAP)
    gate = gate.to(dtype).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    h = (gate * up.to(dtype).to(tl.float32)).to(dtype)
    if SWAP:
        h = tl.trans(h)
    mine = (row < end)[:, None] & (n < SIZE)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * SIZE + n[None, :], h, mask=mine)


@triton.jit
def _gate_up(
    x, w, scales, order, offsets, out, HIDDEN: tl.constexpr, SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SCALED: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr, SWAP: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """silu(x @ gate) * (x @ up) for one tile. With SWAP the weights are the left operand: few rows
    then make a narrow product instead of one that is mostly padding. With HALF an expert's last
    rows take half a tile if they fit."""
    columns: tl.constexpr = (SIZE + N - 1) // N
    expert, first, end = _tile(offsets, tl.program_id(0) // columns, EXPERTS, WIDE, M)
    column = tl.program_id(0) % columns * N
    if first >= end:
        return
    if HALF:
        if end - first <= M // 2:
            _gate_up_tile(
                x, w, scales, order, out, expert, first, end, column,
                HIDDEN, SIZE, TOP_K, SCALED, M // 2, N, K, SWAP, PRECISION,
            )  # fmt: skip
            return
    _gate_up_tile(
        x,
        w,
        scales,
        order,
        out,
        expert,
        first,
        end,
        column,
        HIDDEN,
        SIZE,
        TOP_K,
        SCALED,
        M,
        N,
        K,
        SWAP,
        PRECISION,
    )


@triton.jit
def _down_tile(
    h, w, scales, order, out, expert, first, end, column, HIDDEN: tl.constexpr, SIZE: tl.constexpr,
    SCALED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, M)
    n = column + tl.arange(0, N)
    k = tl.arange(0, K)
    # Rows behind the expert's last are another's, or behind the buffer's end: look at the first
    # instead.
    h_at = h + tl.where(row < end, row, first).to(tl.int64)[:, None] * SIZE + k[None, :]
    inside_n = tl.where(n < HIDDEN, n, 0) if HIDDEN % N else n
    w_at = w + expert.to(tl.int64) * (HIDDEN * SIZE) + inside_n[:, None] * SIZE + k[None, :]
    y = tl.zeros((N, M), tl.float32) if SWAP else tl.zeros((M, N), tl.float32)
    for start in range(0, SIZE, K):
        if SIZE % K:
            inside = (start + k < SIZE)[None, :]
            a = tl.load(h_at + start, mask=inside, other=0.0)
            b = tl.load(w_at + start, mask=inside, other=0.0)
        else:
            a = tl.load(h_at + start)
            b = tl.load(w_at + start)
        b = widen(b, a)
        if SWAP:
            y = tl.dot(b, tl.trans(a), y, input_precision=PRECISION)
        else:
            y = tl.dot(a, tl.trans(b), y, input_precision=PRECISION)
    if SCALED:
        y *= _over(tl.load(scales + expert * HIDDEN + inside_n), SWAP)
    rows = y.to(out.dtype.element_ty)
    if SWAP:
        rows = tl.trans(rows)
    choice = tl.load(order + row, mask=row < end, other=0)
    mine = (row < end)[:, None] & (n < HIDDEN)[None, :]
    tl.store(out + choice.to(tl.int64)[:, None] * HIDDEN + n[None, :], rows, mask=mine)


@triton.jit
def _down(
    h, w, scales, order, offsets, out, HIDDEN: tl.constexpr, SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    EXPERTS: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    SWAP: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (HIDDEN + N - 1) // N
    expert, first, end = _tile(offsets, tl.program_id(0) // columns, EXPERTS, WIDE, M)
    column = tl.program_id(0) % columns * N
    if first >= end:
        return
    if HALF:
        if end - first <= M // 2:
            _down_tile(
                h, w, scales, order, out, expert, first, end, column,
                HIDDEN, SIZE, SCALED, M // 2, N, K, SWAP, PRECISION,
            )  # fmt: skip
            return
    _down_tile(
        h,
        w,
        scales,
        order,
        out,
        expert,
        first,
        end,
        column,
        HIDDEN,
        SIZE,
        SCALED,
        M,
        N,
        K,
        SWAP,
        PRECISION,
    )


def default_launch(kernel: str, average: int) -> dict[str, int]:
    """Launch parameters by how many rows an expert has on average. Up to some 100 rows the products
    wait for the weights: narrow tiles, many bytes in flight. Beyond, for the tensor cores."""
    wide = 2 if kernel == "prefill_down" else 1  # gate_up has two of its weight tiles in flight
    if (
        average <= 8
    ):  # two programs fit an SM, so that one's first loads hide behind the other's last
        return {
            "M": 16,
            "N": 64 * wide,
            "K": 128,
            "SWAP": 1,
            "HALF": 0,
            "num_warps": 4,
            "num_stages": 3,
        }
    if average <= 16:
        return {
            "M": 32,
            "N": 64 * wide,
            "K": 64,
            "SWAP": 1,
            "HALF": 0,
            "num_warps": 4,
            "num_stages": 5,
        }
    if average <= 64:
        return {
            "M": 64,
            "N": 64 * wide,
            "K": 64,
            "SWAP": 0,
            "HALF": 0,
            "num_warps": 4,
            "num_stages": 4,
        }
    return {
        "M": 128,
        "N": 128 * wide,
        "K": 64,
        "SWAP": 0,
        "HALF": 1,
        "num_warps": 8,
        "num_stages": 4,
    }


def per_expert(choices: int, experts: int) -> int:
    """Rows an expert has on average, up to the next power of two: what the launch depends on."""
    return int(triton.next_power_of_2(max(1, choices // experts)))


def launch_for(
    kernel: str, experts: int, hidden: int, size: int, choices: int, float8: bool = False
) -> dict[str, int]:
    average = per_expert(choices, experts)
    return config(
        f"{kernel}_float8" if float8 else kernel,
        (experts, hidden, size, average),
        default_launch(kernel, average),
    )


def gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    routed: Routed,
    launch: dict[str, int] | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [rows, hidden] through gate and up [experts, 2 * size, hidden] of its experts: [choices,
    size], sorted. `scale` [experts, 2 * size]: of float8 weights."""
    experts, double, hidden = weight.shape
    size, choices = double // 2, routed.order.shape[0]
    launch = launch or launch_for(
        "prefill_gate_up", experts, hidden, size, choices, scale is not None
    )
    columns = min(launch["N"], max(16, triton.next_power_of_2(size)))
    tiles_of = x, launch["M"], weight, 2 * columns, launch["K"]
    launch = launch | {"N": columns, "num_stages": fitting(launch["num_stages"], *tiles_of)}
    out = x.new_empty(choices, size)
    tiles = choices // launch["M"] + experts
    _gate_up[(tiles * triton.cdiv(size, launch["N"]),)](
        x, raw(weight), x if scale is None else scale, routed.order, routed.offsets, out,
        HIDDEN=hidden, SIZE=size, TOP_K=routed.ids.shape[1], SCALED=scale is not None,
        EXPERTS=experts,
        WIDE=triton.next_power_of_2(experts), PRECISION=precision(x), **launch,
    )  # fmt: skip
    return out


def down(
    h: torch.Tensor,
    weight: torch.Tensor,
    routed: Routed,
    launch: dict[str, int] | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sorted rows h [choices, size] through down [experts, hidden, size]: [choices, hidden], in
    order of choice. `scale` [experts, hidden]: of float8 weights."""
    experts, hidden, size = weight.shape
    choices = routed.order.shape[0]
    launch = launch or launch_for("prefill_down", experts, hidden, size, choices, scale is not None)
    columns = min(launch["N"], max(16, triton.next_power_of_2(hidden)))
    tiles_of = h, launch["M"], weight, columns, launch["K"]
    launch = launch | {"N": columns, "num_stages": fitting(launch["num_stages"], *tiles_of)}
    out = h.new_empty(choices, hidden)
    tiles = choices // launch["M"] + experts
    _down[(tiles * triton.cdiv(hidden, launch["N"]),)](
        h, raw(weight), h if scale is None else scale, routed.order, routed.offsets, out,
        HIDDEN=hidden, SIZE=size, SCALED=scale is not None, EXPERTS=experts,
        WIDE=triton.next_power_of_2(experts), PRECISION=precision(h), **launch,
    )  # fmt: skip
    return out


@triton.jit
def _gather(
    x,
    order,
    offsets,
    out,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDE: tl.constexpr,
    TOP_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offsets + EXPERTS):
        at = tl.arange(0, WIDE)
        token = (tl.load(order + row) // TOP_K).to(tl.int64)
        values = tl.load(x + token * HIDDEN + at, mask=at < HIDDEN, other=0.0)
        tl.store(out + row * HIDDEN + at, values, mask=at < HIDDEN)


def library_experts(
    x: torch.Tensor, gate_up_weight: torch.Tensor, down_weight: torch.Tensor, routed: Routed
) -> torch.Tensor:
    """The same two products by torch's grouped product, bfloat16 on CUDA alone: [choices, hidden],
    still sorted."""
    experts, _, hidden = gate_up_weight.shape
    choices, top_k = routed.order.shape[0], routed.ids.shape[1]
    rows = x.new_empty(choices, hidden)
    wide = triton.next_power_of_2(hidden)
    _gather[(choices,)](
        x,
        routed.order,
        routed.offsets,
        rows,
        EXPERTS=experts,
        HIDDEN=hidden,
        WIDE=wide,
        TOP_K=top_k,
        num_warps=4,
    )
    ends = routed.offsets[1:].clone()  # a pointer of its own: the product wants it aligned
    h, _ = swiglu(
        torch._grouped_mm(rows, gate_up_weight.transpose(1, 2), ends), routed.offsets[-1:]
    )
    return torch._grouped_mm(h, down_weight.transpose(1, 2), ends)


def experts(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    routed: Routed,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x through each row's experts: rows by choice, and where each choice is among them if they are
    still sorted."""
    if scales is not None:
        h = gate_up(x, gate_up_weight, routed, scale=scales[0])
        return down(h, down_weight, routed, scale=scales[1]), None
    choices, n = routed.order.shape[0], gate_up_weight.shape[0]
    key = (n, x.shape[1], down_weight.shape[2], per_expert(choices, n))
    if config("prefill_experts", key, {"library": 0})["library"]:
        return library_experts(x, gate_up_weight, down_weight, routed), routed.places
    return down(gate_up(x, gate_up_weight, routed), down_weight, routed), None
