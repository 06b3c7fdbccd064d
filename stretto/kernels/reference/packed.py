"""Matrices of few bits a number, as checkpoints store them: integers or float8 with scales for
groups of inputs, for blocks, or for whole rows.

A weight is the float32 product of number and scale, rounded to the type of whatever it is
multiplied with: so a model is the same whether its weights are widened when they are loaded or when
they are used. Only where a scale belongs to a row of float8 (`quantized.py`), it comes after the
sum. Imported by the layers, the loader and the plain kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stretto.kernels.formats import WeightFormat
from stretto.kernels.reference.quantized import FLOAT8, LARGEST, LEAST_SCALE, scaled

PART = 1 << 24
"""Numbers that are widened at a time: there are a few float32 of each meanwhile."""
CACHED_PART = 1 << 17
"""Numbers that a CPU quantises at a time: what a scale's search goes through stays in its cache,
which makes it four times as fast."""
RATIOS = 20
LEAST_INT4 = 2.0**-24
"""A scale that float16 still has."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [outputs, inputs], or several in front of each other [..., outputs, inputs]."""

    format: WeightFormat
    # integers: int32 words of consecutive inputs, lowest bits first; float8 as it is
    codes: torch.Tensor
    # [..., outputs, groups]; blocks: [..., outputs / block_rows, groups]; rows: [..., outputs]
    scale: torch.Tensor
    # int8 [..., outputs, groups]
    zero: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the wide matrix."""
        *first, last = self.codes.shape
        return torch.Size((*first, last * (1 if self.format.kind == "float8" else self.per_word)))

    @property
    def per_word(self) -> int:
        return 32 // self.format.bits

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in (self.codes, self.scale, self.zero) if t is not None)

    def numel(self) -> int:
        return self.shape.numel()

    def __getitem__(self, index: torch.Tensor | int) -> PackedWeight:
        """Some of several matrices."""
        assert self.codes.ndim > 2, "rows of one matrix share scales: split() knows how"
        zero = None if self.zero is None else self.zero[index]
        return PackedWeight(self.format, self.codes[index], self.scale[index], zero)

    def flat(self) -> PackedWeight:
        """All rows as one matrix."""
        last = 1 if self.format.per_row else 2
        zero = None if self.zero is None else self.zero.flatten(0, -2)
        scale = self.scale.flatten() if last == 1 else self.scale.flatten(0, -2)
        return PackedWeight(self.format, self.codes.flatten(0, -2), scale, zero)

    def split(self, sizes: int | Sequence[int]) -> tuple[PackedWeight, ...]:
        """Parts of one matrix by rows; a part's size is a multiple of `block_rows`, or it is the
        last."""
        rows, block = len(self.codes), self.format.block_rows
        if isinstance(sizes, int):
            sizes = [min(sizes, rows - at) for at in range(0, rows, sizes)]
        codes = torch.split(self.codes, list(sizes))
        scales = torch.split(self.scale, [-(-n // block) for n in sizes])
        if self.zero is None:
            pairs = zip(codes, scales, strict=True)
            return tuple(PackedWeight(self.format, c, s) for c, s in pairs)
        zeros = torch.split(self.zero, list(sizes))
        parts = zip(codes, scales, zeros, strict=True)
        return tuple(PackedWeight(self.format, c, s, z) for c, s, z in parts)

    def fill(self, wide: torch.Tensor) -> None:
        """Quantise a matrix into this one."""
        rows = self._part_rows(CACHED_PART if self.device.type == "cpu" else PART)
        for part, some in zip(self.split(rows), torch.split(wide, rows), strict=True):
            _quantise(some, part)

    def _part_rows(self, numbers: int = PART) -> int:
        block = self.format.block_rows
        return max(1, numbers // self.shape[-1] // block) * block

    def _parts(self) -> tuple[PackedWeight, ...]:
        return self.split(self._part_rows())


def empty(
    form: WeightFormat, *shape: int, device: torch.device | str | None = None
) -> PackedWeight:
    """An uninitialised matrix [..., outputs, inputs]. Of several, blocks must divide the
    outputs."""
    *first, outputs, inputs = shape
    if form.kind == "float8":
        codes = torch.empty(*shape, dtype=FLOAT8, device=device)
    else:
        words = inputs * form.bits // 32
        codes = torch.empty(*first, outputs, words, dtype=torch.int32, device=device)
    scales: tuple[int, ...] = (outputs,)
    if not form.per_row:
        scales = (-(-outputs // form.block_rows), -(-inputs // form.group))
    dtype: torch.dtype = getattr(torch, form.scale_dtype)
    scale = torch.empty(*first, *scales, dtype=dtype, device=device)
    zero = None
    if not form.symmetric:
        zero = torch.empty(*first, *scales, dtype=torch.int8, device=device)
    return PackedWeight(form, codes, scale, zero)


Weight = torch.Tensor | PackedWeight


def widen(w: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The wide matrix or matrices, a part at a time."""
    if isinstance(w, torch.Tensor):
        return w.to(dtype)
    if w.codes.ndim == 2 and w.numel() <= PART:
        return _widen(w, dtype)
    if w.codes.ndim > 2:
        out = torch.empty(w.shape, dtype=dtype, device=w.device)
        each = max(1, PART // w.shape[-2:].numel())
        for start in range(0, len(w.codes), each):
            some = torch.arange(start, min(start + each, len(w.codes)), device=w.device)
            out[start : start + each] = _widen(w[some], dtype)
        return out
    return torch.cat([_widen(part, dtype) for part in w._parts()])


def _widen(w: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    form = w.format
    if form.kind == "float8":
        return (w.codes.float() * _spread(w)).to(dtype)
    numbers = unpack(w.codes, form.bits).float() - (1 << form.bits - 1)
    grouped = torch.unflatten(numbers, -1, (-1, form.group))
    if w.zero is not None:
        grouped = grouped - w.zero.float()[..., None]
    return (grouped * w.scale.float()[..., None]).to(dtype).flatten(-2)


def _spread(w: PackedWeight) -> torch.Tensor:
    """The scale of each number of float8."""
    form, (outputs, inputs) = w.format, w.shape[-2:]
    scale = w.scale.float()
    if form.per_row:
        return scale[..., None]
    rows = scale.repeat_interleave(form.block_rows, -2)[..., :outputs, :]
    return rows.repeat_interleave(form.group, -1)[..., :inputs]


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., n * 32 / bits], lowest bits first."""
    read = words.contiguous().view(torch.uint8)
    if bits == 8:
        return read
    return torch.stack((read & 15, read >> 4), -1).flatten(-2)


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers from 0 on [..., n], int32 words [..., n * bits / 32]."""
    read = numbers.to(torch.uint8)
    if bits == 4:
        pairs = torch.unflatten(read, -1, (-1, 2))
        read = pairs[..., 0] | (pairs[..., 1] << 4)
    return read.contiguous().view(torch.int32)


def linear(x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T (+ bias), whatever w is stored in."""
    if isinstance(w, torch.Tensor):
        return F.linear(x, w, bias)
    if w.format.per_row:
        y = scaled(F.linear(x, w.codes.to(x.dtype)), w.scale)
    else:
        y = F.linear(x, widen(w, x.dtype))
    return y if bias is None else y + bias


# ---- from wide numbers


def _quantise(wide: torch.Tensor, into: PackedWeight) -> None:
    if into.format.kind == "float8":
        _to_float8(wide, into)
    else:
        _to_integers(wide, into)


def _to_integers(wide: torch.Tensor, into: PackedWeight) -> None:
    """Round to nearest, of a few scales for each group the one with the least squared error."""
    form = into.format
    low, high = -(1 << form.bits - 1), (1 << form.bits - 1) - 1
    groups = torch.unflatten(wide.float(), -1, (-1, form.group))
    widest, zero = _whole_range(groups, form)
    best = torch.full_like(widest, torch.inf)
    scale = torch.ones_like(widest)
    for i in range(RATIOS):
        # From all numbers within the range, inwards to four fifths of it.
        tried = (widest * (1.0 - 0.2 * i / (RATIOS - 1))).to(into.scale.dtype).float()
        error = (groups / tried).add_(zero).round_().clamp_(low, high)
        error = error.sub_(zero).mul_(tried).sub_(groups).square_().sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, tried, scale)
    rounded = (groups / scale).add_(zero).round_().clamp_(low, high)
    into.scale.copy_(scale.squeeze(-1))
    into.codes.copy_(pack((rounded - low).flatten(-2), form.bits))
    if into.zero is not None:
        into.zero.copy_(zero.squeeze(-1))


def _whole_range(groups: torch.Tensor, form: WeightFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """For each group, the scale by which all of its numbers are within the range, and the zero
    point. Without zero points the range has one number more below zero than above, so a scale may
    be negative."""
    most = groups.amax(-1, keepdim=True)
    if form.symmetric:
        largest = groups.abs().amax(-1, keepdim=True)
        fit = (largest / (1 << form.bits - 1)).clamp_min(LEAST_INT4)
        return torch.where(most == largest, -fit, fit), torch.zeros_like(fit)
    above, below = most.clamp_min(0), groups.amin(-1, keepdim=True).clamp_max(0)
    half = 1 << form.bits - 1
    fit = ((above - below) / (2 * half - 1)).clamp_min(LEAST_INT4)
    return fit, (-below / fit).round().clamp(0, 2 * half - 1) - half


def _to_float8(wide: torch.Tensor, into: PackedWeight) -> None:
    """The largest number of a row or block becomes the format's largest."""
    form, values = into.format, wide.float()
    if form.per_row:
        largest = values.abs().amax(-1)
    else:
        down, right = -len(values) % form.block_rows, -values.shape[-1] % form.group
        blocks = F.pad(values.abs(), (0, right, 0, down))
        blocks = torch.unflatten(blocks, 0, (-1, form.block_rows))
        blocks = torch.unflatten(blocks, -1, (-1, form.group))
        largest = blocks.amax((1, 3))
    scale = torch.where(largest == 0, 1.0, (largest * (1 / LARGEST)).clamp_min(LEAST_SCALE))
    into.scale.copy_(scale)
    into.codes.copy_((values / _spread(into)).clamp(-LARGEST, LARGEST))
