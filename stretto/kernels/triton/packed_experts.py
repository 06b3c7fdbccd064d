"""The mixture of experts with packed weights: a decode step of one row, of several rows, and sorted
rows of a prompt.

Each is the way through wide weights (`experts`, `experts_many`, `grouped`) with another product in
it, which reads weights as they are stored (`packed`). A shared expert stays wide, and is read as
one of the others. Reference: `stretto.kernels.reference.moe`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.reference.packed import PackedWeight, Weight
from stretto.kernels.triton import MAX_ROWS, experts_many
from stretto.kernels.triton.device import protocol
from stretto.kernels.triton.experts import chunk, sortable, without
from stretto.kernels.triton.experts_choice import Choice, choose, route, takers
from stretto.kernels.triton.grouped import Routed, _tile, per_expert
from stretto.kernels.triton.linear import Gained, project, tile_rows, widen
from stretto.kernels.triton.packed import KINDS, chunk_of, operands, packed_times, times
from stretto.kernels.triton.packed import project as packed_project
from stretto.kernels.triton.tuning import config

ONE = 16
"""Rows of a tile that holds one row: the matrix units take no fewer."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedExpertWeights:
    """As `experts.ExpertWeights`, the experts packed."""

    gain: torch.Tensor
    eps: float
    router: torch.Tensor
    gate_up: PackedWeight  # [experts, 2 * size, hidden]
    down: PackedWeight  # [experts, hidden, size]
    top_k: int
    norm_topk: bool
    shared_gate_up: torch.Tensor | None = None  # [2 * shared size, hidden]
    shared_down: torch.Tensor | None = None  # [hidden, shared size]

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    @property
    def pieces(self) -> int:
        return 0 if self.shared_down is None else self.shared_down.shape[1] // self.down.shape[2]

    @property
    def slots(self) -> int:
        return self.top_k + self.pieces


@triton.jit
def _matrix_at(
    codes, scale, zero, e, outputs, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Where the e-th of several matrices of so many outputs begins."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    PER: tl.constexpr = 2 if KIND == 0 else 1
    e = e.to(tl.int64)
    scales = e * (outputs // ROWS * GROUPS)
    return codes + e * outputs * (K // PER), scale + scales, zero + scales


@triton.jit
def _choice(logits, slot, E: tl.constexpr, TOP: tl.constexpr):
    """The expert of one row's slot; right from TOP on for pieces of the shared one."""
    scores, order = sortable(tl.load(logits + tl.arange(0, E)), E)
    largest = tl.max(order, 0)
    for _ in range(tl.minimum(slot, TOP - 1)):
        order = without(order, largest)
        largest = tl.max(order, 0)
    e = E - 1 - (largest & (E - 1)).to(tl.int32)
    return tl.where(slot < TOP, e, E + slot - TOP), scores


@triton.jit
def _up_one(
    x, gain, logits, codes, scale, zero, shared, out, eps,
    K: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, TOP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, ZERO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, the first of a tile, through BN columns of one of its experts: silu(gate) * up."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    first = tl.arange(0, BM)[:, None] == 0
    e, _ = _choice(logits, slot, E, TOP)
    inside = tl.minimum(e, E - 1)
    codes, scale, zero = _matrix_at(codes, scale, zero, inside, 2 * SIZE, K, KIND, GROUP, ROWS)
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for i in range(0, K, BK):
        row = tl.load(x + i + k).to(tl.float32)
        squares += row * row
        row = row * tl.load(gain + i + k).to(tl.float32)
        xi = tl.where(first, row[None, :], 0.0).to(x.dtype.element_ty)
        if PIECES > 0:
            if e >= E:
                at = shared + (e - E).to(tl.int64) * (SIZE * K) + n[:, None] * K + i + k[None, :]
                gate = times(tl.load(at), xi, gate, False)
                up = times(tl.load(at + PIECES * SIZE * K), xi, up, False)
            else:
                gate = packed_times(
                    xi, codes, scale, zero, n, i, gate, K, BM, BN, BK, KIND, GROUP, ROWS, ZERO,
                    False,
                )  # fmt: skip
                up = packed_times(
                    xi, codes, scale, zero, n + SIZE, i, up, K, BM, BN, BK, KIND, GROUP, ROWS,
                    ZERO, False,
                )  # fmt: skip
        else:
            gate = packed_times(
                xi, codes, scale, zero, n, i, gate, K, BM, BN, BK, KIND, GROUP, ROWS, ZERO, False
            )
            up = packed_times(
                xi, codes, scale, zero, n + SIZE, i, up, K, BM, BN, BK, KIND, GROUP, ROWS, ZERO,
                False,
            )  # fmt: skip
    factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    a, b = tl.sum(gate, 0) * factor, tl.sum(up, 0) * factor
    tl.store(out + slot * SIZE + n, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty))


@triton.jit
def _down_one(
    h, logits, codes, scale, zero, shared, x,
    H: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, TOP: tl.constexpr,
    RENORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of the weighted sum over a row's experts, slot by slot, added to the residual
    stream x in place."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    first = tl.arange(0, BM)[:, None] == 0
    scores, order = sortable(tl.load(logits + tl.arange(0, E)), E)
    high = tl.max(scores, 0)
    whole = tl.sum(tl.exp(scores - high), 0)
    if RENORM:
        rest = order
        whole = 0.0
        for _ in tl.static_range(TOP):
            largest = tl.max(rest, 0)
            rest = without(rest, largest)
            e = E - 1 - (largest & (E - 1)).to(tl.int32)
            whole += tl.exp(tl.load(logits + e).to(tl.float32) - high)
    total = tl.load(x + n).to(tl.float32)
    for slot in range(TOP):
        largest = tl.max(order, 0)
        order = without(order, largest)
        e = E - 1 - (largest & (E - 1)).to(tl.int32)
        weight = tl.exp(tl.load(logits + e).to(tl.float32) - high) / whole
        weight = weight.to(x.dtype.element_ty).to(tl.float32)
        own, s, z = _matrix_at(codes, scale, zero, e, H, SIZE, KIND, GROUP, ROWS)
        acc = tl.zeros([BM, BN], tl.float32)
        for i in range(0, SIZE, BK):
            row = tl.load(h + slot * SIZE + i + k)
            hi = tl.where(first, row[None, :], 0.0).to(h.dtype.element_ty)
            acc = packed_times(
                hi, own, s, z, n, i, acc, SIZE, BM, BN, BK, KIND, GROUP, ROWS, ZERO, False
            )
        total += tl.sum(acc, 0) * weight
    if PIECES > 0:
        gate = tl.sigmoid(tl.load(logits + E).to(tl.float32))
        gate = gate.to(x.dtype.element_ty).to(tl.float32)
        acc = tl.zeros([BN, BK], tl.float32)
        for i in range(0, PIECES * SIZE, BK):
            row = tl.load(h + TOP * SIZE + i + k).to(tl.float32)
            w = tl.load(shared + n[:, None] * (PIECES * SIZE) + i + k[None, :])
            acc += w.to(tl.float32) * row[None, :]
        total += tl.sum(acc, 1) * gate
    tl.store(x + n, total.to(x.dtype.element_ty))


@triton.jit
def _up_tile(
    x, row_scales, codes, scale, zero, out, places, n,
    K: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SWAP: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    taken, m = places >= 0, places // SLOTS
    factor = tl.load(row_scales + m, mask=taken, other=0.0)[:, None]
    from_x = x + m[:, None] * K + tl.arange(0, BK)[None, :]
    a = tl.zeros([BN if SWAP else BM, BM if SWAP else BN], tl.float32)
    b = tl.zeros([BN if SWAP else BM, BM if SWAP else BN], tl.float32)
    for i in range(0, K, BK):
        xi = tl.load(from_x + i, mask=taken[:, None], other=0.0)
        a = packed_times(
            xi, codes, scale, zero, n, i, a, K, BM, BN, BK, KIND, GROUP, ROWS, ZERO, SWAP
        )
        b = packed_times(
            xi, codes, scale, zero, n + SIZE, i, b, K, BM, BN, BK, KIND, GROUP, ROWS, ZERO, SWAP
        )
    if SWAP:
        a, b = a.T, b.T
    a *= factor
    h = a * tl.sigmoid(a) * (b * factor)
    tl.store(
        out + places[:, None] * SIZE + n[None, :], h.to(out.dtype.element_ty), mask=taken[:, None]
    )


@triton.jit(do_not_specialize=["M"])
def _up_matrix(
    x, row_scales, table, codes, scale, zero, shared, out, M,
    K: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, TOP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, SWAP: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.program_id(1)
    places, count = takers(table, e, 0, M, E, PIECES, TOP, BM, BR)
    SLOTS: tl.constexpr = TOP + PIECES
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if PIECES > 0:
        if e >= E:
            gate = shared + (e - E) % PIECES * (SIZE * K) + n[:, None] * K
            experts_many._up_tile(
                x, row_scales, gate + tl.arange(0, BK)[None, :], PIECES * SIZE * K, row_scales,
                out, places, e, n, K, SIZE, False, SLOTS, BM, BN, BK, SWAP,
            )  # fmt: skip
            return
    codes, scale, zero = _matrix_at(codes, scale, zero, e, 2 * SIZE, K, KIND, GROUP, ROWS)
    for tile in range(tl.cdiv(count, BM)):
        if tile > 0:
            places, _ = takers(table, e, tile, M, E, PIECES, TOP, BM, BR)
        _up_tile(
            x, row_scales, codes, scale, zero, out, places, n,
            K, SIZE, SLOTS, BM, BN, BK, SWAP, KIND, GROUP, ROWS, ZERO,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _down_matrix(
    h, table, codes, scale, zero, shared, weights, out, M,
    H: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, TOP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, SWAP: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    e = tl.program_id(1)
    places, count = takers(table, e, 0, M, E, PIECES, TOP, BM, BR)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if PIECES > 0:
        if e >= E:
            at = shared + (e - E) % PIECES * SIZE + n[:, None] * (PIECES * SIZE)
            experts_many._down_tile(
                h, at + tl.arange(0, BK)[None, :], weights, weights, out, places, e, n,
                H, SIZE, False, BM, BN, BK, SWAP,
            )  # fmt: skip
            return
    codes, scale, zero = _matrix_at(codes, scale, zero, e, H, SIZE, KIND, GROUP, ROWS)
    for tile in range(tl.cdiv(count, BM)):
        if tile > 0:
            places, _ = takers(table, e, tile, M, E, PIECES, TOP, BM, BR)
        taken = places >= 0
        from_h = h + places[:, None] * SIZE + tl.arange(0, BK)[None, :]
        acc = tl.zeros([BN if SWAP else BM, BM if SWAP else BN], tl.float32)
        for i in range(0, SIZE, BK):
            hi = tl.load(from_h + i, mask=taken[:, None], other=0.0)
            acc = packed_times(
                hi, codes, scale, zero, n, i, acc, SIZE, BM, BN, BK, KIND, GROUP, ROWS, ZERO, SWAP
            )
        if SWAP:
            acc = acc.T
        acc *= tl.load(weights + places, mask=taken, other=0.0)[:, None]
        tl.store(out + places[:, None] * H + n[None, :], acc, mask=taken[:, None])


def _common(x: torch.Tensor, w: PackedExpertWeights, one: PackedWeight) -> dict[str, int | bool]:
    """Of both products; `one` is the weight of this one."""
    f = one.format
    return {
        "E": w.num_experts,
        "SIZE": w.down.shape[2],
        "PIECES": w.pieces,
        "TOP": w.top_k,
        "KIND": KINDS[f.kind],
        "GROUP": f.group or one.shape[-1],
        "ROWS": f.block_rows,
        "ZERO": one.zero is not None,
        **protocol(x),
    }


def mixture_one(x: torch.Tensor, w: PackedExpertWeights) -> None:
    """x += experts(norm(x)), in place, for one row of the residual stream."""
    hidden, size, kind = x.shape[1], w.down.shape[2], w.down.format.kind
    logits = project(x, w.router, norm=(w.gain, w.eps))
    default = {"BN": 16, "BK": chunk_of(w.gate_up, 256), "warps": 4, "stages": 3}
    c = config(f"up_one_{kind}", (size, hidden), default)
    h = x.new_empty(w.slots, size)
    _up_one[(size // c["BN"], w.slots)](
        x, w.gain, logits, *operands(w.gate_up),
        x if w.shared_gate_up is None else w.shared_gate_up, h, w.eps,
        K=hidden, BM=ONE, BN=c["BN"], BK=c["BK"], num_warps=c["warps"], num_stages=c["stages"],
        **_common(x, w, w.gate_up),
    )  # fmt: skip
    default = {"BN": 16, "BK": chunk_of(w.down, 256), "warps": 4, "stages": 3}
    c = config(f"down_one_{kind}", (hidden, size), default)
    _down_one[(hidden // c["BN"],)](
        h, logits, *operands(w.down), x if w.shared_down is None else w.shared_down, x,
        H=hidden, RENORM=w.norm_topk, BM=ONE, BN=c["BN"], BK=c["BK"], num_warps=c["warps"],
        num_stages=c["stages"], **_common(x, w, w.down),
    )  # fmt: skip


def _tiles(rows: int, w: PackedExpertWeights) -> tuple[int, dict[str, int]]:
    """As `experts_many._tiles`."""
    tile = tile_rows(rows) if rows <= 32 else 16
    numbers = w.num_experts + w.pieces * triton.cdiv(rows, tile)
    return numbers, {"BM": tile, "BR": max(tile, tile_rows(rows))}


def mixture(
    x: torch.Tensor,
    gained: Gained,
    w: PackedExpertWeights,
    following: tuple[torch.Tensor, float] | None = None,
    idle: torch.Tensor | None = None,
) -> Gained | None:
    """The same for several rows: as `experts_many.mixture`."""
    choice = choose(route(gained, w), gained, w, idle)
    h = _up(gained, choice, w)
    parts = _down(h, choice, w, x)
    return experts_many.add_slots(parts, x, w.slots, following, idle)


def _up(gained: Gained, choice: Choice, w: PackedExpertWeights) -> torch.Tensor:
    rows, hidden = gained.x.shape
    size = w.down.shape[2]
    default = {"BN": 32, "BK": chunk_of(w.gate_up, 128), "warps": 4, "stages": 3, "swap": 0}
    key = (tile_rows(rows), size, hidden)
    c = config(f"up_matrix_{w.gate_up.format.kind}", key, default)
    h = gained.x.new_empty(rows, w.slots, size)
    numbers, tiles = _tiles(rows, w)
    _up_matrix[(size // c["BN"], numbers)](
        gained.x, choice.scales, choice.table, *operands(w.gate_up),
        w.router if w.shared_gate_up is None else w.shared_gate_up, h, rows,
        K=hidden, BN=c["BN"], BK=c["BK"], SWAP=bool(c["swap"]), num_warps=c["warps"],
        num_stages=c["stages"], **tiles, **_common(h, w, w.gate_up),
    )  # fmt: skip
    return h


def _down(h: torch.Tensor, choice: Choice, w: PackedExpertWeights, x: torch.Tensor) -> torch.Tensor:
    rows, hidden = x.shape
    size = w.down.shape[2]
    default = {"BN": 32, "BK": chunk_of(w.down, 128), "warps": 4, "stages": 3, "swap": 0}
    key = (tile_rows(rows), hidden, size)
    c = config(f"down_matrix_{w.down.format.kind}", key, default)
    parts = x.new_empty(rows, w.slots, hidden, dtype=torch.float32)
    numbers, tiles = _tiles(rows, w)
    _down_matrix[(hidden // c["BN"], numbers)](
        h, choice.table, *operands(w.down), w.router if w.shared_down is None else w.shared_down,
        choice.weights, parts, rows,
        H=hidden, BN=c["BN"], BK=c["BK"], SWAP=bool(c["swap"]), num_warps=c["warps"],
        num_stages=c["stages"], **tiles, **_common(x, w, w.down),
    )  # fmt: skip
    return parts


# ---- prompts


@triton.jit
def _sorted_up(
    x, codes, scale, zero, order, offsets, out,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    WIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SWAP: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """silu(x @ gate) * (x @ up) for one tile, rounded as `grouped._gate_up_tile` does."""
    columns: tl.constexpr = SIZE // N
    expert, first, end = _tile(offsets, tl.program_id(0) // columns, EXPERTS, WIDE, M)
    n = tl.program_id(0) % columns * N + tl.arange(0, N)
    if first >= end:
        return
    row = first + tl.arange(0, M)
    token = tl.load(order + row, mask=row < end, other=0) // TOP_K
    x_at = x + token.to(tl.int64)[:, None] * HIDDEN + tl.arange(0, K)[None, :]
    codes, scale, zero = _matrix_at(codes, scale, zero, expert, 2 * SIZE, HIDDEN, KIND, GROUP, ROWS)
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
    h, codes, scale, zero, order, offsets, out,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SWAP: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr,
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
    codes, scale, zero = _matrix_at(codes, scale, zero, expert, HIDDEN, SIZE, KIND, GROUP, ROWS)
    y = tl.zeros([N if SWAP else M, M if SWAP else N], tl.float32)
    for start in range(0, SIZE, K):
        a = tl.load(h_at + start)
        y = packed_times(
            a, codes, scale, zero, n, start, y, SIZE, M, N, K, KIND, GROUP, ROWS, ZERO, SWAP
        )
    rows = y.to(out.dtype.element_ty)
    if SWAP:
        rows = tl.trans(rows)
    choice = tl.load(order + row, mask=row < end, other=0)
    mine = (row < end)[:, None] & (n < HIDDEN)[None, :]
    tl.store(out + choice.to(tl.int64)[:, None] * HIDDEN + n[None, :], rows, mask=mine)


def _launch(kernel: str, w: PackedWeight, columns: int, average: int) -> dict[str, int]:
    tile = 16 if average <= 8 else 32 if average <= 16 else 64
    default = {
        "M": tile, "N": min(64, chunk(columns, 64)), "K": chunk_of(w, 128),
        "SWAP": int(tile <= 32), "num_warps": 4, "num_stages": 3,
    }  # fmt: skip
    return config(f"{kernel}_{w.format.kind}", (*w.shape, average), default)


def sorted_experts(
    x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: Routed
) -> torch.Tensor:
    """x [rows, hidden] through each row's experts: [choices, hidden], in order of choice."""
    experts, hidden, size = down.shape
    choices, top_k = routed.order.shape[0], routed.ids.shape[1]
    average, wide = per_expert(choices, experts), triton.next_power_of_2(experts)
    h, out = x.new_empty(choices, size), x.new_empty(choices, hidden)
    launch = _launch("prefill_gate_up", gate_up, size, average)
    tiles = choices // launch["M"] + experts
    _sorted_up[(tiles * (size // launch["N"]),)](
        x, *operands(gate_up), routed.order, routed.offsets, h,
        HIDDEN=hidden, SIZE=size, TOP_K=top_k, EXPERTS=experts, WIDE=wide, **launch,
        **_format(gate_up),
    )  # fmt: skip
    launch = _launch("prefill_down", down, hidden, average)
    tiles = choices // launch["M"] + experts
    _sorted_down[(tiles * (hidden // launch["N"]),)](
        h, *operands(down), routed.order, routed.offsets, out,
        HIDDEN=hidden, SIZE=size, EXPERTS=experts, WIDE=wide, **launch, **_format(down),
    )  # fmt: skip
    return out


def _format(w: PackedWeight) -> dict[str, int | bool]:
    f = w.format
    return {
        "KIND": KINDS[f.kind], "GROUP": f.group or w.shape[-1], "ROWS": f.block_rows,
        "ZERO": w.zero is not None,
    }  # fmt: skip


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
    multiplies with wide ones."""
    if isinstance(w, torch.Tensor):
        return F.linear(x, w)
    if len(x) <= MAX_ROWS:
        return packed_project(x, w)
    return F.linear(x, widen_matrix(w, x.dtype))


def widen_matrix(w: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """One packed matrix, wide: for a pass over so many rows that its product is the library's."""
    outputs, inputs = w.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=w.device)
    columns = chunk(inputs, 256)
    _widen_rows[(outputs // 16, inputs // columns)](
        *operands(w), out, K=inputs, N=16, BK=columns, num_warps=4, **_format(w)
    )
    return out
