"""Row kernels of a pass over many rows: what lies between the matrix products of a decoder layer.

Each takes `count`, a device scalar: rows from there on are padding of a captured graph. They read
nothing, leave no key or value, and come out as zeros. Everything rounds where the reference does
(normalise in float32, cast, scale), so that the two agree to the last bit but for the order of
sums. Called on the stage's thread, on the current stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stretto.kernels.triton.linear import norm_row


@triton.jit
def _add_norm(
    x,
    add,
    weight,
    count,
    total,
    normed,
    eps,
    SIZE: tl.constexpr,
    WIDE: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.arange(0, WIDE)
    inside = at < SIZE
    real = inside & (row < tl.load(count))
    place = row.to(tl.int64) * SIZE + at
    dtype = x.dtype.element_ty
    stream = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    if ADD:
        stream += tl.load(add + place, mask=real, other=0.0).to(tl.float32)
        stream = stream.to(dtype).to(tl.float32)
        tl.store(total + place, stream.to(dtype), mask=inside)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, norm_row(stream, scale, SIZE, eps, dtype), mask=inside)


def add_norm(
    x: torch.Tensor, add: torch.Tensor | None, weight: torch.Tensor, eps: float, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + add, its RMS norm), or (x, its norm) without `add`. x [rows, size]."""
    rows, size = x.shape
    total = x if add is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    wide = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        x, x if add is None else add, weight, count, total, normed, eps,
        SIZE=size, WIDE=wide, ADD=add is not None, num_warps=row_warps(wide),
    )  # fmt: skip
    return total, normed


def row_warps(wide: int) -> int:
    """Warps for one row: eight values (one 16-byte load) per thread, if there are that many."""
    return max(1, min(8, wide // 256))


@triton.jit
def _turn(low, high, cos, sin, place, half: tl.constexpr, dtype: tl.constexpr):
    """Both halves of normed rows [.., half], turned; `place` points at the lower half of the
    angles."""
    cos_low, cos_high = (
        tl.load(cos + place).to(tl.float32),
        tl.load(cos + place + half).to(tl.float32),
    )
    sin_low, sin_high = (
        tl.load(sin + place).to(tl.float32),
        tl.load(sin + place + half).to(tl.float32),
    )
    first = (low * cos_low).to(dtype).to(tl.float32) - (high * sin_low).to(dtype).to(tl.float32)
    second = (high * cos_high).to(dtype).to(tl.float32) + (low * sin_high).to(dtype).to(tl.float32)
    return first.to(dtype), second.to(dtype)


@triton.jit(do_not_specialize=["num_blocks"])
def _qkv(
    qkv, q_weight, k_weight, cos, sin, slots, count, cache, out, eps, num_blocks,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row and one kv head with the query heads that share it."""
    row, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = DIM // 2
    dtype = qkv.dtype.element_ty
    at = tl.arange(0, half)
    head = tl.arange(0, GROUPS)
    mine = (head < GROUP)[:, None]
    spot = ((kv * GROUP + head) * DIM)[:, None] + at[None, :]
    target = out + row * (KV_HEADS * GROUP * DIM) + spot
    if row >= tl.load(count):
        nothing = tl.zeros((GROUPS, half), dtype)
        tl.store(target, nothing, mask=mine)
        tl.store(target + half, nothing, mask=mine)
        return
    source = qkv + row * (KV_HEADS * (GROUP + 2) * DIM)
    low = tl.load(source + spot, mask=mine, other=0.0).to(tl.float32)
    high = tl.load(source + spot + half, mask=mine, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
    low = (
        ((low * scale).to(dtype).to(tl.float32) * tl.load(q_weight + at).to(tl.float32))
        .to(dtype)
        .to(tl.float32)
    )
    high = (high * scale).to(dtype).to(tl.float32) * tl.load(q_weight + half + at).to(tl.float32)
    high = high.to(dtype).to(tl.float32)
    low_out, high_out = _turn(low, high, cos, sin, row * DIM + at, half, dtype)
    tl.store(target, low_out, mask=mine)
    tl.store(target + half, high_out, mask=mine)

    key = source + (KV_HEADS * GROUP + kv) * DIM + at
    low = tl.load(key).to(tl.float32)
    high = tl.load(key + half).to(tl.float32)
    scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / DIM + eps)
    low = (
        ((low * scale).to(dtype).to(tl.float32) * tl.load(k_weight + at).to(tl.float32))
        .to(dtype)
        .to(tl.float32)
    )
    high = (high * scale).to(dtype).to(tl.float32) * tl.load(k_weight + half + at).to(tl.float32)
    high = high.to(dtype).to(tl.float32)
    low_out, high_out = _turn(low, high, cos, sin, row * DIM + at, half, dtype)
    slot = tl.load(slots + row)
    block_stride: tl.constexpr = KV_HEADS * BLOCK * DIM
    kv_stride = tl.cast(num_blocks, tl.int64) * block_stride
    kept = cache + (slot // BLOCK) * block_stride + kv * (BLOCK * DIM) + (slot % BLOCK) * DIM + at
    tl.store(kept, low_out)
    tl.store(kept + half, high_out)
    value = source + (KV_HEADS * (GROUP + 1) + kv) * DIM + at
    tl.store(kept + kv_stride, tl.load(value))
    tl.store(kept + kv_stride + half, tl.load(value + half))


def qkv_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """Norm and turn q and k of the fused projection [rows, (heads + 2 kv heads) * dim], write k and
    v to one layer's cache [2, blocks, kv heads, block size, dim] at `slots`; returns q [rows,
    heads, dim]."""
    rows, dim = cos.shape
    _, _, kv_heads, block, _ = cache.shape
    group = qkv.shape[1] // dim // kv_heads - 2
    out = qkv.new_empty(rows, kv_heads * group, dim)
    _qkv[(rows, kv_heads)](
        qkv, q_weight, k_weight, cos, sin, slots, count, cache, out, eps, cache.shape[1],
        GROUP=group, GROUPS=triton.next_power_of_2(group), KV_HEADS=kv_heads, DIM=dim, BLOCK=block,
        num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _swiglu(gate_up, x, gate_weight, count, out, gate, SIZE: tl.constexpr, WIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
            HIDDENS: tl.constexpr, GATE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    inside = at < SIZE
    real = row < tl.load(count)
    dtype = gate_up.dtype.element_ty
    a = tl.load(gate_up + row * 2 * SIZE + at, mask=inside & real, other=0.0).to(tl.float32)
    b = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=inside & real, other=0.0).to(tl.float32)
    a = (a / (1.0 + tl.exp(-a))).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + at, (a * b).to(dtype), mask=inside)
    if GATE:
        wide = tl.arange(0, HIDDENS)
        known = (wide < HIDDEN) & real
        values = tl.load(x + row * HIDDEN + wide, mask=known, other=0.0).to(tl.float32)
        weight = tl.load(gate_weight + wide, mask=known, other=0.0).to(tl.float32)
        logit = tl.sum(values * weight, 0).to(dtype).to(tl.float32)
        tl.store(gate + row, (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32))


def swiglu(
    gate_up: torch.Tensor,
    count: torch.Tensor,
    x: torch.Tensor | None = None,
    gate_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """silu(gate) * up of [rows, 2 * size]; with x [rows, hidden] and a gate's weight also sigmoid(x
    . weight), float32 [rows], which a shared expert is scaled by."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    gate = None if x is None else torch.empty(rows, dtype=torch.float32, device=gate_up.device)
    hidden = size if x is None else x.shape[1]
    wide = triton.next_power_of_2(max(size, hidden))
    _swiglu[(rows,)](
        gate_up, gate_up if x is None else x, gate_up if gate_weight is None else gate_weight,
        count, out,
        out if gate is None else gate, SIZE=size, WIDE=triton.next_power_of_2(size), HIDDEN=hidden,
        HIDDENS=triton.next_power_of_2(hidden), GATE=gate is not None, num_warps=row_warps(wide),
    )  # fmt: skip
    return out, gate


@triton.jit
def _combine(
    x, y, weights, places, shared, gate, norm_weight, count, total, normed, eps,
    SIZE: tl.constexpr, WIDE: tl.constexpr, TOP_K: tl.constexpr, SORTED: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    inside = at < SIZE
    dtype = x.dtype.element_ty
    place = row * SIZE + at
    if row >= tl.load(count):
        nothing = tl.zeros((WIDE,), dtype)
        tl.store(total + place, nothing, mask=inside)
        tl.store(normed + place, nothing, mask=inside)
        return
    mixed = tl.zeros((WIDE,), tl.float32)
    for k in tl.static_range(TOP_K):
        source = row * TOP_K + k
        weight = tl.load(weights + source)
        if SORTED:
            source = tl.load(places + source).to(tl.int64)
        mixed += weight * tl.load(y + source * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    mixed = mixed.to(dtype).to(tl.float32)
    if SHARED:
        part = tl.load(gate + row) * tl.load(shared + place, mask=inside, other=0.0).to(tl.float32)
        mixed = (mixed + part.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    stream = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + mixed
    stream = stream.to(dtype).to(tl.float32)
    tl.store(total + place, stream.to(dtype), mask=inside)
    scale = tl.load(norm_weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, norm_row(stream, scale, SIZE, eps, dtype), mask=inside)


def combine(
    x: torch.Tensor,
    y: torch.Tensor,
    weights: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    count: torch.Tensor,
    places: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual x plus the experts' rows y, weighted and summed in float32, plus the gated shared
    expert: the new stream, and its norm for the next layer.

    y [rows * top_k, size] is in the order of `weights` [rows, top_k] (float32), or sorted by expert
    if `places` says where each row went."""
    rows, size = x.shape
    total, normed = torch.empty_like(x), torch.empty_like(x)
    wide = triton.next_power_of_2(size)
    _combine[(rows,)](
        x, y, weights, weights if places is None else places, x if shared is None else shared,
        weights if gate is None else gate, norm_weight, count, total, normed, eps,
        SIZE=size, WIDE=wide, TOP_K=weights.shape[1], SORTED=places is not None,
        SHARED=shared is not None,
        num_warps=row_warps(wide),
    )  # fmt: skip
    return total, normed
