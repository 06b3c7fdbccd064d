"""What stands around the vocoder's convolutions: the end of a residual unit, the sum after an upsampling product, the
windows of a convolution that runs as a product; and the last convolution, which has but one channel to give.

Rows are [slots, time, channels] as everywhere in the vocoder. None of these knows of streams: a row comes of its own
inputs alone. References: the plain ways of `residual`, `OverlapUpConv` and `CausalConv` in `layers/streaming.py`, which
call this on the vocoder's thread and current stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stretto.kernels.fast.snake import _snake, snake


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of a product has, and how it runs."""

    size: int  # rows, and channels
    chunk: int  # inputs at once
    warps: int
    stages: int
    registers: int | None = None  # at most, per thread: with 128, two of the largest fit on a multiprocessor


WHOLE = (96, 192)
"""Channels of which a program has all: each row is activated once and multiplied where it lies, so that only memory is
the limit. With more channels, several programs would have to activate the same row (at 384, three times over: 25 us of
arithmetic where the activation alone takes 9), so there the activation stays a kernel of its own."""
CHUNK = 32  # channels at once
TILE = 128
"""Channels that a product takes must be a multiple of this."""
TILES = (Tile(128, 64, 8, 3, 128), Tile(64, 64, 4, 4), Tile(32, 128, 4, 4))
COPIED = 64  # columns of a program that only copies or adds
ENOUGH = 96
"""Programs that keep most of a device busy: the largest tile that gives so many is taken."""


@triton.jit
def _block(weight, n, k, channels):
    """weight[n, k] as the right side of a product."""
    return tl.load(weight + n[None, :] * channels + k[:, None])


@triton.jit
def _put(total, old, bias, out, place, n, mine):
    y = total + tl.load(bias + n).to(tl.float32)[None, :] + old.to(tl.float32)
    tl.store(out + place + n[None, :], y.to(out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["rows"])
def _finish(
    x, y, shift, curve, weight, bias, out, rows,
    THIRD: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x + bias + snake(y + shift) @ weight^T for ROWS rows. Sizes are powers of two and the channels are three of them,
    hence three sums."""
    channels: tl.constexpr = 3 * THIRD
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = (row < rows)[:, None]
    place = row[:, None].to(tl.int64) * channels
    first = tl.arange(0, THIRD)
    second, third = first + THIRD, first + 2 * THIRD
    a = tl.zeros([ROWS, THIRD], tl.float32)
    b = tl.zeros([ROWS, THIRD], tl.float32)
    c = tl.zeros([ROWS, THIRD], tl.float32)
    for start in tl.range(0, channels, CHUNK):
        k = start + tl.arange(0, CHUNK)
        v = tl.load(y + place + k[None, :], mask=mine, other=0.0)
        wide = v.to(tl.float32) + tl.load(shift + k).to(tl.float32)[None, :]
        left = _snake(wide, curve, k, k < channels, channels).to(v.dtype)
        a = tl.dot(left, _block(weight, first, k, channels), a, input_precision=PRECISION)
        b = tl.dot(left, _block(weight, second, k, channels), b, input_precision=PRECISION)
        c = tl.dot(left, _block(weight, third, k, channels), c, input_precision=PRECISION)
    # All of x is asked for before the first part is waited for.
    old_a = tl.load(x + place + first[None, :], mask=mine, other=0.0)
    old_b = tl.load(x + place + second[None, :], mask=mine, other=0.0)
    old_c = tl.load(x + place + third[None, :], mask=mine, other=0.0)
    _put(a, old_a, bias, out, place, first, mine)
    _put(b, old_b, bias, out, place, second, mine)
    _put(c, old_c, bias, out, place, third, mine)


@triton.jit(do_not_specialize=["rows"])
def _add_product(
    x, y, weight, bias, out, rows, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x + bias + y @ weight^T. Programs of the same rows are neighbours, so that y comes from memory once."""
    parts = channels // COLUMNS
    row = (tl.program_id(0) // parts) * ROWS + tl.arange(0, ROWS)
    n = (tl.program_id(0) % parts) * COLUMNS + tl.arange(0, COLUMNS)
    mine = (row < rows)[:, None]
    place = row[:, None].to(tl.int64) * channels
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, channels, CHUNK):
        k = start + tl.arange(0, CHUNK)
        left = tl.load(y + place + k[None, :], mask=mine, other=0.0)
        total = tl.dot(left, _block(weight, n, k, channels), total, input_precision=PRECISION)
    _put(total, tl.load(x + place + n[None, :], mask=mine, other=0.0), bias, out, place, n, mine)


@triton.jit(do_not_specialize=["time"])
def _add_halves(x, out, time, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = tl.program_id(2).to(tl.int64)
    mine = (row < time)[:, None] & (column < width)[None, :]
    place = slot * (1 + time) * 2 * width + row[:, None] * 2 * width + column[None, :]
    late = tl.load(x + place + width, mask=mine, other=0.0)
    early = tl.load(x + place + 2 * width, mask=mine, other=0.0)
    y = (early.to(tl.float32) + late.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + slot * time * width + row[:, None] * width + column[None, :], y, mask=mine)


@triton.jit(do_not_specialize=["time", "dilation"])
def _windows(x, out, time, dilation, channels, TAPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = tl.program_id(2).to(tl.int64)
    mine = (row < time)[:, None] & (channel < channels)[None, :]
    x += slot * (time + (TAPS - 1) * dilation) * channels
    out += slot * time * TAPS * channels
    for tap in tl.static_range(TAPS):
        y = tl.load(x + (row + tap * dilation)[:, None] * channels + channel[None, :], mask=mine)
        tl.store(out + (row * TAPS + tap)[:, None] * channels + channel[None, :], y, mask=mine)


@triton.jit(do_not_specialize=["time", "dilation"])
def _single(
    x, weight, bias, out, time, dilation, channels,
    TAPS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A row is read once per tap, but for the first time from a cache nearby. Products are summed in float32, per
    channel first and over channels at the end."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.program_id(1).to(tl.int64)
    mine = row < time
    x += slot * (time + (TAPS - 1) * dilation) * channels
    total = tl.zeros([ROWS, CHUNK], tl.float32)
    for start in range(0, channels, CHUNK):
        channel = start + tl.arange(0, CHUNK)
        inside = channel < channels
        for tap in tl.static_range(TAPS):
            place = (row + tap * dilation)[:, None] * channels + channel[None, :]
            w = tl.load(weight + tap * channels + channel, mask=inside, other=0.0).to(tl.float32)
            y = tl.load(x + place, mask=mine[:, None] & inside[None, :], other=0.0).to(tl.float32)
            total = tl.fma(y, tl.broadcast_to(w[None, :], y.shape), total)
    y = tl.sum(total, 1) + tl.load(bias).to(tl.float32)
    tl.store(out + slot * time + row, y, mask=mine)


def fits(channels: int) -> bool:
    """Can a residual unit of so many channels end in these kernels?"""
    return channels in WHOLE or channels % TILE == 0


def finish(
    x: torch.Tensor,
    y: torch.Tensor,
    shift: torch.Tensor,
    curve: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """x + bias + snake(y + shift) @ weight^T: the end of a residual unit, whose convolution gave y without its bias
    `shift`.

    x, y [slots, time, channels]; curve [2, channels] float32 (rate, gain); weight [channels, channels] out by in."""
    channels = x.shape[2]
    assert x.shape == y.shape, f"a residual of {tuple(x.shape)} and {tuple(y.shape)}"
    assert weight.is_contiguous(), f"weight strides {weight.stride()}"
    if channels not in WHOLE:
        return add_product(x, snake(y, curve, shift), weight, bias)
    x, y = x.contiguous(), y.contiguous()
    rows, block = x.shape[0] * x.shape[1], 64
    out = torch.empty_like(x)
    if rows:
        _finish[(triton.cdiv(rows, block),)](
            x, y, shift, curve, weight, bias, out, rows,
            THIRD=channels // 3, ROWS=block, CHUNK=CHUNK, PRECISION=precision(x), num_warps=4, num_stages=4,
        )  # fmt: skip
    return out


def add_product(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x + bias + y @ weight^T, for channels that are a multiple of TILE."""
    channels = x.shape[2]
    assert channels % TILE == 0, f"{channels} channels"
    x, y = x.contiguous(), y.contiguous()
    rows, out = x.shape[0] * x.shape[1], torch.empty_like(x)
    if rows:
        t = pick(rows, channels)
        _add_product[(num_programs(rows, channels, t),)](
            x, y, weight, bias, out, rows, channels,
            ROWS=t.size, COLUMNS=t.size, CHUNK=t.chunk, PRECISION=precision(x),
            num_warps=t.warps, num_stages=t.stages, maxnreg=t.registers,
        )  # fmt: skip
    return out


def num_programs(rows: int, channels: int, tile: Tile) -> int:
    return -(-rows // tile.size) * (channels // tile.size)


def pick(rows: int, channels: int) -> Tile:
    return next((t for t in TILES if num_programs(rows, channels, t) >= ENOUGH), TILES[-1])


def precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def add_halves(x: torch.Tensor) -> torch.Tensor:
    """[slots, 1 + time, 2 * width] -> [slots, time, width]: the first half of each row but the first, and the second
    half of the row before it."""
    x = x.contiguous()
    slots, rows, width = x.shape[0], x.shape[1] - 1, x.shape[2] // 2
    out = x.new_empty(slots, rows, width)
    if rows:
        grid = (triton.cdiv(width, COPIED), triton.cdiv(rows, 32), slots)
        _add_halves[grid](x, out, rows, width, ROWS=32, COLUMNS=COPIED, num_warps=4)
    return out


def windows(x: torch.Tensor, taps: int, dilation: int) -> torch.Tensor:
    """[slots, (taps - 1) * dilation + time, channels] -> [slots, time, taps * channels]: what each output row of a
    convolution reads, side by side."""
    x = x.contiguous()
    slots, rows, channels = x.shape
    time = rows - (taps - 1) * dilation
    out = x.new_empty(slots, time, taps * channels)
    grid = (triton.cdiv(channels, COPIED), triton.cdiv(time, 16), slots)
    _windows[grid](x, out, time, dilation, channels, TAPS=taps, ROWS=16, CHANNELS=COPIED, num_warps=4)
    return out


def single(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dilation: int) -> torch.Tensor:
    """A convolution to one channel: x [slots, (taps - 1) * dilation + time, channels], weight [1, taps, channels] ->
    [slots, time, 1] float32, as it is added up."""
    x = x.contiguous()
    assert weight.shape[0] == 1, f"weight {tuple(weight.shape)}"
    assert weight.is_contiguous(), f"weight strides {weight.stride()}"
    slots, rows, channels = x.shape
    taps = weight.shape[1]
    time = rows - (taps - 1) * dilation
    out = x.new_empty(slots, time, 1, dtype=torch.float32)
    grid = (triton.cdiv(time, 128), slots)
    _single[grid](
        x, weight, bias, out, time, dilation, channels, TAPS=taps, ROWS=128, CHUNK=CHUNK, num_warps=4
    )  # fmt: skip
    return out
