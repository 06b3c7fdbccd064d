"""Which experts several rows go to: a table of who chose whom, which the expert kernels for several
rows go by.

The router (`route`) is a product whose sums are left in parts; `choose` adds them up, with one
program per row, and ranks them. Called by `experts_many`; launch protocol as in `linear`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.triton.device import protocol
from stretto.kernels.triton.experts import chunk, sortable, without
from stretto.kernels.triton.linear import Gained, dot, tile_rows
from stretto.kernels.triton.tuning import config


@triton.jit(do_not_specialize=["M"])
def _route(
    x, router, parts, M,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BN logits of up to BM rows over BK of their K numbers: a part of the sum, to parts [K // BK,
    M, N]. The weights come before the wait; after it there is one load and one product."""
    if PDL:
        gdc_launch_dependents()
    m, n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    w = tl.load(router + n[:, None] * K + k[None, :], mask=(n < N)[:, None], other=0.0)
    if PDL:
        gdc_wait()
    rows = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None], other=0.0)
    sums = dot(rows, w.T, tl.zeros([BM, BN], tl.float32))
    to = parts + (tl.program_id(1) * M + m[:, None]) * N + n[None, :]
    tl.store(to, sums, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _ranks(logits, E: tl.constexpr, TOP: tl.constexpr, RENORM: tl.constexpr):
    """Of one row's logits [E]: at which place each expert was chosen (TOP: not at all; of equals,
    the lower number goes first), and its weight, if it was. One warp takes the largest of 128
    integers in a few instructions, so it does that TOP times; comparing all with all took five
    times as long."""
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


@triton.jit
def _placed(
    parts, factor, like, table, weights, m, M, most,
    E: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr,
    RENORM: tl.constexpr,
):  # fmt: skip
    """Of the m-th row: its column of the table, and the weights of its slots, by its logits: the
    sum of their parts, times what its norm comes to, rounded to the type of `like`. It goes to
    `most` experts."""
    N: tl.constexpr = E + (1 if SLOTS > TOP else 0)
    kind: tl.constexpr = like.dtype.element_ty
    e, s = tl.arange(0, E), tl.arange(0, SPLITS)
    at = parts + (s * M + m) * N
    logits = (tl.sum(tl.load(at[:, None] + e[None, :]), 0) * factor).to(kind)
    rank, weight = _ranks(logits, E, TOP, RENORM)
    tl.store(table + e * M + m, tl.where(rank < most, rank, -1).to(tl.int8))
    tl.store(weights + m * SLOTS + rank, weight.to(kind).to(tl.float32), mask=rank < TOP)
    if SLOTS > TOP:
        slot = tl.arange(0, triton.next_power_of_2(SLOTS))
        gate = (tl.sum(tl.load(at + E), 0) * factor).to(kind).to(tl.float32)
        shared = tl.sigmoid(gate).to(kind).to(tl.float32)
        tl.store(
            weights + m * SLOTS + slot, shared + slot * 0.0, mask=(slot >= TOP) & (slot < SLOTS)
        )


@triton.jit(do_not_specialize=["P"])
def _top(
    parts, squares, x, idle, table, weights, scales, eps, P,
    K: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr,
    BP: tl.constexpr,
    RENORM: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One of several rows: its column of the table [E, rows] (the slot of each expert, or -1), the
    weights of its slots [rows, SLOTS], and the factor that its norm comes to [rows]. Padding goes
    to no expert, so that none is read for it alone."""
    m, M = tl.program_id(0), tl.num_programs(0)
    p = tl.arange(0, BP)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    factor = tl.rsqrt(tl.sum(tl.load(squares + p * M + m, mask=p < P, other=0.0), 0) / K + eps)
    most = TOP
    if PADDED:
        most = tl.where(tl.load(idle + m) != 0, 0, TOP)
    _placed(parts, factor, x, table, weights, m, M, most, E, TOP, SLOTS, SPLITS, RENORM)
    tl.store(scales + m, factor)


@triton.jit
def takers(
    table, e, tile, M,
    E: tl.constexpr, PIECES: tl.constexpr, TOP: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Who chose expert e, by the table [E, M]: the places in [rows, slots] of the tile-th BM of
    them (-1: nobody), and how many there are. BR: M rows fit into it. A piece of the shared expert
    has a number for every BM rows."""
    SLOTS: tl.constexpr = TOP + PIECES
    j, m = tl.arange(0, BM), tl.arange(0, BR)
    # Past the first-level cache, as before every wait: it may be older than this step.
    slot = tl.load(table + e * M + m, mask=(m < M) & (e < E), other=-1, cache_modifier=".cg").to(
        tl.int32
    )
    rows = (slot >= 0).to(tl.int32)
    count = tl.sum(rows, 0)
    place = m * SLOTS + slot
    if BR == BM:
        places = tl.where(rows > 0, place, -1)
    else:
        number = tl.where(rows > 0, tl.cumsum(rows, 0) - 1, -1)
        places = (
            tl.sum(tl.where(number[None, :] == (tile * BM + j)[:, None], place[None, :] + 1, 0), 1)
            - 1
        )
    if PIECES > 0:
        if e >= E:
            row = (e - E) // PIECES * BM + j
            places = tl.where(row < M, row * SLOTS + TOP + (e - E) % PIECES, -1)
            count = count * 0 + 1
    return places, count


class Routing(Protocol):
    """What experts say of themselves to be chosen, whatever they are stored in."""

    @property
    def router(self) -> torch.Tensor: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def norm_topk(self) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Which experts several rows go to."""

    table: torch.Tensor  # [experts, rows] int8: at which of the row's slots, or -1
    weights: torch.Tensor  # [rows, slots] float32
    scales: torch.Tensor  # [rows] float32: what the rows' norm comes to


def route(gained: Gained, w: Routing, tuned: dict[str, int] | None = None) -> torch.Tensor:
    """By what rows choose their experts: logits as parts of their sums, [parts, rows, experts]
    float32, with a column more for a shared expert, and without the rows' norm, which is a factor.
    `gained` are the rows for that norm."""
    rows, hidden = gained.x.shape
    outputs, tile = len(w.router), tile_rows(rows)
    default = {"BN": 32, "BK": chunk(hidden, 128), "warps": 4}
    c = config("route", (tile, outputs, hidden), default) if tuned is None else tuned
    parts = gained.x.new_empty(hidden // c["BK"], rows, outputs, dtype=torch.float32)
    _route[(triton.cdiv(outputs, c["BN"]), len(parts))](
        gained.x, w.router, parts, rows,
        N=outputs, K=hidden, BM=tile, BN=c["BN"], BK=c["BK"], num_warps=c["warps"],
        **protocol(parts),
    )  # fmt: skip
    return parts


def choose(
    parts: torch.Tensor, gained: Gained, w: Routing, idle: torch.Tensor | None = None
) -> Choice:
    """The experts of the rows that `route` was asked for; none for those that `idle` [rows] int8
    marks."""
    rows, hidden = gained.x.shape
    summed = len(gained.squares)
    choice = Choice(
        table=parts.new_empty(w.num_experts, rows, dtype=torch.int8),
        weights=parts.new_empty(rows, w.slots, dtype=torch.float32),
        scales=parts.new_empty(rows, dtype=torch.float32),
    )
    _top[(rows,)](
        parts, gained.squares, gained.x, parts if idle is None else idle, choice.table,
        choice.weights, choice.scales,
        gained.eps, summed,
        K=hidden, E=w.num_experts, TOP=w.top_k, SLOTS=w.slots, SPLITS=len(parts),
        BP=triton.next_power_of_2(summed), RENORM=w.norm_topk, PADDED=idle is not None, num_warps=1,
        **protocol(parts),
    )  # fmt: skip
    return choice
