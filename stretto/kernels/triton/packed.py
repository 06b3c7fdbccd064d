"""Products with packed weights (`stretto.kernels.reference.packed`) for up to 128 rows: numbers are
read as they are stored and widened in registers, on their way to the matrix units.

Four bits: the even and the odd inputs of a word are two tiles, so rows are split the same way. A
nibble u under the bits of 128.0 is the bfloat16 number 128 + u; less 136 (and the zero point) it is
exact, and one product in bfloat16 by the scale rounds as the reference does. Float8 is exact in
bfloat16; the scale of a block or row comes after the block's sum, in float32.

Launch protocol as in `linear`; experts ask for nothing before the wait, as they do not know yet who
is chosen. Called by `layers.fused`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.reference.packed import PackedWeight, Weight
from stretto.kernels.triton import device, linear
from stretto.kernels.triton.device import protocol
from stretto.kernels.triton.linear import DEVICE, Gained, dot, fetch, tile_rows, widen
from stretto.kernels.triton.tuning import config

Launch = dict[str, int]
KINDS = {"int4": 0, "int8": 1, "float8": 2}
INT4, FLOAT8 = tl.constexpr(KINDS["int4"]), tl.constexpr(KINDS["float8"])


# Low ($0, $1) and high ($2, $3) four bits of four bytes ($4) as (number - less) * scale in
# bfloat16; $5, $6: -less, $7, $8: scale. Bytes are spread over two registers of two numbers each.
NIBBLES = tl.constexpr("""
{
.reg .b32 a, b, c, d, one, none;
mov.b32 one, 0x3f803f80;
mov.b32 none, 0x80008000;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 a, a, one, $5;
fma.rn.bf16x2 b, b, one, $6;
fma.rn.bf16x2 c, c, one, $5;
fma.rn.bf16x2 d, d, one, $6;
fma.rn.bf16x2 $0, a, $7, none;
fma.rn.bf16x2 $1, b, $8, none;
fma.rn.bf16x2 $2, c, $7, none;
fma.rn.bf16x2 $3, d, $8, none;
}
""")


@triton.jit
def _nibbles(codes, less, scale):
    """Of bytes, the even and the odd inputs' numbers; all of one shape."""
    return tl.inline_asm_elementwise(
        NIBBLES, "=&r,=&r,=&r,=&r,r,r,r,r,r", [codes, less, scale],
        dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _four_bits(codes, scale, less, x):
    """The numbers of even and of odd inputs in x's type; `scale` and `less` of the same shape."""
    if DEVICE:
        if x.dtype == tl.bfloat16:
            if scale.dtype == tl.bfloat16:
                return _nibbles(codes, (less * -1.0).to(tl.bfloat16), scale)
            one = (less * 0.0 + 1.0).to(tl.bfloat16)
            even, odd = _nibbles(codes, (less * -1.0).to(tl.bfloat16), one)
            wide = scale.to(tl.float32)
            return (even.to(tl.float32) * wide).to(x.dtype), (odd.to(tl.float32) * wide).to(x.dtype)
    wide = scale.to(tl.float32)
    even = (codes & 15).to(tl.float32) + 128.0 - less
    odd = (codes >> 4).to(tl.float32) + 128.0 - less
    return (even * wide).to(x.dtype), (odd * wide).to(x.dtype)


@triton.jit
def times(w, x, acc, SWAP: tl.constexpr):
    """acc + x @ w.T, or its transpose; w [BN, BK] in x's type."""
    if SWAP:
        return dot(w, x.T, acc)
    else:
        return dot(x, w.T, acc)


@triton.jit
def packed_times(
    x, codes, scale, zero, n, start, acc,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """acc + x @ w[n, start : start + BK].T (or its transpose) for a tile x [BM, BK] and rows n [BN]
    of the packed matrix [.., K] that begins at these addresses. GROUP inputs and ROWS outputs share
    a scale; BK is whole groups or a part of one, of float8 at most one. Float8 rows meet float8
    weights as they are."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    row = n.to(tl.int64)
    if KIND < FLOAT8:
        PER: tl.constexpr = 2 if KIND == INT4 else 1
        COUNT: tl.constexpr = BK // GROUP if BK > GROUP else 1
        BYTES: tl.constexpr = BK // COUNT // PER
        g, b = tl.arange(0, COUNT), tl.arange(0, BYTES)
        at = codes + row[:, None, None] * (K // PER) + start // PER
        raw = tl.load(at + g[None, :, None] * BYTES + b[None, None, :])
        of_group = row[:, None] * GROUPS + start // GROUP + g[None, :]
        s = tl.load(scale + of_group)[:, :, None].broadcast_to(BN, COUNT, BYTES)
        half: tl.constexpr = 136.0 if KIND == INT4 else 128.0
        less = tl.full([BN, COUNT], half, tl.float32)
        if ZERO:
            less += tl.load(zero + of_group).to(tl.float32)
        less = less[:, :, None].broadcast_to(BN, COUNT, BYTES)
        if KIND == INT4:
            even, odd = _four_bits(raw, s, less, x)
            x_even, x_odd = tl.split(tl.reshape(x, [BM, BK // 2, 2]))
            acc = times(tl.reshape(even, [BN, BK // 2]), x_even, acc, SWAP)
            return times(tl.reshape(odd, [BN, BK // 2]), x_odd, acc, SWAP)
        else:
            w = ((raw.to(tl.float32) - less) * s.to(tl.float32)).to(x.dtype)
            return times(tl.reshape(w, [BN, BK]), x, acc, SWAP)
    else:
        w = tl.load(codes + row[:, None] * K + start + tl.arange(0, BK)[None, :])
        none = tl.zeros([BN if SWAP else BM, BM if SWAP else BN], tl.float32)
        if x.dtype == tl.float8e4nv:
            part = times(w.to(tl.float8e4nv, bitcast=True), x, none, SWAP)
        else:
            part = times(widen(w, x), x, none, SWAP)
        s = tl.load(scale + row // ROWS * GROUPS + start // GROUP).to(tl.float32)
        return acc + part * (s[:, None] if SWAP else s[None, :])


@triton.jit
def matrix_at(
    codes, scale, zero, e, outputs, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Where the e-th of several matrices of so many outputs begins."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    PER: tl.constexpr = 2 if KIND == INT4 else 1
    e = e.to(tl.int64)
    scales = e * (outputs // ROWS * GROUPS)
    return codes + e * outputs * (K // PER), scale + scales, zero + scales


@triton.jit(do_not_specialize=["M", "P"])
def _project(
    x, gain, squares, codes, scale, zero, residual, out, next_gain, gained, next_squares, eps, M, N,
    P, stride,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr,
    NORM: tl.constexpr, GIVEN: tl.constexpr, ADD: tl.constexpr, EMIT: tl.constexpr,
    SWAP: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to BM rows, `stride` apart; each program: BN outputs, whose numbers it asks for before the
    wait, LINES cache lines of each. The rest as in `linear._matrix`."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if PDL:
        if LINES:
            WIDE: tl.constexpr = K // 2 if KIND == INT4 else K
            line = tl.minimum(tl.arange(0, LINES) * 128, WIDE - 1)
            fetch(codes + n.to(tl.int64)[:, None] * WIDE + line[None, :])
        gdc_wait()
        gdc_launch_dependents()
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    total_squares = tl.zeros([BM], tl.float32)
    if GIVEN:
        p = tl.arange(0, BP)
        there = (p < P)[:, None] & (m < M)[None, :]
        total_squares = tl.sum(
            tl.load(squares + p[:, None] * M + m[None, :], mask=there, other=0.0), 0
        )
    acc = tl.zeros([BN if SWAP else BM, BM if SWAP else BN], tl.float32)
    from_x = x + m[:, None] * stride + k[None, :]
    for i in range(0, K, BK):
        xi = tl.load(from_x + i, mask=(m < M)[:, None], other=0.0)
        if NORM:
            wide = xi.to(tl.float32)
            total_squares += tl.sum(wide * wide, 1)
            xi = (wide * tl.load(gain + i + k).to(tl.float32)[None, :]).to(xi.dtype)
        acc = packed_times(
            xi, codes, scale, zero, n, i, acc, K, BM, BN, BK, KIND, GROUP, ROWS, ZERO, SWAP
        )
    total = acc.T if SWAP else acc
    if NORM or GIVEN:
        total *= tl.rsqrt(total_squares / K + eps)[:, None]
    where = m[:, None] * N + n[None, :]
    keep = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        total += tl.load(residual + where, mask=keep, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + where, rounded, mask=keep)
    if EMIT:
        value = tl.where(keep, rounded.to(tl.float32), 0.0)
        g = tl.load(next_gain + n).to(tl.float32)
        tl.store(gained + where, (value * g[None, :]).to(gained.dtype.element_ty), mask=keep)
        tl.store(next_squares + tl.program_id(0) * M + m, tl.sum(value * value, 1), mask=m < M)


def even(w: PackedWeight) -> bool:
    """Sizes that the kernels' tiles divide. The released models have them."""
    outputs, inputs = w.shape[-2:]
    return fits_sizes(w.format.kind, w.format.group, outputs, inputs)


def fits_sizes(kind: str, group: int, outputs: int, inputs: int) -> bool:
    if outputs % 16 or inputs % 32:
        return False
    if kind == "float8":
        return group == 0 or (group >= 32 and group & (group - 1) == 0)
    return group >= 16 and group & (group - 1) == 0 and inputs % group == 0


def chunk_of(w: PackedWeight, most: int) -> int:
    """Inputs of a tile: a power of two that divides them, in whole groups or within one."""
    group, inputs = w.format.group, w.shape[-1]
    chunk = min(inputs & -inputs, most)
    return chunk if w.format.kind != "float8" else min(chunk, group or most)


def operands(w: PackedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, scales and zero points as kernels take them."""
    return w.codes.view(torch.uint8), w.scale, w.scale if w.zero is None else w.zero


def stages_for(
    wanted: int, x: torch.Tensor, rows: int, w: PackedWeight, columns: int, k: int
) -> int:
    """As many of these stages of a loop over K as fit the device's shared memory, where a tile of
    rows and one of widened weights lie beside what is on its way."""
    narrow = columns * k * w.format.bits // 8
    held = rows * k * x.element_size()
    return device.stages_within(wanted, x, held + narrow, held + columns * k * x.element_size())


def tuned(kernel: str, w: PackedWeight, key: Sequence[int], default: dict[str, int]) -> Launch:
    """Launch parameters of a kernel with such weights, whose tiles depend on the groups too."""
    return config(f"packed_{kernel}_{w.format.kind}_g{w.format.group}", key, default)


def form(w: PackedWeight) -> dict[str, int | bool]:
    return {
        "KIND": KINDS[w.format.kind],
        "GROUP": w.format.group or w.shape[-1],
        "ROWS": w.format.block_rows,
        "ZERO": w.zero is not None,
    }


def project(
    x: torch.Tensor | Gained,
    w: Weight,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    add: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `linear.project`, whatever w is stored in."""
    if isinstance(w, torch.Tensor):
        return linear.project(x, w, norm=norm, add=add, out=out, counters=counters)
    if isinstance(x, Gained):
        return _run(x.x, w, x, None, add, out, None)[0]
    return _run(x, w, None, norm, add, out, None)[0]


def project_onto(
    x: torch.Tensor,
    y: torch.Tensor,
    w: Weight,
    norm: tuple[torch.Tensor, float],
    out: torch.Tensor | None,
    counters: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Gained]:
    """As `linear.project_onto`, whatever w is stored in."""
    if isinstance(w, torch.Tensor):
        return linear.project_onto(x, y, w, norm, out, counters)
    total, gained = _run(y, w, None, None, x, out, norm)
    assert gained is not None
    return total, gained


def _default(tile: int, w: PackedWeight) -> dict[str, int]:
    """Many rows are read once for every BN outputs: more of those then, and less of the inputs, so
    that tiles fit."""
    outputs = w.shape[0]
    if tile <= 32:
        return {"BN": 16, "BK": chunk_of(w, 128), "warps": 4, "stages": 4, "swap": 0, "fetch": 1}
    columns = min(32, outputs & -outputs)
    return {
        "BN": columns, "BK": chunk_of(w, 64), "warps": 4, "stages": 3, "swap": 0, "fetch": 1,
    }  # fmt: skip


def _lines(w: PackedWeight) -> int:
    """Cache lines of one output's numbers, up to a power of two."""
    numbers = w.shape[-1] * w.format.bits // 8
    return int(triton.next_power_of_2(triton.cdiv(numbers, 128)))


def _run(
    x: torch.Tensor,
    w: PackedWeight,
    given: Gained | None,
    norm: tuple[torch.Tensor, float] | None,
    add: torch.Tensor | None,
    out: torch.Tensor | None,
    emit: tuple[torch.Tensor, float] | None,
) -> tuple[torch.Tensor, Gained | None]:
    rows, inputs = x.shape
    outputs, tile = w.shape[0], tile_rows(rows)
    out = x.new_empty(rows, outputs) if out is None else out
    c = tuned("project", w, (tile, outputs, inputs), _default(tile, w))
    programs = triton.cdiv(outputs, c["BN"])
    gained = None if emit is None else Gained.empty(out, programs, emit[1])
    summed = 1 if given is None else len(given.squares)
    eps = given.eps if given is not None else norm[1] if norm is not None else 0.0
    following = (x, x, x) if emit is None or gained is None else (emit[0], gained.x, gained.squares)
    _project[(programs,)](
        x, x if norm is None else norm[0], x if given is None else given.squares, *operands(w),
        x if add is None else add, out, *following, eps, rows, outputs, summed, x.stride(0),
        K=inputs, BM=tile, BN=c["BN"], BK=c["BK"], BP=1 << (summed - 1).bit_length(),
        NORM=norm is not None, GIVEN=given is not None, ADD=add is not None,
        EMIT=gained is not None, SWAP=bool(c["swap"]),
        LINES=_lines(w) if c["fetch"] else 0, num_warps=c["warps"],
        num_stages=stages_for(c["stages"], x, tile, w, c["BN"], c["BK"]),
        **form(w), **protocol(x),
    )  # fmt: skip
    return out, gained
