"""The vocoder's activation, alone and as part of what stands before each of its convolutions: one
kernel where plain PyTorch takes four, or eight.

Rows are [slots, time, channels] as everywhere in the vocoder. Arithmetic is float32 whatever the
rows are: a phase rounded to bfloat16 is wrong by a tenth of a radian at 25. Reference: `Snake` and
`Push.join` of `layers/streaming.py`, which call this on the vocoder's thread and current stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHANNELS = 32
"""Of a program. It divides the channels of all the rows there are (96 are the fewest), so nothing
is masked out, and a thread has eight neighbours: in bfloat16, one load of 16 bytes."""
FEW_ROWS, MANY_ROWS = 32, 128
"""Of a program: few where there is little to do, so that one frame of one stream gives 48 programs
or more; many where memory is the limit, so that a thread asks for more of it at once and reads a
channel's curve for four rows."""
MANY_VALUES = 1 << 20
LEAST_TAIL = 64
"""The longest tail has 54 rows. One tile for all of them, and one compiled kernel instead of
four."""


@triton.jit
def activated(x, curve, channel, inside, channels):
    """x + gain sin²(rate x) of [rows, channels] in float32.

    sin² has the period pi, so the phase is brought to ±pi/2: pi is split in three, so that the
    products with the first two are exact even where a multiply-add is two operations. On a device
    each is one, and not the compiler's choice: a row in the tail and the same row in the buffer
    shall be the same bits. Up to a phase of 50,000 the result is right to 6e-7 (up to 3,000, to
    3e-7); far beyond (2^24), where float32 cannot tell a phase from the next wave's, sin² is
    anything from 0 to 1."""
    rate = tl.load(curve + channel, mask=inside, other=0.0)[None, :]
    gain = tl.load(curve + channels + channel, mask=inside, other=0.0)[None, :]
    wide = x.to(tl.float32)
    phase = wide * rate
    turns = tl.floor(tl.fma(phase, 0.3183098861837907, 0.5))
    phase = tl.fma(turns, -3.140625, phase)
    phase = tl.fma(turns, -9.67502593994140625e-4, phase)
    phase = tl.fma(turns, -1.509957990978376432e-7, phase)
    z = phase * phase
    series = tl.fma(z, 2.5997454673760273e-06, -0.0001980647561290699)
    series = tl.fma(tl.fma(z, series, 0.008333015361567142), z, -0.1666665701765731)
    sine = tl.fma(phase * z, series, phase)  # to 5e-9
    return tl.fma(gain, tl.minimum(sine * sine, 1.0), wide)


@triton.jit(do_not_specialize=["time"])
def _apply(
    x,
    shift,
    curve,
    out,
    time,
    channels,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = channel < channels
    mine = (row < time)[:, None] & inside[None, :]
    place = (
        tl.program_id(2).to(tl.int64) * time * channels + row[:, None] * channels + channel[None, :]
    )
    y = tl.load(x + place, mask=mine, other=0.0).to(tl.float32)
    if SHIFT:
        y += tl.load(shift + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = activated(y, curve, channel, inside, channels)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _fresh(
    x,
    curve,
    silent,
    slot,
    row,
    mine,
    channel,
    inside,
    channels,
    SNAKE: tl.constexpr,
    MUTE: tl.constexpr,
):
    """Rows of the input as the convolution is to see them, in their own type; `x` points at the
    slot's first."""
    y = tl.load(x + row[:, None] * channels + channel[None, :], mask=mine, other=0.0)
    if SNAKE:
        y = activated(y, curve, channel, inside, channels).to(y.dtype)
    if MUTE:
        y = tl.where((row >= tl.load(silent + slot))[:, None], y, tl.zeros_like(y))
    return y


@triton.jit
def _move(
    x, held, ends, silent, curve, out, slot, tail, channel, inside, channels,
    TAIL: tl.constexpr, SNAKE: tl.constexpr, MUTE: tl.constexpr,
):  # fmt: skip
    """The old tail to the front of `out`, the new one to where the old one was. Fresh rows in it
    are computed here anew: those who put them in `out` are not waited for."""
    row = tl.arange(0, TAIL)
    place = row[:, None] * channels + channel[None, :]
    mine = (row < tail)[:, None] & inside[None, :]
    end = tl.load(ends + row, mask=row < tail, other=0).to(tl.int32)  # as a row of [tail | x]
    was = mine & (end < tail)[:, None]
    come = mine & (end >= tail)[:, None]
    old = tl.load(held + place, mask=mine)
    moved = tl.load(held + end[:, None] * channels + channel[None, :], mask=was)
    y = _fresh(x, curve, silent, slot, end - tail, come, channel, inside, channels, SNAKE, MUTE)
    tl.store(out + place, old, mask=mine)
    tl.debug_barrier()  # a row that one thread writes, another may have had to read
    tl.store(held + place, tl.where(was, moved, y), mask=mine)


@triton.jit(
    do_not_specialize=["time", "tail", "ends_stride"],
    do_not_specialize_on_alignment=["ends", "silent"],
)
def _join(
    x, held, ends, silent, curve, out, time, tail, channels, held_stride, ends_stride,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TAIL: tl.constexpr, SNAKE: tl.constexpr,
    MUTE: tl.constexpr,
):  # fmt: skip
    """Per slot and block of channels: program 0 has the whole tail, and is the only one to read or
    write it; the others have ROWS input rows each."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    slot = tl.program_id(2).to(tl.int64)
    x += slot * time * channels
    out += slot * (tail + time) * channels
    if tl.program_id(1) == 0:
        held += slot * held_stride
        ends += slot * ends_stride
        _move(
            x,
            held,
            ends,
            silent,
            curve,
            out,
            slot,
            tail,
            channel,
            inside,
            channels,
            TAIL,
            SNAKE,
            MUTE,
        )
    else:
        row = (tl.program_id(1) - 1) * ROWS + tl.arange(0, ROWS)
        mine = (row < time)[:, None] & inside[None, :]
        y = _fresh(x, curve, silent, slot, row, mine, channel, inside, channels, SNAKE, MUTE)
        tl.store(out + (tail + row)[:, None] * channels + channel[None, :], y, mask=mine)


@triton.jit(
    do_not_specialize=["time", "tail", "ends_stride"], do_not_specialize_on_alignment=["ends"]
)
def _advance(
    held, ends, buffer, time, tail, channels, held_stride, ends_stride, CHANNELS: tl.constexpr,
    TAIL: tl.constexpr
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    slot = tl.program_id(1).to(tl.int64)
    held += slot * held_stride
    ends += slot * ends_stride
    buffer += slot * (tail + time) * channels
    fresh = buffer + tail * channels
    inside = channel < channels
    _move(
        fresh,
        held,
        ends,
        ends,
        fresh,
        buffer,
        slot,
        tail,
        channel,
        inside,
        channels,
        TAIL,
        False,
        False,
    )


def block_rows(x: torch.Tensor) -> int:
    return MANY_ROWS if x.numel() >= MANY_VALUES else FEW_ROWS


def block_tail(rows: int) -> int:
    return max(LEAST_TAIL, 1 << (rows - 1).bit_length())


def snake(x: torch.Tensor, curve: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
    """x [slots, time, channels], curve [2, channels] float32 (rate, gain) -> x + gain sin²(rate x),
    of x + shift [channels] where there is one: a bias that the convolution before did not add."""
    x = x.contiguous()
    slots, time, channels = x.shape
    out = torch.empty_like(x)
    if x.numel():
        block = block_rows(x)
        grid = (triton.cdiv(channels, CHANNELS), triton.cdiv(time, block), slots)
        _apply[grid](
            x, x if shift is None else shift, curve, out, time, channels,
            ROWS=block, CHANNELS=CHANNELS, SHIFT=shift is not None, num_warps=4,
        )  # fmt: skip
    return out


def join(
    held: torch.Tensor,
    ends: torch.Tensor,
    x: torch.Tensor,
    curve: torch.Tensor | None,
    silent: torch.Tensor | None,
) -> torch.Tensor:
    """`[held | snake(x)]`, and `held` moved on in place.

    held [slots, rows, channels] with whole rows side by side, ends [slots, rows, 1] int64: which
    row of the result a row of `held` becomes. Without a curve x goes in as it is. silent [slots]
    int64: so many first rows of x go in as zeros."""
    x = x.contiguous()
    slots, time, channels = x.shape
    rows, block = held.shape[1], block_rows(x)
    assert held.stride()[1:] == (channels, 1), f"tail strides {held.stride()}"
    assert ends.stride(1) == 1, f"ends strides {ends.stride()}"
    assert silent is None or silent.stride(0) == 1, f"silent strides {silent.stride()}"
    out = x.new_empty(slots, rows + time, channels)
    grid = (triton.cdiv(channels, CHANNELS), 1 + triton.cdiv(time, block), slots)
    _join[grid](
        x, held, ends, ends if silent is None else silent, x if curve is None else curve, out,
        time, rows, channels, held.stride(0), ends.stride(0),
        ROWS=block, CHANNELS=CHANNELS, TAIL=block_tail(rows),
        SNAKE=curve is not None, MUTE=silent is not None, num_warps=4,
    )  # fmt: skip
    return out


def advance(held: torch.Tensor, ends: torch.Tensor, buffer: torch.Tensor) -> None:
    """What is left of `join` once others have put the fresh rows where they belong in `buffer`: the
    tail comes before them, and moves on in place."""
    slots, rows, channels = held.shape
    assert held.stride()[1:] == (channels, 1), f"tail strides {held.stride()}"
    assert ends.stride(1) == 1, f"ends strides {ends.stride()}"
    grid = (triton.cdiv(channels, CHANNELS), slots)
    _advance[grid](
        held, ends, buffer, buffer.shape[1] - rows, rows, channels, held.stride(0), ends.stride(0),
        CHANNELS=CHANNELS, TAIL=block_tail(rows), num_warps=4,
    )  # fmt: skip
