"""The mixture of experts with packed weights: a decode step of one row and of several.

Each is the way through wide weights (`experts`, `experts_many`) with another product in it, which
reads weights as they are stored (`packed`). A shared expert stays wide, and is read as
one of the others. Reference: `stretto.kernels.reference.moe`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.reference.packed import PackedWeight
from stretto.kernels.triton import experts_many
from stretto.kernels.triton.device import protocol
from stretto.kernels.triton.experts import sortable, without
from stretto.kernels.triton.experts_choice import Choice, choose, route, takers
from stretto.kernels.triton.linear import Gained, project, tile_rows
from stretto.kernels.triton.packed import (
    chunk_of,
    form,
    matrix_at,
    operands,
    packed_times,
    stages_for,
    times,
    tuned,
)

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
def _row(x, gain, squares, first):
    """Some numbers of one row times a norm's gain, the first row of a tile; and their squares."""
    row = tl.load(x).to(tl.float32)
    gained = row * tl.load(gain).to(tl.float32)
    return tl.where(first, gained[None, :], 0.0).to(x.dtype.element_ty), squares + row * row


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
    codes, scale, zero = matrix_at(codes, scale, zero, inside, 2 * SIZE, K, KIND, GROUP, ROWS)
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    # Two loops, each without a branch: loads of such alone are pipelined.
    if e < E:
        for i in range(0, K, BK):
            xi, squares = _row(x + i + k, gain + i + k, squares, first)
            gate = packed_times(
                xi, codes, scale, zero, n, i, gate, K, BM, BN, BK, KIND, GROUP, ROWS, ZERO, False
            )
            up = packed_times(
                xi, codes, scale, zero, n + SIZE, i, up, K, BM, BN, BK, KIND, GROUP, ROWS, ZERO,
                False,
            )  # fmt: skip
    elif PIECES > 0:
        at = shared + (e - E).to(tl.int64) * (SIZE * K) + n[:, None] * K + k[None, :]
        for i in range(0, K, BK):
            xi, squares = _row(x + i + k, gain + i + k, squares, first)
            gate = times(tl.load(at + i), xi, gate, False)
            up = times(tl.load(at + PIECES * SIZE * K + i), xi, up, False)
    factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    a, b = tl.sum(gate, 0) * factor, tl.sum(up, 0) * factor
    tl.store(out + slot * SIZE + n, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty))


@triton.jit
def _weights(logits, e, slot, E: tl.constexpr, TOP: tl.constexpr, RENORM: tl.constexpr):
    """What experts e of the slots count for, by one row's logits."""
    scores, _ = sortable(tl.load(logits + tl.arange(0, E)), E)
    high = tl.max(scores, 0)
    of_slot = tl.load(logits + e, mask=slot < TOP, other=float("-inf")).to(tl.float32)
    weight = tl.exp(of_slot - high)
    if RENORM:
        return weight / tl.sum(weight, 0)
    else:
        return weight / tl.sum(tl.exp(scores - high), 0)


@triton.jit
def _down_one(
    h, logits, codes, scale, zero, shared, x,
    H: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, TOP: tl.constexpr,
    RENORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of the weighted sum over a row's experts, added to the residual stream x in place.
    All slots at once: a tile's rows are the slots' rows of h, its columns every slot's BN weight
    rows, and a slot's results are where the two meet."""
    SLOTS: tl.constexpr = triton.next_power_of_2(TOP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    m, slot = tl.arange(0, BM), tl.arange(0, SLOTS)
    _, order = sortable(tl.load(logits + tl.arange(0, E)), E)
    e = slot * 0
    for i in tl.static_range(TOP):
        largest = tl.max(order, 0)
        order = without(order, largest)
        # Slots behind the last are read too: the last one's, which are read anyway.
        e = tl.where(slot >= i, E - 1 - (largest & (E - 1)).to(tl.int32), e)
    weight = _weights(logits, e, slot, E, TOP, RENORM).to(x.dtype.element_ty).to(tl.float32)
    rows = tl.reshape(e[:, None] * H + n[None, :], [SLOTS * BN])
    factor = tl.reshape(weight[:, None].broadcast_to(SLOTS, BN), [SLOTS * BN])
    of = tl.reshape(slot[:, None].broadcast_to(SLOTS, BN), [SLOTS * BN])
    acc = tl.zeros([BM, SLOTS * BN], tl.float32)
    from_h = h + m[:, None] * SIZE + k[None, :]
    for i in range(0, SIZE, BK):
        hi = tl.load(from_h + i, mask=(m < TOP)[:, None], other=0.0)
        acc = packed_times(
            hi, codes, scale, zero, rows, i, acc, SIZE, BM, SLOTS * BN, BK, KIND, GROUP, ROWS,
            ZERO, False,
        )  # fmt: skip
    own = tl.sum(tl.where(m[:, None] == of[None, :], acc, 0.0), 0) * factor
    total = tl.load(x + n).to(tl.float32) + tl.sum(tl.reshape(own, [SLOTS, BN]), 0)
    if PIECES > 0:
        gate = tl.sigmoid(tl.load(logits + E).to(tl.float32))
        gate = gate.to(x.dtype.element_ty).to(tl.float32)
        part = tl.zeros([BN, BK], tl.float32)
        for i in range(0, PIECES * SIZE, BK):
            row = tl.load(h + TOP * SIZE + i + k).to(tl.float32)
            w = tl.load(shared + n[:, None] * (PIECES * SIZE) + i + k[None, :])
            part += w.to(tl.float32) * row[None, :]
        total += tl.sum(part, 1) * gate
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
    codes, scale, zero = matrix_at(codes, scale, zero, e, 2 * SIZE, K, KIND, GROUP, ROWS)
    if BR == BM:  # as in `experts_many`
        if count > 0:
            _up_tile(
                x, row_scales, codes, scale, zero, out, places, n,
                K, SIZE, SLOTS, BM, BN, BK, SWAP, KIND, GROUP, ROWS, ZERO,
            )  # fmt: skip
    else:
        for tile in range(tl.cdiv(count, BM)):
            if tile > 0:
                places, _ = takers(table, e, tile, M, E, PIECES, TOP, BM, BR)
            _up_tile(
                x, row_scales, codes, scale, zero, out, places, n,
                K, SIZE, SLOTS, BM, BN, BK, SWAP, KIND, GROUP, ROWS, ZERO,
            )  # fmt: skip


@triton.jit
def _down_tile(
    h, codes, scale, zero, weights, out, places, n,
    H: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
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
    codes, scale, zero = matrix_at(codes, scale, zero, e, H, SIZE, KIND, GROUP, ROWS)
    if BR == BM:  # as in `experts_many`
        if count > 0:
            _down_tile(
                h, codes, scale, zero, weights, out, places, n,
                H, SIZE, BM, BN, BK, SWAP, KIND, GROUP, ROWS, ZERO,
            )  # fmt: skip
    else:
        for tile in range(tl.cdiv(count, BM)):
            if tile > 0:
                places, _ = takers(table, e, tile, M, E, PIECES, TOP, BM, BR)
            _down_tile(
                h, codes, scale, zero, weights, out, places, n,
                H, SIZE, BM, BN, BK, SWAP, KIND, GROUP, ROWS, ZERO,
            )  # fmt: skip


def _common(x: torch.Tensor, w: PackedExpertWeights, one: PackedWeight) -> dict[str, int | bool]:
    """Of both products; `one` is the weight of this one."""
    return {
        "E": w.num_experts,
        "SIZE": w.down.shape[2],
        "PIECES": w.pieces,
        "TOP": w.top_k,
        **form(one),
        **protocol(x),
    }


def mixture_one(x: torch.Tensor, w: PackedExpertWeights) -> None:
    """x += experts(norm(x)), in place, for one row of the residual stream."""
    hidden, size = x.shape[1], w.down.shape[2]
    logits = project(x, w.router, norm=(w.gain, w.eps))
    default = {"BN": 16, "BK": chunk_of(w.gate_up, 256), "warps": 4, "stages": 3}
    c = tuned("up_one", w.gate_up, (size, hidden), default)
    h = x.new_empty(w.slots, size)
    _up_one[(size // c["BN"], w.slots)](
        x, w.gain, logits, *operands(w.gate_up),
        x if w.shared_gate_up is None else w.shared_gate_up, h, w.eps,
        K=hidden, BM=ONE, BN=c["BN"], BK=c["BK"], num_warps=c["warps"],
        num_stages=stages_for(c["stages"], x, ONE, w.gate_up, 2 * c["BN"], c["BK"]),
        **_common(x, w, w.gate_up),
    )  # fmt: skip
    slots = int(triton.next_power_of_2(w.top_k))
    default = {"BN": 8, "BK": chunk_of(w.down, 128), "warps": 4, "stages": 4}
    c = tuned("down_one", w.down, (hidden, size), default)
    _down_one[(hidden // c["BN"],)](
        h, logits, *operands(w.down), x if w.shared_down is None else w.shared_down, x,
        H=hidden, RENORM=w.norm_topk, BM=max(ONE, slots), BN=c["BN"], BK=c["BK"],
        num_warps=c["warps"],
        num_stages=stages_for(c["stages"], x, ONE, w.down, slots * c["BN"], c["BK"]),
        **_common(x, w, w.down),
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
    default = {"BN": 32, "BK": chunk_of(w.gate_up, 128), "warps": 4, "stages": 4, "swap": 0}
    key = (tile_rows(rows), size, hidden)
    c = tuned("up_matrix", w.gate_up, key, default)
    h = gained.x.new_empty(rows, w.slots, size)
    numbers, tiles = _tiles(rows, w)
    _up_matrix[(size // c["BN"], numbers)](
        gained.x, choice.scales, choice.table, *operands(w.gate_up),
        w.router if w.shared_gate_up is None else w.shared_gate_up, h, rows,
        K=hidden, BN=c["BN"], BK=c["BK"], SWAP=bool(c["swap"]), num_warps=c["warps"],
        num_stages=stages_for(c["stages"], h, tiles["BM"], w.gate_up, 2 * c["BN"], c["BK"]),
        **tiles, **_common(h, w, w.gate_up),
    )  # fmt: skip
    return h


def _down(h: torch.Tensor, choice: Choice, w: PackedExpertWeights, x: torch.Tensor) -> torch.Tensor:
    rows, hidden = x.shape
    size = w.down.shape[2]
    default = {"BN": 32, "BK": chunk_of(w.down, 128), "warps": 4, "stages": 4, "swap": 0}
    key = (tile_rows(rows), hidden, size)
    c = tuned("down_matrix", w.down, key, default)
    parts = x.new_empty(rows, w.slots, hidden, dtype=torch.float32)
    numbers, tiles = _tiles(rows, w)
    _down_matrix[(hidden // c["BN"], numbers)](
        h, choice.table, *operands(w.down), w.router if w.shared_down is None else w.shared_down,
        choice.weights, parts, rows,
        H=hidden, BN=c["BN"], BK=c["BK"], SWAP=bool(c["swap"]), num_warps=c["warps"],
        num_stages=stages_for(c["stages"], h, tiles["BM"], w.down, c["BN"], c["BK"]),
        **tiles, **_common(x, w, w.down),
    )  # fmt: skip
    return parts
