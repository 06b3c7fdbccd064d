"""Products of packed weights for prompts: sorted rows with experts' weights, and any number of rows
with one matrix.

Rows are wide, or with STRETTO_KERNELS_FLOAT8=products float8 with a scale each where weights are
float8 and a pass has more than 128 rows (docs/decisions/0035). Routing and order as in `grouped`.
Called by `layers.prefill` on the stage's thread, on the current stream. References:
`stretto.kernels.reference.moe` and `packed`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from stretto.kernels.reference import packed as reference
from stretto.kernels.reference.packed import PackedWeight, Weight
from stretto.kernels.reference.quantized import FLOAT8
from stretto.kernels.triton import MAX_ROWS, narrow_products
from stretto.kernels.triton.experts import chunk
from stretto.kernels.triton.grouped import Routed, _tile, per_expert
from stretto.kernels.triton.linear import widen
from stretto.kernels.triton.packed import (
    chunk_of,
    form,
    matrix_at,
    operands,
    packed_times,
    project,
    stages_for,
    tuned,
)


@triton.jit
def _times_rows(product, scale, row, SWAP: tl.constexpr):
    """A tile's product times its rows' scales."""
    factor = tl.load(scale + row)
    return product * (factor[None, :] if SWAP else factor[:, None])


@triton.jit
def _sorted_up(
    x, row_scales, codes, scale, zero, order, offsets, out,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SWAP: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """silu(x @ gate) * (x @ up) for one tile, rounded as `grouped._gate_up_tile` does. NARROW: x is
    float8, with a scale per row."""
    columns: tl.constexpr = SIZE // N
    expert, first, end = _tile(offsets, tl.program_id(0) // columns, EXPERTS, WIDE, M)
    n = tl.program_id(0) % columns * N + tl.arange(0, N)
    if first >= end:
        return
    row = first + tl.arange(0, M)
    token = tl.load(order + row, mask=row < end, other=0) // TOP_K
    x_at = x + token.to(tl.int64)[:, None] * HIDDEN + tl.arange(0, K)[None, :]
    codes, scale, zero = matrix_at(codes, scale, zero, expert, 2 * SIZE, HIDDEN, KIND, GROUP, ROWS)
    gate = tl.zeros([N if SWAP else M, M if SWAP else N], tl.float32)
    up = tl.zeros([N if SWAP else M, M if SWAP else N], tl.float32)
    for start in range(0, HIDDEN, K):
        a = tl.load(x_at + start)
        gate = packed_times(
            a, codes, scale, zero, n, start, gate, HIDDEN, M, N, K, KIND, GROUP, ROWS, ZERO, SWAP
        )
        up = packed_times(
            a, codes, scale, zero, n + SIZE, start, up, HIDDEN, M, N, K, KIND, GROUP, ROWS, ZERO,
            SWAP,
        )  # fmt: skip
    if NARROW:
        gate = _times_rows(gate, row_scales, token, SWAP)
        up = _times_rows(up, row_scales, token, SWAP)
    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    h = (gate * up.to(dtype).to(tl.float32)).to(dtype)
    if SWAP:
        h = tl.trans(h)
    mine = (row < end)[:, None] & (n < SIZE)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * SIZE + n[None, :], h, mask=mine)


@triton.jit
def _sorted_down(
    h, row_scales, codes, scale, zero, order, offsets, out,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SWAP: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = HIDDEN // N
    expert, first, end = _tile(offsets, tl.program_id(0) // columns, EXPERTS, WIDE, M)
    n = tl.program_id(0) % columns * N + tl.arange(0, N)
    if first >= end:
        return
    row = first + tl.arange(0, M)
    # Rows behind the expert's last are another's, or behind the buffer's end: look at the first
    # instead.
    own = tl.where(row < end, row, first).to(tl.int64)
    h_at = h + own[:, None] * SIZE + tl.arange(0, K)[None, :]
    codes, scale, zero = matrix_at(codes, scale, zero, expert, HIDDEN, SIZE, KIND, GROUP, ROWS)
    y = tl.zeros([N if SWAP else M, M if SWAP else N], tl.float32)
    for start in range(0, SIZE, K):
        a = tl.load(h_at + start)
        y = packed_times(
            a, codes, scale, zero, n, start, y, SIZE, M, N, K, KIND, GROUP, ROWS, ZERO, SWAP
        )
    if NARROW:
        y = _times_rows(y, row_scales, own, SWAP)
    rows = y.to(out.dtype.element_ty)
    if SWAP:
        rows = tl.trans(rows)
    choice = tl.load(order + row, mask=row < end, other=0)
    mine = (row < end)[:, None] & (n < HIDDEN)[None, :]
    tl.store(out + choice.to(tl.int64)[:, None] * HIDDEN + n[None, :], rows, mask=mine)


def _launch(
    kernel: str, x: PromptRows, w: PackedWeight, columns: int, average: int
) -> dict[str, int]:
    tile = 16 if average <= 8 else 32 if average <= 16 else 64
    default = {
        "M": tile, "N": min(64, chunk(columns, 64)), "K": chunk_of(w, 128),
        "SWAP": int(tile <= 32), "num_warps": 4, "num_stages": 3,
    }  # fmt: skip
    c = tuned(kernel, w, (average, *w.shape), default)
    held = c["N"] * (2 if kernel == "sorted_up" else 1)
    return c | {"num_stages": stages_for(c["num_stages"], x.rows, c["M"], w, held, c["K"])}


def sorted_experts(
    x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: Routed
) -> torch.Tensor:
    """x [rows, hidden] through each row's experts: [choices, hidden], in order of choice."""
    experts, hidden, size = down.shape
    choices, top_k = routed.order.shape[0], routed.ids.shape[1]
    average, wide = per_expert(choices, experts), triton.next_power_of_2(experts)
    h, out = x.new_empty(choices, size), x.new_empty(choices, hidden)
    rows = _rows(x, gate_up, len(x))
    launch = _launch("sorted_up", rows, gate_up, size, average)
    tiles = choices // launch["M"] + experts
    _sorted_up[(tiles * (size // launch["N"]),)](
        rows.rows, rows.scale, *operands(gate_up), routed.order, routed.offsets, h,
        HIDDEN=hidden, SIZE=size, TOP_K=top_k, EXPERTS=experts, WIDE=wide, NARROW=rows.narrow,
        **launch, **form(gate_up),
    )  # fmt: skip
    rows = _rows(h, down, len(x))
    launch = _launch("sorted_down", rows, down, hidden, average)
    tiles = choices // launch["M"] + experts
    _sorted_down[(tiles * (hidden // launch["N"]),)](
        rows.rows, rows.scale, *operands(down), routed.order, routed.offsets, out,
        HIDDEN=hidden, SIZE=size, EXPERTS=experts, WIDE=wide, NARROW=rows.narrow, **launch,
        **form(down),
    )  # fmt: skip
    return out


@triton.jit
def _widen_rows(
    codes, scale, zero, out, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """N rows of one matrix, wide: as products of it with unit rows would be, without them."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    row = n.to(tl.int64)[:, None]
    s = tl.load(scale + row // ROWS * GROUPS + k[None, :] // GROUP).to(tl.float32)
    if KIND == 2:
        like = tl.zeros([1], out.dtype.element_ty)
        w = widen(tl.load(codes + row * K + k[None, :]), like).to(tl.float32)
    else:
        if KIND == 0:
            raw = tl.load(codes + row * (K // 2) + k[None, :] // 2).to(tl.int32)
            u = (raw >> (k[None, :] % 2 * 4)) & 15
            w = (u - 8).to(tl.float32)
        else:
            w = (tl.load(codes + row * K + k[None, :]).to(tl.int32) - 128).to(tl.float32)
        if ZERO:
            w -= tl.load(zero + row * GROUPS + k[None, :] // GROUP).to(tl.float32)
    tl.store(out + row * K + k[None, :], (w * s).to(out.dtype.element_ty))


def linear(x: torch.Tensor, w: Weight) -> torch.Tensor:
    """x @ w.T for any number of rows: up to 128 read packed weights once; for more, the library
    multiplies with wide ones, or float8 meets float8."""
    if isinstance(w, torch.Tensor):
        return F.linear(x, w)
    if len(x) <= MAX_ROWS:
        return project(x, w)
    rows = _rows(x, w, len(x))
    if rows.narrow:
        return _narrow_product(rows, w, x)
    if w.format.per_row:
        return reference.linear(x, w)
    return F.linear(x, widen_matrix(w, x.dtype))


def widen_matrix(w: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """One packed matrix, wide: for a pass over so many rows that its product is the library's."""
    outputs, inputs = w.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=w.device)
    columns = chunk(inputs, 256)
    _widen_rows[(outputs // 16, inputs // columns)](
        *operands(w), out, K=inputs, N=16, BK=columns, num_warps=4, **form(w)
    )
    return out


# ---- float8 rows


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """Rows of a pass, wide or as float8 with a scale each."""

    rows: torch.Tensor
    scale: torch.Tensor
    narrow: bool


def _rows(x: torch.Tensor, w: PackedWeight, count: int) -> PromptRows:
    """As products of a pass over `count` rows with this weight take them."""
    if w.format.kind == "float8" and count > MAX_ROWS and narrow_products(x.device):
        return PromptRows(*narrowed(x), True)
    return PromptRows(x, x, False)


@triton.jit
def _narrow(x, out, scale, K: tl.constexpr, WIDE: tl.constexpr):
    """One row: its largest magnitude becomes the format's largest."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    wide = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), 0)
    s = tl.where(largest == 0.0, 1.0, tl.maximum(largest * (1 / 448.0), 1.1754943508222875e-38))
    tl.store(scale + row, s)
    tl.store(out + row * K + k, (wide / s).to(out.dtype.element_ty), mask=k < K)


def narrowed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, K] as float8 with a scale each. Reference: `quantized.quantize`."""
    rows, inputs = x.shape
    out = torch.empty_like(x, dtype=FLOAT8)
    scale = x.new_empty(rows, dtype=torch.float32)
    wide = triton.next_power_of_2(inputs)
    _narrow[(rows,)](x, out, scale, K=inputs, WIDE=wide, num_warps=4)
    return out, scale


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, row_scales, codes, scale, out, rows,
    K: tl.constexpr, OUTPUTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """A tile of float8 rows times float8 weights."""
    columns: tl.constexpr = OUTPUTS // N
    m = tl.program_id(0) // columns * M + tl.arange(0, M)
    n = tl.program_id(0) % columns * N + tl.arange(0, N)
    own = tl.minimum(m, rows - 1).to(tl.int64)
    at = x + own[:, None] * K + tl.arange(0, BK)[None, :]
    acc = tl.zeros([M, N], tl.float32)
    for i in range(0, K, BK):
        acc = packed_times(
            tl.load(at + i), codes, scale, scale, n, i, acc, K, M, N, BK, KIND, GROUP, ROWS, ZERO,
            False,
        )  # fmt: skip
    acc = _times_rows(acc, row_scales, own, False)
    where = out + own[:, None] * OUTPUTS + n[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None])


def _narrow_product(x: PromptRows, w: PackedWeight, like: torch.Tensor) -> torch.Tensor:
    (outputs, inputs), rows = w.shape, len(x.rows)
    out = like.new_empty(rows, outputs)
    default = {"M": 64, "N": chunk(outputs, 128), "K": chunk_of(w, 128), "warps": 4, "stages": 3}
    key = int(triton.next_power_of_2(rows)), outputs, inputs
    c = tuned("narrow_product", w, key, default)
    codes, scale, _ = operands(w)
    stages = stages_for(c["stages"], x.rows, c["M"], w, c["N"], c["K"])
    _product[(triton.cdiv(rows, c["M"]) * (outputs // c["N"]),)](
        x.rows, x.scale, codes, scale, out, rows,
        K=inputs, OUTPUTS=outputs, M=c["M"], N=c["N"], BK=c["K"], num_warps=c["warps"],
        num_stages=stages, **form(w),
    )  # fmt: skip
    return out
