"""The mixture of experts for one row: a matrix-vector product over each of its experts. Reads each
once.

The router is a plain product; the programs of `up_one` and `down_one` find their experts in its
logits by themselves. A shared expert (all rows, weighted by a sigmoid gate) is split into pieces as
wide as the others and joins them as further experts. Weights may be float8 with a scale per output
row (not beside a shared expert): half the bytes, widened as they arrive, the scale applied to the
sum. Several rows: `experts_many`. Launch protocol as in `linear`. Reference:
`stretto.kernels.reference.moe` and `stretto.layers.mlp.MoeMLP`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.triton.device import protocol
from stretto.kernels.triton.linear import project, raw, widen
from stretto.kernels.triton.tuning import config


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
    # of gate_up [experts, 2 * size] and down [experts, hidden]
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    def __post_init__(self) -> None:
        assert self.scales is None or self.shared_down is None, (
            "a shared expert is read as one of the others"
        )

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
def sortable(logits, E: tl.constexpr):
    """One row's logits [E] as float32, and integers in the same order, all different: the lower
    bits count down the experts, so of equal ones the lower number is the larger."""
    e = tl.arange(0, E)
    scores = logits.to(tl.float32)
    scores = tl.where(
        scores == scores, scores, float("-inf")
    )  # what is not a number must leave no place empty
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if logits.dtype == tl.float32:
        order = (bits.to(tl.int64) << 32) | (E - 1 - e)
    else:  # half of the bits are zero in what was 16 bits wide
        order = (bits & -8192) | (E - 1 - e)
    return scores, order


@triton.jit
def without(order, largest):
    """The same, but the largest last."""
    lowest: tl.constexpr = -(2**63) if order.dtype == tl.int64 else -(2**31)
    return tl.where(order == largest, lowest, order)


@triton.jit
def up_scales(scales, e, n, SIZE: tl.constexpr, SCALED: tl.constexpr):
    """Scales of gate and up rows n of expert e [as n]; ones if there are none."""
    gate = n * 0 + 1.0
    up = gate
    if SCALED:
        gate = tl.load(scales + e * (2 * SIZE) + n)
        up = tl.load(scales + e * (2 * SIZE) + SIZE + n)
    return gate, up


@triton.jit
def _up_vector(
    x, gain, logits, gate_up, scales, shared_gate_up, out, eps,
    K: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr,
    SCALED: tl.constexpr, TOP: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row through BN columns of one of its experts: silu(gate) * up."""
    slot = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, K)
    g = tl.load(gain + k).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: `down` may read the logits before its own
    _, order = sortable(tl.load(logits + tl.arange(0, E)), E)
    largest = tl.max(order, 0)
    for _ in range(tl.minimum(slot, TOP - 1)):
        order = without(order, largest)
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
    of_gate, of_up = up_scales(scales, e, n, SIZE, SCALED)
    xs = tl.load(x + k).to(tl.float32)
    scale = tl.rsqrt(tl.sum(xs * xs, 0) / K + eps)
    xs = xs * g
    a = tl.sum(widen(wg, xs) * xs[None, :], 1) * (scale * of_gate)
    b = tl.sum(widen(wu, xs) * xs[None, :], 1) * (scale * of_up)
    tl.store(out + slot * SIZE + n, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty))


@triton.jit
def _down_vector(
    h, logits, down, scales, shared_down, x,
    H: tl.constexpr, E: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr,
    SCALED: tl.constexpr, TOP: tl.constexpr,
    RENORM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of the weighted sum over a row's experts, added to the residual stream x in place.
    All slots are asked for at once: one tile [slots, BN, BK] per piece of the experts' width."""
    SLOTS: tl.constexpr = TOP + PIECES
    slot = tl.arange(0, triton.next_power_of_2(SLOTS))
    there = slot < SLOTS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # The logits are complete: before any program of the kernel in front let this one start, it had
    # waited for them. (Past the first-level cache, as before every wait: it may be older.)
    scores, order = sortable(tl.load(logits + tl.arange(0, E), cache_modifier=".cg"), E)
    e = tl.maximum(E + slot - TOP, 0)  # right from TOP on
    for i in tl.static_range(TOP):
        largest = tl.max(order, 0)
        order = without(order, largest)
        e = tl.where(slot == i, E - 1 - (largest & (E - 1)).to(tl.int32), e)
    high = tl.max(scores, 0)
    weight = tl.exp(
        tl.load(logits + e, mask=slot < TOP, other=float("-inf"), cache_modifier=".cg").to(
            tl.float32
        )
        - high
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
    first = tl.load(at, mask=mask, other=0, eviction_policy="evict_first")
    factor = tl.where(there[:, None], weight, 0.0)
    if SCALED:
        factor = factor * tl.load(
            scales + e[:, None] * H + n[None, :], mask=there[:, None], other=0.0
        )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.load(x + n).to(tl.float32)
    from_h = h + slot[:, None] * SIZE + k[None, :]
    hi = tl.load(from_h, mask=there[:, None], other=0.0).to(tl.float32)
    acc = widen(first, hi) * hi[:, None, :]
    for i in tl.static_range(1, SIZE // BK):
        wi = tl.load(at + i * BK, mask=mask, other=0, eviction_policy="evict_first")
        hi = tl.load(from_h + i * BK, mask=there[:, None], other=0.0).to(tl.float32)
        acc += widen(wi, hi) * hi[:, None, :]
    total = tl.sum(tl.sum(acc, 2) * factor, 0) + before
    tl.store(x + n, total.to(x.dtype.element_ty))


def chunk(size: int, most: int) -> int:
    """The largest power of two that divides `size`, up to `most`."""
    return min(size & -size, most)


def common(x: torch.Tensor, w: ExpertWeights) -> dict[str, int | bool]:
    return {
        "E": w.num_experts,
        "SIZE": w.down.shape[2],
        "PIECES": w.pieces,
        "SCALED": w.scales is not None,
        **protocol(x),
    }


def tuned_for(
    kernel: str, w: ExpertWeights, key: tuple[int, ...], default: dict[str, int]
) -> dict[str, int]:
    """Launch parameters; float8 weights have their own."""
    return config(kernel if w.scales is None else f"{kernel}_float8", key, default)


def up_one(
    x: torch.Tensor, logits: torch.Tensor, w: ExpertWeights, tuned: dict[str, int] | None = None
) -> torch.Tensor:
    """For one row x [1, hidden] of the residual stream and its router's logits: silu(gate) * up of
    its experts [slots, expert size]."""
    hidden, size = x.shape[1], w.down.shape[2]
    c = tuned_for("up_vector", w, (size, hidden), {"BN": 2, "warps": 4}) if tuned is None else tuned
    h = x.new_empty(w.slots, size)
    _up_vector[(size // c["BN"], w.slots)](
        x, w.gain, logits, raw(w.gate_up), x if w.scales is None else w.scales[0],
        w.gate_up if w.shared_gate_up is None else w.shared_gate_up, h, w.eps,
        K=hidden, TOP=w.top_k, BN=c["BN"], num_warps=c["warps"], **common(x, w),
    )  # fmt: skip
    return h


def down_one(
    h: torch.Tensor,
    logits: torch.Tensor,
    w: ExpertWeights,
    x: torch.Tensor,
    tuned: dict[str, int] | None = None,
) -> None:
    """x += the weighted sum of the row's experts, in place. Comes right after `up_one`, which its
    first reads rely on."""
    hidden, size = x.shape[1], w.down.shape[2]
    default = {"BN": 4, "BK": chunk(size, 128), "warps": 4}
    c = tuned_for("down_vector", w, (hidden, size), default) if tuned is None else tuned
    _down_vector[(hidden // c["BN"],)](
        h, logits, raw(w.down), x if w.scales is None else w.scales[1],
        w.down if w.shared_down is None else w.shared_down, x,
        H=hidden, TOP=w.top_k, RENORM=w.norm_topk, BN=c["BN"], BK=c["BK"], num_warps=c["warps"],
        **common(x, w),
    )  # fmt: skip


def mixture_one(x: torch.Tensor, w: ExpertWeights) -> None:
    """x += experts(norm(x)), in place, for one row of the residual stream."""
    logits = project(x, w.router, norm=(w.gain, w.eps))
    down_one(up_one(x, logits, w), logits, w, x)
