"""bfloat16 numbers as two float8 numbers each, so that tensor cores multiply them by float8 weights as these lie in
memory, instead of having every weight widened first.

A number is `scale * (high + low / 16)`, and `scale` a power of two that several share, by which the largest of them
comes to lie between 128 and 256. `high` is the number over `scale`, rounded to float8 (four significant bits), `low`
is 16 times what that left over: four more bits. A bfloat16 number has no more, so nothing is lost; of numbers below
2^-13 of the largest less than 2^-21 of it is. Used by `experts_choice`, `experts_float8` and `grouped_float8`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

HEADROOM = tl.constexpr(7 << 23)  # an exponent of 7, where float32 has it
INFINITE = tl.constexpr(0xFF << 23)


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """[..., size] numbers, in blocks with a scale each."""

    planes: torch.Tensor  # [..., 2, size] float8: high, low
    scales: torch.Tensor  # [..., size // block] float32


@triton.jit
def magnitude(x):
    """Integers in the order of |x|, x float32. The largest of them belongs to what is no number, if there is any."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def fitting(largest):
    """The scale for numbers of this `magnitude` at most, and its inverse. The scale is not a number if one of them is
    not, or infinite: float8 cannot say so, and it has to show in the end."""
    power = tl.maximum(largest & INFINITE, HEADROOM + (1 << 23)) - HEADROOM
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    return tl.where(largest < INFINITE, power.to(tl.float32, bitcast=True), float("nan")), inverse


@triton.jit
def halves(x, inverse):
    """High and low of float32 numbers that bfloat16 can hold."""
    x = x * inverse
    high = x.to(tl.float8e4nv)
    return high, ((x - high.to(tl.float32)) * 16.0).to(tl.float8e4nv)


@triton.jit
def halved(x, planes, m, K: tl.constexpr):
    """The m-th row of x, K numbers, to `planes` [rows, 2, K]; returns its scale."""
    k = tl.arange(0, K)
    values = tl.load(x + m * K + k).to(tl.float32)
    scale, inverse = fitting(tl.max(magnitude(values), 0))
    high, low = halves(values, inverse)
    tl.store(planes + m * (2 * K) + k, high)
    tl.store(planes + m * (2 * K) + K + k, low)
    return scale


@triton.jit
def in_turns(places, BM: tl.constexpr):
    """Where high and low of the rows at these places are, one after the other [2 * BM]; below 0: nobody's."""
    twice = tl.interleave(places, places)
    return tl.where(twice >= 0, twice * 2 + tl.arange(0, 2 * BM) % 2, -1)


@triton.jit
def times(w, x, BM: tl.constexpr, BN: tl.constexpr, DEVICE: tl.constexpr):
    """w @ x.T [BN, BM]; w [BN, BK] float8, x [2 * BM, BK] the high and low of each row, one after the other. Not added
    to what was there before: inside the tensor cores a sum keeps about 14 bits, so let it be a short one. (The
    interpreter has no float8 product: widen there.)"""
    if DEVICE:
        acc = tl.dot(w, x.T)
    else:
        acc = tl.dot(w.to(tl.float32), x.to(tl.float32).T, input_precision="ieee")
    high, low = tl.split(tl.reshape(acc, (BN, BM, 2)))  # the same thread has both
    return high + low * 0.0625
