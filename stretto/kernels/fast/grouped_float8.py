"""Float8 experts for many rows: multiplied as they are where that is known to be faster, else widened by `grouped`.

Widening is done again for every tile of rows. Here rows go to the tensor cores as two float8 rows each (`halves`): two
products instead of one, at twice the rate of bfloat16's, and no integer work. Tiles and the order of rows are those of
`grouped`. Called by `layers.prefill` on the stage's thread."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.kernels.fast import grouped
from stretto.kernels.fast.grouped import Routed, tile_of
from stretto.kernels.fast.halves import Halves, fitting, halved, halves, in_turns, magnitude, times
from stretto.kernels.fast.tuning import config
from stretto.kernels.quantized import FLOAT8


@triton.jit
def _narrow(x, planes, scales, HIDDEN: tl.constexpr):
    """One row as `Halves`."""
    m = tl.program_id(0)
    tl.store(scales + m, halved(x, planes, m.to(tl.int64), HIDDEN))


@triton.jit
def _gate_up_native(
    x, row_scales, w, scales, order, offsets, planes, plane_scales, HIDDEN: tl.constexpr, SIZE: tl.constexpr,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    DEVICE: tl.constexpr,
):  # fmt: skip
    """silu(x @ gate) * (x @ up) for one tile, rounded where `grouped` rounds: to `planes` [choices, 2, SIZE] and their
    scales [choices, SIZE // N]."""
    columns: tl.constexpr = SIZE // N
    expert, first, end = tile_of(offsets, tl.program_id(0) // columns, EXPERTS, WIDE, M)
    block = tl.program_id(0) % columns
    if first >= end:
        return
    row = first + tl.arange(0, M)
    n = block * N + tl.arange(0, N)
    k = tl.arange(0, K)
    token = tl.load(order + row, mask=row < end, other=0) // TOP_K
    x_at = x + in_turns(token, M).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    gate_at = w + expert.to(tl.int64) * (2 * SIZE * HIDDEN) + n[:, None] * HIDDEN + k[None, :]
    gate, up = tl.zeros((N, M), tl.float32), tl.zeros((N, M), tl.float32)
    for start in range(0, HIDDEN, K):
        a = tl.load(x_at + start)
        gate += times(tl.load(gate_at + start), a, M, N, DEVICE)
        up += times(tl.load(gate_at + SIZE * HIDDEN + start), a, M, N, DEVICE)
    of_row = tl.load(row_scales + token)[None, :]
    gate *= tl.load(scales + expert * (2 * SIZE) + n)[:, None] * of_row
    up *= tl.load(scales + expert * (2 * SIZE) + SIZE + n)[:, None] * of_row
    gate = gate.to(tl.bfloat16).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    h = (gate * up.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    scale, inverse = fitting(tl.max(magnitude(h), 0))
    high, low = halves(h, inverse[None, :])
    both = tl.reshape(tl.join(high, low), (N, 2 * M)).T
    out = in_turns(tl.where(row < end, row, -1), M)
    tl.store(planes + out.to(tl.int64)[:, None] * SIZE + n[None, :], both, mask=(out >= 0)[:, None])
    tl.store(plane_scales + row * columns + block, scale, mask=row < end)


@triton.jit
def _down_native(
    planes, plane_scales, w, scales, order, offsets, out, HIDDEN: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    STAGES: tl.constexpr, DEVICE: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = HIDDEN // N
    expert, first, end = tile_of(offsets, tl.program_id(0) // columns, EXPERTS, WIDE, M)
    if first >= end:
        return
    row = first + tl.arange(0, M)
    n = tl.program_id(0) % columns * N + tl.arange(0, N)
    k = tl.arange(0, K)
    # Rows behind the expert's last are another's, or behind the buffer's end: look at the first instead.
    inside = tl.where(row < end, row, first)
    h_at = planes + in_turns(inside, M).to(tl.int64)[:, None] * SIZE + k[None, :]
    scale_at = plane_scales + inside * (SIZE // BLOCK)
    w_at = w + expert.to(tl.int64) * (HIDDEN * SIZE) + n[:, None] * SIZE + k[None, :]
    y = tl.zeros((N, M), tl.float32)
    for start in tl.range(0, SIZE, K, num_stages=STAGES):  # as in `experts_float8`
        scale = tl.load(scale_at + start // BLOCK)
        y += times(tl.load(w_at + start), tl.load(h_at + start), M, N, DEVICE) * scale[None, :]
    y *= tl.load(scales + expert * HIDDEN + n)[:, None]
    choice = tl.load(order + row, mask=row < end, other=0)
    rows = y.to(out.dtype.element_ty).T
    tl.store(out + choice.to(tl.int64)[:, None] * HIDDEN + n[None, :], rows, mask=(row < end)[:, None])


def default_launch(part: str, average: int) -> dict[str, int]:
    """By how many rows an expert has on average, as in `grouped`. A tile's rows count twice."""
    if average <= 32:
        inputs = 128 if part == "up" else 64  # no more than `up` makes at once
        return {"M": 16 if average <= 8 else 32, "N": 64, "K": inputs, "num_warps": 4, "num_stages": 3}
    return {"M": 64, "N": 128, "K": 128, "num_warps": 8, "num_stages": 3}


def gate_up(
    x: torch.Tensor, weight: torch.Tensor, routed: Routed, scale: torch.Tensor, launch: dict[str, int] | None = None
) -> Halves:
    """As `grouped.gate_up`: [choices, size], sorted."""
    experts, double, hidden = weight.shape
    size, choices = double // 2, routed.order.shape[0]
    launch = launch or _launch("up", experts, hidden, size, choices)
    rows = Halves(x.new_empty(len(x), 2, hidden, dtype=FLOAT8), x.new_empty(len(x), dtype=torch.float32))
    _narrow[(len(x),)](x, rows.planes, rows.scales, HIDDEN=hidden, num_warps=4)
    blocks = size // launch["N"]
    h = Halves(x.new_empty(choices, 2, size, dtype=FLOAT8), x.new_empty(choices, blocks, dtype=torch.float32))
    _gate_up_native[((choices // launch["M"] + experts) * blocks,)](
        rows.planes, rows.scales, weight, scale, routed.order, routed.offsets, h.planes, h.scales,
        HIDDEN=hidden, SIZE=size, TOP_K=routed.ids.shape[1], EXPERTS=experts, WIDE=triton.next_power_of_2(experts),
        DEVICE=x.is_cuda, **launch,
    )  # fmt: skip
    return h


def down(
    h: Halves,
    weight: torch.Tensor,
    routed: Routed,
    scale: torch.Tensor,
    dtype: torch.dtype,
    launch: dict[str, int] | None = None,
) -> torch.Tensor:
    """As `grouped.down`: [choices, hidden] of this type, in order of choice."""
    experts, hidden, size = weight.shape
    choices = routed.order.shape[0]
    launch = launch or _launch("down", experts, hidden, size, choices)
    block = size // h.scales.shape[1]
    out = h.planes.new_empty(choices, hidden, dtype=dtype)
    _down_native[((choices // launch["M"] + experts) * (hidden // launch["N"]),)](
        h.planes, h.scales, weight, scale, routed.order, routed.offsets, out,
        HIDDEN=hidden, SIZE=size, BLOCK=block, EXPERTS=experts, WIDE=triton.next_power_of_2(experts),
        M=launch["M"], N=launch["N"], K=min(launch["K"], block), STAGES=launch["num_stages"], DEVICE=out.is_cuda,
        num_warps=launch["num_warps"],
    )  # fmt: skip
    return out


def _launch(part: str, experts: int, hidden: int, size: int, choices: int) -> dict[str, int]:
    average = grouped.per_expert(choices, experts)
    return config(f"prefill_{part}_native", (experts, hidden, size, average), default_launch(part, average))


def experts(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    routed: Routed,
    scales: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """x through each row's experts: rows by choice."""
    n, hidden, size = down_weight.shape
    fits = x.dtype == torch.bfloat16 and hidden & (hidden - 1) == 0 and hidden % 128 == 0 and size % 128 == 0
    key = (n, hidden, size, grouped.per_expert(routed.order.shape[0], n))
    if fits and config("prefill_experts_float8", key, {"native": 0})["native"]:
        h = gate_up(x, gate_up_weight, routed, scales[0])
        return down(h, down_weight, routed, scales[1], x.dtype)
    wide = grouped.gate_up(x, gate_up_weight, routed, scale=scales[0])
    return grouped.down(wide, down_weight, routed, scale=scales[1])
