"""The vocoder's transformer, and what stands around it, in few kernels: a layer is eight nodes of a
graph, where plain PyTorch takes 34.

Frames come as rows [slots * frames, values]. Sums and products are float32 whatever the rows are,
and a norm rounds where `rms_norm` does. Kernels of ours are launched with programmatic dependent
launch (see `linear.py`): what a kernel reads before it waits was written by an earlier step, or
never. Reference: `Code2Wav` and its parts, which call this on the vocoder's thread and current
stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.triton.device import protocol
from stretto.kernels.triton.linear import norm_row, project, tile_rows

MOST_FRAMES, MOST_COLUMNS = 64, 256
"""Of a step and of a window that one tile holds, in float32 too. The stage has 8 and, with the
released model, 80."""
GLU_VALUES = 1024


@triton.jit(do_not_specialize=["time"], do_not_specialize_on_alignment=["codes", "frames"])
def _embed(
    codes, table, frames, inv_freq, gain, out, normed, turn, eps, time,
    CODES: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    BG: tl.constexpr, BK: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One frame per program."""
    slot, frame = tl.program_id(1), tl.program_id(0)
    row = slot * time + frame
    group, k, h = tl.arange(0, BG), tl.arange(0, BK), tl.arange(0, BH)
    g = tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)
    freq = tl.load(inv_freq + h, mask=h < HALF, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    code = tl.load(codes + (slot * GROUPS + group) * time + frame, mask=group < GROUPS, other=0)
    code = tl.minimum(tl.maximum(code, 0), CODES - 1) + group * CODES
    inside = (group < GROUPS)[:, None] & (k < K)[None, :]
    values = tl.load(table + code[:, None] * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    x = (tl.sum(values, 0) / GROUPS).to(out.dtype.element_ty)
    tl.store(out + row * K + k, x, mask=k < K)
    tl.store(normed + row * K + k, norm_row(x.to(tl.float32), g, K, eps, x.dtype), mask=k < K)
    angle = (tl.load(frames + slot) + frame).to(tl.float32) * freq
    tl.store(turn + row * 2 * HALF + h, tl.cos(angle), mask=h < HALF)
    tl.store(turn + row * 2 * HALF + HALF + h, tl.sin(angle), mask=h < HALF)


@triton.jit
def _turned(x, d, other, mine, cos, sin):
    """Rows of queries or keys at their positions, rounded."""
    near = tl.load(x + d[None, :], mask=mine, other=0.0)
    far = tl.load(x + other[None, :], mask=mine, other=0.0)
    return (near.to(tl.float32) * cos + far.to(tl.float32) * sin).to(near.dtype)


@triton.jit
def _scores(q, k, seen, scale):
    return tl.where(seen, tl.dot(q, k.T, input_precision="ieee") * scale, float("-inf"))


@triton.jit(
    do_not_specialize=["time"], do_not_specialize_on_alignment=["slots", "frames", "lengths"]
)
def _attend(
    qkv, turn, window, slots, frames, lengths, out, scale, time, stride,
    HEADS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, REACH: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one stream per program, which alone reads and writes that head's columns of the
    stream.

    New keys and values never go through the window: they are columns of their own, from registers.
    So what is read of the window was there before the step, and can be asked for before the wait. A
    column that is written here while it is read holds, until then, a frame that is out of reach for
    all of the step's (`VocoderState.max_frames`)."""
    if PDL:
        gdc_launch_dependents()
    head, at = tl.program_id(0), tl.program_id(1)
    t, c, d = tl.arange(0, BT), tl.arange(0, BC), tl.arange(0, BD)
    half: tl.constexpr = D // 2
    width: tl.constexpr = HEADS * D
    keys = window + (1 + tl.load(slots + at)) * (COLUMNS * width) + head * D
    values = keys + stride
    there = (c < COLUMNS)[:, None] & (d < D)[None, :]
    before = tl.load(frames + at).to(tl.int32)
    old_k = tl.load(keys + c[:, None] * width + d[None, :], mask=there, other=0.0)
    old_v = tl.load(values + c[:, None] * width + d[None, :], mask=there, other=0.0)
    if PDL:
        gdc_wait()
    length = tl.load(lengths + at).to(tl.int32)
    row = (at * time + t)[:, None]
    mine = (t < time)[:, None] & (d < D)[None, :]
    first = d < half
    angle = tl.where(first, d, d - half)
    other = tl.where(first, d + half, d - half)
    if half & (half - 1) == 0:  # so that these are as many neighbours in a row as they are
        angle = tl.max_contiguous(tl.multiple_of(angle, half), half)
        other = tl.max_contiguous(tl.multiple_of(other, half), half)
    cos = tl.load(turn + row * D + angle[None, :], mask=mine, other=0.0)
    sin = tl.load(turn + row * D + half + angle[None, :], mask=mine, other=0.0)
    sin = tl.where(first[None, :], -sin, sin)
    own = qkv + row.to(tl.int64) * (3 * width) + head * D
    q = _turned(own, d, other, mine, cos, sin)
    k = _turned(own + width, d, other, mine, cos, sin)
    v = tl.load(own + 2 * width + d[None, :], mask=mine, other=0.0)

    # A column holds the latest position before the step that falls on it, or a negative one:
    # nothing yet.
    held = before - 1 - (before - 1 - c + COLUMNS) % COLUMNS
    live = (c < COLUMNS) & (held >= 0) & (before - held < REACH)
    # What another stream left goes into no product. (Keys would do without; but then the compiler
    # lays them out for theirs right after the load, and all that follows, the wait and the new rows
    # too, waits for the memory.)
    old_k = tl.where(live[:, None], old_k, tl.zeros_like(old_k))
    old_v = tl.where(live[:, None], old_v, tl.zeros_like(old_v))
    seen = live[None, :] & ((before + t)[:, None] - held[None, :] < REACH)
    age = t[:, None] - t[None, :]
    seen_new = (age >= 0) & (
        age < REACH
    )  # itself at least, padding too: so there is always a largest score
    s = _scores(q, old_k, seen, scale)
    s_new = _scores(q, k, seen_new, scale)
    top = tl.maximum(tl.max(s, 1), tl.max(s_new, 1))[:, None]
    p, p_new = tl.exp(s - top), tl.exp(s_new - top)
    y = tl.dot(p.to(v.dtype), old_v, input_precision="ieee")
    y = tl.dot(p_new.to(v.dtype), v, y, input_precision="ieee")
    y = y / (tl.sum(p, 1) + tl.sum(p_new, 1))[:, None]
    tl.store(out + row * width + head * D + d[None, :], y.to(out.dtype.element_ty), mask=mine)

    place = ((before + t) % COLUMNS)[:, None] * width + d[None, :]
    kept = mine & (t < length)[:, None]
    tl.store(keys + place, k, mask=kept)
    tl.store(values + place, v, mask=kept)


@triton.jit
def _settle(
    x, y, scale, gain, out, normed, eps,
    K: tl.constexpr, BK: tl.constexpr, KEEP: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row per program."""
    k = tl.arange(0, BK)
    s = tl.load(scale + k, mask=k < K, other=0.0).to(tl.float32)
    g = s
    if NORM:
        g = tl.load(gain + k, mask=k < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0) * K + k
    total = tl.load(x + at, mask=k < K, other=0.0)
    total = (total.to(tl.float32) + s * tl.load(y + at, mask=k < K, other=0.0).to(tl.float32)).to(
        total.dtype
    )
    if KEEP:
        tl.store(out + at, total, mask=k < K)
    if NORM:
        tl.store(normed + at, norm_row(total.to(tl.float32), g, K, eps, total.dtype), mask=k < K)


@triton.jit
def _swiglu(x, out, N: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    x += tl.program_id(1) * (2 * N)
    gate = tl.load(x + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(x + N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(
        out + tl.program_id(1) * N + n,
        (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty),
        mask=n < N,
    )


@triton.jit(do_not_specialize=["time"])
def _depthwise(
    x,
    taps,
    bias,
    gain,
    shift,
    out,
    eps,
    time,
    K: tl.constexpr,
    BK: tl.constexpr,
    TAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row per program: its TAPS rows of the input, then a layer norm."""
    row, slot = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BK)
    inside = k < K
    y = tl.load(bias + k, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gain + k, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(shift + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x += (slot * (time + TAPS - 1) + row) * K
    for i in tl.static_range(TAPS):
        w = tl.load(taps + i * K + k, mask=inside, other=0.0).to(tl.float32)
        y += w * tl.load(x + i * K + k, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(inside, y - tl.sum(y, 0) / K, 0.0)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / K + eps) * g + b
    tl.store(out + (slot * time + row) * K + k, y.to(out.dtype.element_ty), mask=inside)


def fits(frames: int, columns: int) -> bool:
    """Can `attend` take so many frames of a step over a window of so many columns?"""
    return frames <= MOST_FRAMES and columns <= MOST_COLUMNS


def embed(
    codes: torch.Tensor,
    table: torch.Tensor,
    frames: torch.Tensor,
    inv_freq: torch.Tensor,
    norm: tuple[torch.Tensor, float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each frame's mean over its codebooks' entries, [slots * frames, hidden]; the same normalised;
    and how far its queries and keys are turned, [slots * frames, head_dim] float32: cosines, then
    sines.

    codes [slots, codebooks, frames] int64, out of range or not; table: all codebooks' entries, one
    after another; frames [slots] int64: how many the slot has had; norm: weight and epsilon."""
    codes = codes.contiguous()
    slots, groups, time = codes.shape
    hidden, half = table.shape[1], inv_freq.shape[0]
    x, turn = table.new_empty(slots * time, hidden), inv_freq.new_empty(slots * time, 2 * half)
    normed = torch.empty_like(x)
    _embed[(time, slots)](
        codes, table, frames, inv_freq, norm[0], x, normed, turn, norm[1], time,
        CODES=table.shape[0] // groups, GROUPS=groups, K=hidden, HALF=half,
        BG=triton.next_power_of_2(groups), BK=triton.next_power_of_2(hidden),
        BH=triton.next_power_of_2(half),
        num_warps=8, **protocol(table),
    )  # fmt: skip
    return x, normed, turn


def attend(
    qkv: torch.Tensor,
    turn: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    frames: torch.Tensor,
    lengths: torch.Tensor,
    reach: int,
) -> torch.Tensor:
    """Attention of each stream's new frames over themselves and the frames before them, `reach` of
    them in all; keys and values of the first `lengths[i]` go into the window, at their columns.

    qkv [streams * frames, 3 * heads * head_dim]; turn from `embed`; window [2, 1 + slots, columns,
    heads, head_dim], in which stream i has the place 1 + slots[i] and nobody the first; slots,
    frames, lengths [streams] int64 -> [streams * frames, heads * head_dim]. Frames from `lengths`
    on come out finite."""
    _, _, columns, heads, head_dim = window.shape
    streams = lengths.shape[0]
    time = qkv.shape[0] // streams
    assert window.stride()[1:] == (columns * heads * head_dim, heads * head_dim, head_dim, 1), (
        window.stride()
    )
    assert fits(time, columns), f"{time} frames over {columns} columns"
    out = qkv.new_empty(streams * time, heads * head_dim)
    _attend[(heads, streams)](
        qkv, turn, window, slots, frames, lengths, out, head_dim**-0.5, time, window.stride(0),
        HEADS=heads, D=head_dim, COLUMNS=columns, REACH=reach,
        BT=tile_rows(time), BC=tile_rows(columns), BD=tile_rows(head_dim),
        num_warps=4 if time <= 16 and qkv.dtype == torch.bfloat16 else 8, **protocol(qkv),
    )  # fmt: skip
    return out


def settle(
    x: torch.Tensor,
    scale: torch.Tensor,
    y: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + scale * y, and that normalised, by rows. Without `keep`, the sum itself is not written: x
    comes back."""
    total, normed = torch.empty_like(x) if keep else x, torch.empty_like(x)
    _settle[(x.shape[0],)](
        x, y, scale, norm[0], total, normed, norm[1],
        K=x.shape[1], BK=triton.next_power_of_2(x.shape[1]), KEEP=keep, NORM=True, num_warps=4,
        **protocol(x),
    )  # fmt: skip
    return total, normed


def add_scaled(x: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + scale * y of [slots, time, channels]."""
    x, y = x.contiguous(), y.contiguous()
    out, channels = torch.empty_like(x), x.shape[-1]
    _settle[(x.numel() // channels,)](
        x, y, scale, scale, out, out, 0.0,
        K=channels, BK=triton.next_power_of_2(channels), KEEP=True, NORM=False, num_warps=4,
        **protocol(x),
    )  # fmt: skip
    return out


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Rows of gates and ups side by side [rows, 2N] -> silu(gate) * up [rows, N]."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, size)
    block = min(GLU_VALUES, triton.next_power_of_2(size))
    _swiglu[(triton.cdiv(size, block), rows)](x, out, N=size, BN=block, num_warps=4, **protocol(x))
    return out


def depthwise(
    x: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float],
) -> torch.Tensor:
    """x [slots, reach + time, channels], taps [1 + reach, channels] -> the layer norm (weight,
    bias, epsilon) of each channel's own convolution, [slots, time, channels]."""
    slots, rows, channels = x.shape
    time = rows - taps.shape[0] + 1
    out = x.new_empty(slots, time, channels)
    _depthwise[(time, slots)](
        x, taps, bias, norm[0], norm[1], out, norm[2], time,
        K=channels, BK=triton.next_power_of_2(channels), TAPS=taps.shape[0], num_warps=4,
        **protocol(x),
    )  # fmt: skip
    return out


def _alone(x: torch.Tensor) -> bool:
    """One frame of one stream, which is what the first sound waits for: its products read weights
    and do little else, so they gain from asking for them while the kernel in front still runs. The
    library is as fast from two rows on."""
    return x.shape[0] == 1 and x.shape[1] % 64 == 0


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return project(x, w) if _alone(x) else F.linear(x, w)


def gated(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return project(x, gate_up, glu=True) if _alone(x) else swiglu(F.linear(x, gate_up))
