"""Linear maps of a few rows: what a decode step is made of, and what bounds it is reading the
weights once.

`project` computes `act(norm(x) @ w.T) + residual` for up to 128 rows, in one kernel. The norm is
fused by scaling afterwards: `norm(x) @ w.T = rsqrt(mean(x²) + eps) * ((x * g) @ w.T)`, so one pass
over x gives both. One row runs as a matrix-vector product that asks for its whole share of the
weights at once; more rows go through the matrix units.

Kernels here are launched with programmatic dependent launch: each may start while the one before it
still runs, asks for weights (which nobody writes), and only then waits. Reference: `rms_norm`,
`F.linear`, `swiglu`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.reference.quantized import FLOAT8
from stretto.kernels.triton.device import fitting, protocol
from stretto.kernels.triton.tuning import config
from stretto.kernels.triton.untuned import matrix_defaults, split_defaults, vector_defaults

# In Triton's interpreter products are made in float32.
DEVICE = tl.constexpr(not triton.knobs.runtime.interpret)
# Four bytes of float8 (e4m3) as bfloat16, exactly: each is stretched to 16 bits with its sign and
# shifted by four, so that exponent and fraction lie where bfloat16 has them (a number 2^120 times
# too small), then times 2^120. By `fma`, since before Hopper there is no product of such pairs.
WIDEN = tl.constexpr("""
{
.reg .b32 a, b, c, none;
prmt.b32 a, $2, 0, 0x9180;
prmt.b32 b, $2, 0, 0xb3a2;
shl.b32 a, a, 4;
shl.b32 b, b, 4;
and.b32 a, a, 0x87f087f0;
and.b32 b, b, 0x87f087f0;
mov.b32 c, 0x7b807b80;
mov.b32 none, 0x80008000;
fma.rn.bf16x2 $0, a, c, none;
fma.rn.bf16x2 $1, b, c, none;
}
""")


def tile_rows(rows: int) -> int:
    """Rows of a tile for the matrix units: a power of two, 16 at least."""
    return max(16, 1 << (rows - 1).bit_length())


def precision(x: torch.Tensor) -> str:
    """Of products of rows like x, as `tl.dot` calls it: exact in float32, and nothing to say of
    other types."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def dot(a, b, acc):
    """acc + a @ b. The interpreter has no bfloat16 product: widen there."""
    if DEVICE:
        return tl.dot(a, b, acc, input_precision="ieee")
    return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")


def raw(w: torch.Tensor) -> torch.Tensor:
    """Weights as kernels take them: float8 as bytes, since cards before Ada have no such type."""
    return w.view(torch.uint8) if w.dtype == FLOAT8 else w


@triton.jit
def widen(w, like):
    """Weights (`raw`) in the type of `like`, exactly. Float8 by hand: the hardware's own
    conversions go by float32 and are slower than the memory."""
    if w.dtype != tl.uint8:
        return w.to(like.dtype)
    elif DEVICE:
        wide = tl.inline_asm_elementwise(
            WIDEN, "=&r,=&r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4
        )
        return wide.to(like.dtype)
    else:
        return w.to(tl.float8e4nv, bitcast=True).to(like.dtype)


@triton.jit
def fetch(at):
    """Ask for the cache lines at these addresses; nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _vector(
    x, gain, w, residual, out, eps, N,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, ADD: tl.constexpr, GLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row. Each program: BN outputs over all of K. With GLU, w holds N gate rows and then N up
    rows."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    inside = (n < N)[:, None]
    at = w + n.to(tl.int64)[:, None] * K + k[None, :]
    w0 = tl.load(at, mask=inside, other=0.0)
    w1, w2, w3, u0 = w0, w0, w0, w0
    if K // BK > 1:
        w1 = tl.load(at + BK, mask=inside, other=0.0)
    if K // BK > 2:
        w2 = tl.load(at + 2 * BK, mask=inside, other=0.0)
    if K // BK > 3:
        w3 = tl.load(at + 3 * BK, mask=inside, other=0.0)
    if GLU:
        u0 = tl.load(at + N * K, mask=inside, other=0.0)
    g0 = tl.zeros([BK], tl.float32)
    g1 = g0
    if NORM:  # seldom in any cache: ask before the wait
        g0 = tl.load(gain + k).to(tl.float32)
        if K // BK > 1:
            g1 = tl.load(gain + BK + k).to(tl.float32)
    if PDL:
        gdc_wait()
    before = tl.zeros([BN], tl.float32)
    if ADD:
        before = tl.load(residual + n, mask=n < N, other=0.0).to(tl.float32)
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    for i in tl.static_range(K // BK):
        xi = tl.load(x + i * BK + k).to(tl.float32)
        if NORM:
            squares += xi * xi
            if i == 0:
                xi = xi * g0
            elif i == 1:
                xi = xi * g1
            else:
                xi = xi * tl.load(gain + i * BK + k).to(tl.float32)
        if i == 0:
            wi = w0
        elif i == 1:
            wi = w1
        elif i == 2:
            wi = w2
        elif i == 3:
            wi = w3
        else:
            wi = tl.load(at + i * BK, mask=inside, other=0.0)
        acc += wi.to(tl.float32) * xi[None, :]
        if GLU:
            ui = u0
            if i > 0:
                ui = tl.load(at + N * K + i * BK, mask=inside, other=0.0)
            up += ui.to(tl.float32) * xi[None, :]
    total = tl.sum(acc, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        total *= scale
        if GLU:
            total = total * tl.sigmoid(total) * (tl.sum(up, 1) * scale)
    elif GLU:
        total = total * tl.sigmoid(total) * tl.sum(up, 1)
    if ADD:
        total += before
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M", "P"])
def _matrix(
    x, gain, squares, w, residual, out, next_gain, gained, next_squares, eps, M, N, P, stride,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, S: tl.constexpr,
    BP: tl.constexpr,
    NORM: tl.constexpr, GIVEN: tl.constexpr, ADD: tl.constexpr, GLU: tl.constexpr,
    EMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Up to BM rows, `stride` apart. Each program: BN outputs of every row over all of K, in pieces
    of S * BK, each as S products side by side (one per warp: a single chain would be bound by their
    latency). The weights of the first piece are on their way before the wait, those of the next
    while one is worked on.

    NORM: rows are normalised here. GIVEN: they come as `Gained`, with P partial sums of squares
    each. EMIT: the outputs leave as `Gained` too, for the norm that follows."""
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, S)[:, None, None] * BK + tl.arange(0, BK)[None, None, :]
    inside, rows = (n < N)[None, :, None], (m < M)[None, :, None]
    at = w + n.to(tl.int64)[None, :, None] * K + k
    wi = tl.load(at, mask=inside, other=0.0)
    ui = wi
    if GLU:
        ui = tl.load(at + N * K, mask=inside, other=0.0)
    g = tl.zeros([BN], tl.float32)
    if EMIT:
        g = tl.load(next_gain + n, mask=n < N, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    where = m[:, None] * N + n[None, :]
    keep = (m < M)[:, None] & (n < N)[None, :]
    before = tl.zeros([BM, BN], tl.float32)
    if ADD:
        before = tl.load(residual + where, mask=keep, other=0.0).to(tl.float32)
    from_x = x + m[None, :, None] * stride + k
    acc = tl.zeros([S, BM, BN], tl.float32)
    up = tl.zeros([S, BM, BN], tl.float32)
    total_squares = tl.zeros([BM], tl.float32)
    if GIVEN:
        p = tl.arange(0, BP)
        there = (p < P)[:, None] & (m < M)[None, :]
        total_squares = tl.sum(
            tl.load(squares + p[:, None] * M + m[None, :], mask=there, other=0.0), 0
        )
    for i in tl.static_range(0, K, S * BK):
        xi = tl.load(from_x + i, mask=rows, other=0.0)
        w_next, u_next = wi, ui
        if i + S * BK < K:
            w_next = tl.load(at + i + S * BK, mask=inside, other=0.0)
            if GLU:
                u_next = tl.load(at + N * K + i + S * BK, mask=inside, other=0.0)
        if NORM:
            wide = xi.to(tl.float32)
            total_squares += tl.sum(tl.sum(wide * wide, 2), 0)
            xi = (wide * tl.load(gain + i + k).to(tl.float32)).to(xi.dtype)
        acc = dot(xi, tl.permute(wi, (0, 2, 1)), acc)
        if GLU:
            up = dot(xi, tl.permute(ui, (0, 2, 1)), up)
        wi, ui = w_next, u_next
    total = tl.sum(acc, 0)
    other = total
    if GLU:
        other = tl.sum(up, 0)
    if NORM or GIVEN:
        scale = tl.rsqrt(total_squares / K + eps)[:, None]
        total *= scale
        other *= scale
    if GLU:
        total = total * tl.sigmoid(total) * other
    if ADD:
        total += before
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + where, rounded, mask=keep)
    if EMIT:
        value = tl.where(keep, rounded.to(tl.float32), 0.0)
        tl.store(gained + where, (value * g[None, :]).to(gained.dtype.element_ty), mask=keep)
        tl.store(next_squares + tl.program_id(0) * M + m, tl.sum(value * value, 1), mask=m < M)


@triton.jit(do_not_specialize=["M", "P"])
def _split(
    x, squares, w, residual, out, next_gain, gained, next_squares, parts, counters, eps, M, N, P,
    stride,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    BP: tl.constexpr, GIVEN: tl.constexpr, ADD: tl.constexpr, GLU: tl.constexpr, EMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `_matrix` (without its norm), cut differently: a program takes BN outputs over one of
    SPLITS parts of K, with the weights as left operand. So the rows are read N / BN times instead
    of N / 16 times, which is what many rows wait for. Weights are asked for before the wait, LINES
    cache lines per output (0: not, where the kernel in front needs all of the memory's rate). The
    last program of a tile to finish adds the parts up, in their order."""
    if PDL:
        gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    inside = (n < N)[:, None]
    share: tl.constexpr = K // SPLITS
    at = w + n.to(tl.int64)[:, None] * K + split * share
    if PDL and LINES:
        line = at + tl.minimum(tl.arange(0, LINES) * 64, share - 1)[None, :]
        line = tl.where(inside, line, w)
        fetch(line)
        if GLU:
            fetch(line + tl.where(inside, N * K, 0))
    g = tl.zeros([BN], tl.float32)
    if EMIT:
        g = tl.load(next_gain + n, mask=n < N, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    total = tl.zeros([BN, BM], tl.float32)
    other = tl.zeros([BN, BM], tl.float32)
    from_w = at + k[None, :]
    from_x = x + m[:, None] * stride + split * share + k[None, :]
    for i in range(0, share, BK):
        xi = tl.load(from_x + i, mask=(m < M)[:, None], other=0.0).T
        total = dot(tl.load(from_w + i, mask=inside, other=0.0), xi, total)
        if GLU:
            other = dot(tl.load(from_w + N * K + i, mask=inside, other=0.0), xi, other)
    place = tl.arange(0, BN)[:, None] * BM + m[None, :]
    size: tl.constexpr = BN * BM * (2 if GLU else 1)
    mine = parts + tile * (SPLITS * size)
    tl.store(mine + split * size + place, total)
    if GLU:
        tl.store(mine + split * size + BN * BM + place, other)
    tl.debug_barrier()
    if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(counters + tile, 0)
        where = m[:, None] * N + n[None, :]
        keep = (m < M)[:, None] & (n < N)[None, :]
        total = tl.zeros([BN, BM], tl.float32)
        other = tl.zeros([BN, BM], tl.float32)
        for part in tl.static_range(SPLITS):
            total += tl.load(mine + part * size + place, cache_modifier=".cg")
            if GLU:
                other += tl.load(mine + part * size + BN * BM + place, cache_modifier=".cg")
        if GIVEN:
            p = tl.arange(0, BP)
            there = (p < P)[:, None] & (m < M)[None, :]
            total_squares = tl.sum(
                tl.load(squares + p[:, None] * M + m[None, :], mask=there, other=0.0), 0
            )
            scale = tl.rsqrt(total_squares / K + eps)[None, :]
            total *= scale
            other *= scale
        if GLU:
            total = total * tl.sigmoid(total) * other
        result = total.T
        if ADD:
            result += tl.load(residual + where, mask=keep, other=0.0).to(tl.float32)
        rounded = result.to(out.dtype.element_ty)
        tl.store(out + where, rounded, mask=keep)
        if EMIT:
            value = tl.where(keep, rounded.to(tl.float32), 0.0)
            tl.store(gained + where, (value * g[None, :]).to(gained.dtype.element_ty), mask=keep)
            tl.store(next_squares + tile * M + m, tl.sum(value * value, 1), mask=m < M)


@triton.jit(do_not_specialize=["M"])
def _wide(
    x, w, out, M, N, stride,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to BM rows into very many outputs (a vocabulary): enough programs that one pipelined loop
    each will do."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    at = w + n.to(tl.int64)[:, None] * K + k[None, :]
    from_x = x + m[:, None] * stride + k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for i in range(0, K, BK):
        xi = tl.load(from_x + i, mask=(m < M)[:, None], other=0.0)
        acc = dot(xi, tl.load(at + i, mask=(n < N)[:, None], other=0.0).T, acc)
    keep = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=keep)


@triton.jit
def norm_row(wide, gain, K: tl.constexpr, eps, dtype: tl.constexpr):
    """RMS norm of one row of K float32 numbers (zeros behind them), rounded where the reference
    does: normalised, cast, scaled, cast."""
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)
    return (wide.to(dtype).to(tl.float32) * gain).to(dtype)


@triton.jit
def _norm(x, gain, out, eps, x_stride, out_stride, K: tl.constexpr, PDL: tl.constexpr):
    m = tl.program_id(0)
    k = tl.arange(0, K)
    g = tl.load(gain + k).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    xs = tl.load(x + m * x_stride + k).to(tl.float32)
    tl.store(out + m * out_stride + k, norm_row(xs, g, K, eps, out.dtype.element_ty))


def normalise(
    x: torch.Tensor, gain: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """RMS norm of a few rows x [rows, K], K a power of two; rows may lie apart."""
    out = x.new_empty(x.shape) if out is None else out
    _norm[(x.shape[0],)](
        x, gain, out, eps, x.stride(0), out.stride(0), K=x.shape[1], num_warps=8, **protocol(x)
    )
    return out


MANY = 16384
"""Outputs from which `_wide` takes over."""
COUNTERS = 512
"""Tiles of outputs that may be added up from parts, at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Gained:
    """Rows on their way into an RMS norm: already times its gain, with partial sums of their
    squares. So whoever reads them has one number per row left to apply, after the product."""

    x: torch.Tensor  # [rows, hidden]
    squares: torch.Tensor  # [parts, rows] float32
    eps: float

    @classmethod
    def empty(cls, like: torch.Tensor, parts: int, eps: float) -> Gained:
        return cls(
            torch.empty_like(like), like.new_empty(parts, like.shape[0], dtype=torch.float32), eps
        )


def project(
    x: torch.Tensor | Gained,
    w: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    add: torch.Tensor | None = None,
    glu: bool = False,
    out: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    tuned: dict[str, int] | None = None,
) -> torch.Tensor:
    """x [rows, K] (rows may lie apart) -> [rows, N]: `act(norm(x) @ w.T) + add`. `norm`: weight and
    epsilon of an RMS norm; `Gained` rows bring theirs. `glu`: w holds gate and up rows [2N, K], the
    result is silu(gate) * up. `out` may be `add` itself. `counters` [COUNTERS] int32, 0 between
    calls and nobody else's: may be used to add up parts."""
    if isinstance(x, Gained):
        return _few(x.x, w, x, None, add, glu, out, None, counters, tuned)[0]
    rows, inputs = x.shape
    outputs = w.shape[0] // 2 if glu else w.shape[0]
    if rows == 1:
        out = x.new_empty(rows, outputs) if out is None else out
        gain, eps = norm if norm is not None else (x, 0.0)
        c = (
            config("vector", (w.shape[0], inputs), vector_defaults(inputs, glu))
            if tuned is None
            else tuned
        )
        _vector[(triton.cdiv(outputs, c["BN"]),)](
            x, gain, w, x if add is None else add, out, eps, outputs,
            K=inputs, BN=c["BN"], BK=c["BK"], NORM=norm is not None, ADD=add is not None, GLU=glu,
            num_warps=c["warps"], **protocol(x),
        )  # fmt: skip
        return out
    if outputs >= MANY and norm is None and add is None and not glu:
        out = x.new_empty(rows, outputs) if out is None else out
        tile = tile_rows(rows)
        default = {"BN": 64, "BK": 128 if tile <= 32 else 64, "warps": 4, "stages": 4}
        c = config("wide", (tile, outputs, inputs), default) if tuned is None else tuned
        _wide[(triton.cdiv(outputs, c["BN"]),)](
            x, w, out, rows, outputs, x.stride(0), K=inputs, BM=tile, BN=c["BN"], BK=c["BK"],
            num_warps=c["warps"], num_stages=fitting(c["stages"], x, tile, w, c["BN"], c["BK"]),
            **protocol(x),
        )  # fmt: skip
        return out
    return _few(x, w, None, norm, add, glu, out, None, counters, tuned)[0]


def project_onto(
    x: torch.Tensor,
    y: torch.Tensor,
    w: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    out: torch.Tensor | None,
    counters: torch.Tensor | None = None,
    tuned: dict[str, int] | None = None,
) -> tuple[torch.Tensor, Gained]:
    """x + y @ w.T for several rows (into `out`, which may be x), and the same as `Gained` for the
    norm that follows."""
    total, gained = _few(y, w, None, None, x, False, out, norm, counters, tuned)
    assert gained is not None
    return total, gained


def _few(
    x: torch.Tensor,
    w: torch.Tensor,
    given: Gained | None,
    norm: tuple[torch.Tensor, float] | None,
    add: torch.Tensor | None,
    glu: bool,
    out: torch.Tensor | None,
    emit: tuple[torch.Tensor, float] | None,
    counters: torch.Tensor | None,
    tuned: dict[str, int] | None,
) -> tuple[torch.Tensor, Gained | None]:
    """Two rows or more: through `_split` where that is known to be better and possible, else
    through `_matrix`."""
    rows, inputs = x.shape
    outputs = w.shape[0] // 2 if glu else w.shape[0]
    out = x.new_empty(rows, outputs) if out is None else out
    tile = tile_rows(rows)
    c = (
        config("split", (tile, w.shape[0], inputs), split_defaults(tile, w.shape[0], x))
        if tuned is None
        else tuned
    )
    split = c.get("SPLITS", 0) > 0 and counters is not None
    if split and norm is not None:
        x, norm = normalise(x, *norm), None
    if not split and tuned is None:
        c = config("matrix", (tile, w.shape[0], inputs), matrix_defaults(tile, inputs))
    programs = triton.cdiv(outputs, c["BN"])
    gained = None if emit is None else Gained.empty(out, programs, emit[1])
    summed = 1 if given is None else given.squares.shape[0]
    eps = given.eps if given is not None else norm[1] if norm is not None else 0.0
    squares = x if given is None else given.squares
    residual = x if add is None else add
    following = (x, x, x) if emit is None or gained is None else (emit[0], gained.x, gained.squares)
    options = {
        "K": inputs, "BM": tile, "BN": c["BN"], "BP": 1 << (summed - 1).bit_length(),
        "GIVEN": given is not None,
        "ADD": add is not None, "GLU": glu, "EMIT": gained is not None, "num_warps": c["warps"],
        **protocol(x),
    }  # fmt: skip
    if split:
        parts = x.new_empty(
            programs * c["SPLITS"] * c["BN"] * tile * (2 if glu else 1), dtype=torch.float32
        )
        lines = triton.next_power_of_2(triton.cdiv(inputs // c["SPLITS"], 64))
        _split[(programs, c["SPLITS"])](
            x, squares, w, residual, out, *following, parts, counters, eps, rows, outputs, summed,
            x.stride(0),
            BK=c["BK"], SPLITS=c["SPLITS"], LINES=lines if c.get("fetch", 1) else 0,
            num_stages=fitting(c["stages"], x, tile, w, c["BN"] * (2 if glu else 1), c["BK"]),
            **options,
        )  # fmt: skip
    else:
        _matrix[(programs,)](
            x, x if norm is None else norm[0], squares, w, residual, out, *following, eps, rows,
            outputs, summed,
            x.stride(0), BK=c["BK"], S=c["S"], NORM=norm is not None, **options,
        )  # fmt: skip
    return out, gained
