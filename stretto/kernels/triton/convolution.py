"""What stands around the vocoder's convolutions: the end of a residual unit, the sum after an
upsampling product, the windows of a convolution that runs as a product; and the last convolution,
which has but one channel to give.

Rows are [slots, time, channels] as everywhere in the vocoder. A row comes of its own inputs alone;
whatever makes rows also puts them into the next convolution's buffer, while it has them.
References: the plain ways of `residual`, `OverlapUpConv` and `CausalConv` in `layers/streaming.py`,
which call this on the vocoder's thread and current stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stretto.kernels.triton.linear import precision
from stretto.kernels.triton.snake import activated, snake


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of a product has, and how it runs."""

    size: int  # rows, and channels
    chunk: int  # inputs at once
    warps: int
    stages: int
    # at most, per thread: with 128, two of the largest fit on a multiprocessor
    registers: int | None = None


WHOLE: dict[int, int | None] = {96: None, 192: 168}
"""Channels of which a program has all, and how many registers a thread may have then (with 168, and
nothing spilled, three programs share a multiprocessor). Each row is activated once and multiplied
where it lies, so that only memory is the limit. With more channels, several programs would have to
activate the same row (at 384, three times over: more arithmetic than the 9 us of a kernel of its
own), so there the activation stays apart."""
CHUNK = 32  # channels at once
ROWS = 64
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
def _ahead(row, rows, time, tail, silent, channels):
    """Where rows lie in the next convolution's buffer, which has a tail before each slot's, and
    which are to be heard there."""
    slot = row // time
    quiet = tl.load(silent + slot, mask=row < rows, other=0)
    return ((row + (slot + 1) * tail).to(tl.int64) * channels)[:, None], (
        row - slot * time >= quiet
    )[:, None]


@triton.jit
def _put(total, old, bias, out, next_curve, buffer, place, ahead, n, mine, loud, channels):
    """The sum, and what the next convolution makes of it: from the rounded sum, as if it was read
    again."""
    y = (total + tl.load(bias + n).to(tl.float32)[None, :] + old.to(tl.float32)).to(
        out.dtype.element_ty
    )
    tl.store(out + place + n[None, :], y, mask=mine)
    z = tl.where(loud, activated(y, next_curve, n, n < channels, channels), 0.0)
    tl.store(buffer + ahead + n[None, :], z.to(y.dtype), mask=mine)


@triton.jit(do_not_specialize=["rows", "time", "tail"], do_not_specialize_on_alignment=["silent"])
def _finish(
    x, y, shift, curve, weight, bias, out, next_curve, buffer, silent, rows, time, tail,
    THIRD: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x + bias + snake(y + shift) @ weight^T for ROWS rows. Sizes are powers of two and the
    channels are three of them, hence three sums."""
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
        left = activated(wide, curve, k, k < channels, channels).to(v.dtype)
        a = tl.dot(left, _block(weight, first, k, channels), a, input_precision=PRECISION)
        b = tl.dot(left, _block(weight, second, k, channels), b, input_precision=PRECISION)
        c = tl.dot(left, _block(weight, third, k, channels), c, input_precision=PRECISION)
    # All of x is asked for before the first part is waited for.
    old_a = tl.load(x + place + first[None, :], mask=mine, other=0.0)
    old_b = tl.load(x + place + second[None, :], mask=mine, other=0.0)
    old_c = tl.load(x + place + third[None, :], mask=mine, other=0.0)
    ahead, loud = _ahead(row, rows, time, tail, silent, channels)
    _put(a, old_a, bias, out, next_curve, buffer, place, ahead, first, mine, loud, channels)
    _put(b, old_b, bias, out, next_curve, buffer, place, ahead, second, mine, loud, channels)
    _put(c, old_c, bias, out, next_curve, buffer, place, ahead, third, mine, loud, channels)


@triton.jit(do_not_specialize=["rows", "time", "tail"], do_not_specialize_on_alignment=["silent"])
def _add_product(
    x, y, weight, bias, out, next_curve, buffer, silent, rows, time, tail, channels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x + bias + y @ weight^T. Programs of the same rows are neighbours, so that y comes from
    memory once."""
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
    old = tl.load(x + place + n[None, :], mask=mine, other=0.0)
    ahead, loud = _ahead(row, rows, time, tail, silent, channels)
    _put(total, old, bias, out, next_curve, buffer, place, ahead, n, mine, loud, channels)


@triton.jit(do_not_specialize=["time", "tail"], do_not_specialize_on_alignment=["silent"])
def _add_halves(
    x, out, next_curve, buffer, silent, time, tail, width, channels, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """`width` columns of a row are as many rows of `channels` as there fit, one after the other."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = tl.program_id(2).to(tl.int64)
    inside = column < width
    mine = (row < time)[:, None] & inside[None, :]
    source = slot * (1 + time) * 2 * width + row[:, None] * 2 * width + column[None, :]
    late = tl.load(x + source + width, mask=mine, other=0.0)
    early = tl.load(x + source + 2 * width, mask=mine, other=0.0)
    y = (early.to(tl.float32) + late.to(tl.float32)).to(out.dtype.element_ty)
    place = slot * time * width + row[:, None] * width + column[None, :]
    tl.store(out + place, y, mask=mine)
    quiet = tl.load(silent + slot)
    loud = row[:, None] * (width // channels) + (column // channels)[None, :] >= quiet
    z = activated(y, next_curve, column % channels, inside, channels).to(y.dtype)
    tl.store(
        buffer + (slot + 1) * tail * channels + place,
        tl.where(loud, z, tl.zeros_like(z)),
        mask=mine,
    )


@triton.jit(do_not_specialize=["time", "dilation"])
def _windows(
    x, out, time, dilation, channels, TAPS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
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
    """A row is read once per tap, but for the first time from a cache nearby. Products are summed
    in float32, per channel first and over channels at the end."""
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


@dataclass(frozen=True, slots=True)
class Next:
    """The convolution that comes next, whose buffer is filled on the way: `tail` rows that others
    fill, then each row through its curve (rate, gain), the first `silent` [slots] int64 rows of a
    slot as zeros."""

    tail: int
    curve: torch.Tensor
    silent: torch.Tensor

    def buffer(self, x: torch.Tensor) -> torch.Tensor:
        slots, time, channels = x.shape
        assert self.silent.stride() == (1,), f"silent strides {self.silent.stride()}"
        return x.new_empty(slots, self.tail + time, channels)


def finish(
    x: torch.Tensor,
    y: torch.Tensor,
    shift: torch.Tensor,
    curve: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    after: Next,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + bias + snake(y + shift) @ weight^T, and the next convolution's buffer with it: the end of
    a residual unit, whose convolution gave y without its bias `shift`.

    x, y [slots, time, channels]; curve [2, channels] float32 (rate, gain); weight [channels,
    channels] out by in."""
    slots, time, channels = x.shape
    assert x.shape == y.shape, f"a residual of {tuple(x.shape)} and {tuple(y.shape)}"
    assert weight.is_contiguous(), f"weight strides {weight.stride()}"
    if channels not in WHOLE:
        return add_product(x, snake(y, curve, shift), weight, bias, after)
    x, y = x.contiguous(), y.contiguous()
    out, buffer = torch.empty_like(x), after.buffer(x)
    rows = slots * time
    _finish[(triton.cdiv(rows, ROWS),)](
        x, y, shift, curve, weight, bias, out, after.curve, buffer, after.silent, rows, time,
        after.tail,
        THIRD=channels // 3, ROWS=ROWS, CHUNK=CHUNK, PRECISION=precision(x),
        num_warps=4, num_stages=4, maxnreg=WHOLE[channels],
    )  # fmt: skip
    return out, buffer


def add_product(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, after: Next
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + bias + y @ weight^T and the next buffer, for channels that are a multiple of TILE."""
    slots, time, channels = x.shape
    assert channels % TILE == 0, f"{channels} channels"
    x, y = x.contiguous(), y.contiguous()
    out, buffer = torch.empty_like(x), after.buffer(x)
    rows = slots * time
    t = pick(rows, channels)
    _add_product[(num_programs(rows, channels, t),)](
        x, y, weight, bias, out, after.curve, buffer, after.silent, rows, time, after.tail,
        channels,
        ROWS=t.size, COLUMNS=t.size, CHUNK=t.chunk, PRECISION=precision(x),
        num_warps=t.warps, num_stages=t.stages, maxnreg=t.registers,
    )  # fmt: skip
    return out, buffer


def num_programs(rows: int, channels: int, tile: Tile) -> int:
    return -(-rows // tile.size) * (channels // tile.size)


def pick(rows: int, channels: int) -> Tile:
    return next((t for t in TILES if num_programs(rows, channels, t) >= ENOUGH), TILES[-1])


def add_halves(x: torch.Tensor, channels: int, after: Next) -> tuple[torch.Tensor, torch.Tensor]:
    """[slots, 1 + time, 2 * width] -> [slots, time * width / channels, channels]: the first half of
    each row but the first, and the second half of the row before it. The next buffer with it."""
    x = x.contiguous()
    slots, time, width = x.shape[0], x.shape[1] - 1, x.shape[2] // 2
    assert width % channels == 0, f"{width} columns are no rows of {channels}"
    out = x.new_empty(slots, time * (width // channels), channels)
    buffer = after.buffer(out)
    grid = (triton.cdiv(width, COPIED), triton.cdiv(time, 32), slots)
    _add_halves[grid](
        x, out, after.curve, buffer, after.silent, time, after.tail, width, channels,
        ROWS=32, COLUMNS=COPIED, num_warps=4,
    )  # fmt: skip
    return out, buffer


def windows(x: torch.Tensor, taps: int, dilation: int) -> torch.Tensor:
    """[slots, (taps - 1) * dilation + time, channels] -> [slots, time, taps * channels]: what each
    output row of a convolution reads, side by side."""
    x = x.contiguous()
    slots, rows, channels = x.shape
    time = rows - (taps - 1) * dilation
    out = x.new_empty(slots, time, taps * channels)
    grid = (triton.cdiv(channels, COPIED), triton.cdiv(time, 16), slots)
    _windows[grid](
        x, out, time, dilation, channels, TAPS=taps, ROWS=16, CHANNELS=COPIED, num_warps=4
    )
    return out


def single(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dilation: int
) -> torch.Tensor:
    """A convolution to one channel: x [slots, (taps - 1) * dilation + time, channels], weight [1,
    taps, channels] -> [slots, time, 1] float32, as it is added up."""
    x = x.contiguous()
    assert weight.shape[0] == 1, f"weight {tuple(weight.shape)}"
    assert weight.is_contiguous(), f"weight strides {weight.stride()}"
    slots, rows, channels = x.shape
    taps = weight.shape[1]
    time = rows - (taps - 1) * dilation
    out = x.new_empty(slots, time, 1, dtype=torch.float32)
    grid = (triton.cdiv(time, 128), slots)
    _single[grid](
        x, weight, bias, out, time, dilation, channels, TAPS=taps, ROWS=128, CHUNK=CHUNK,
        num_warps=4
    )  # fmt: skip
    return out
