"""`stretto.kernels.reference.masks` as a kernel each: rows that have no bias, mask or least share
leave at once, so a step in which no row has one pays for the launches alone. Each waits for the
kernel in front before it leaves: the one behind it relies on that. Called by adapters on the
stage's stream, inside captured graphs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.triton.device import protocol

BLOCK = 4096
BIASES = 128  # at a time


def bias_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """See `stretto.kernels.reference.masks.bias_rows`."""
    _bias[(len(logits),)](
        logits,
        logits.stride(0),
        rows,
        counts,
        ids,
        values,
        ids.stride(0),
        BLOCK=BIASES,
        **protocol(logits),
    )


@triton.jit(do_not_specialize=["stride"])
def _bias(logits, stride, rows, counts, ids, values, most, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    count = tl.load(counts + row)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = place < count
        token = tl.load(ids + row * most + place, there, other=0)
        added = tl.load(values + row * most + place, there, other=0.0).to(logits.dtype.element_ty)
        one = logits + at * stride + token
        total = tl.load(one, there, other=0.0).to(tl.float32) + added.to(tl.float32)
        tl.store(one, total.to(logits.dtype.element_ty), there)


def mask_rows(
    logits: torch.Tensor, rows: torch.Tensor, masked: torch.Tensor, bits: torch.Tensor
) -> None:
    """See `stretto.kernels.reference.masks.mask_rows`."""
    batch, size = logits.shape
    grid = (batch, triton.cdiv(size, BLOCK))
    _mask[grid](
        logits, logits.stride(0), rows, masked.view(torch.uint8), bits, bits.stride(0), SIZE=size,
        BLOCK=BLOCK,
        **protocol(logits),
    )  # fmt: skip


@triton.jit
def _mask(
    logits,
    stride,
    rows,
    masked,
    bits,
    words,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0)
    row = tl.load(rows + at)
    if tl.load(masked + row) != 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < SIZE
        word = tl.load(bits + row * words + token // 32, inside, other=-1)
        forbidden = ((word >> (token % 32)) & 1) == 0
        tl.store(
            logits + at.to(tl.int64) * stride + token,
            tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty),
            inside & forbidden,
        )


def floor_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    min_p: torch.Tensor,
    temperature: torch.Tensor,
    penalty: torch.Tensor,
    seen: torch.Tensor,
    held: tuple[torch.Tensor, torch.Tensor, int],
) -> None:
    """See `stretto.kernels.reference.masks.floor_rows`. `held`: positions [batch], where each
    answer may end [rows], and the end token, which is not the best one before that."""
    batch, size = logits.shape
    positions, ends, end = held
    _floor[(batch,)](
        logits, logits.stride(0), rows, min_p, temperature, penalty, seen.view(torch.uint8),
        seen.stride(0),
        positions, ends, END=end, SIZE=size, BLOCK=BLOCK, **protocol(logits),
    )  # fmt: skip


@triton.jit
def _penalised(logits, seen, token, inside, penalty, held):
    score = tl.load(logits + token, inside & (token != held), other=float("-inf")).to(tl.float32)
    marked = tl.load(seen + token, inside, other=0) != 0
    return tl.where(marked, tl.where(score < 0, score * penalty, score / penalty), score)


@triton.jit
def _floor(
    logits, stride, rows, min_p, temperature, penalty, seen, seen_stride, positions, ends,
    END: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0)
    row = tl.load(rows + at)
    least = tl.load(min_p + row)
    if least > 0:
        mine = logits + at.to(tl.int64) * stride
        marks = seen + row.to(tl.int64) * seen_stride
        factor = tl.load(penalty + row)
        held = tl.where(tl.load(positions + at) + 1 < tl.load(ends + row), END, -1)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, SIZE, BLOCK):
            token = start + tl.arange(0, BLOCK)
            best = tl.maximum(best, _penalised(mine, marks, token, token < SIZE, factor, held))
        floor = tl.max(best, 0) + tl.load(temperature + row) * tl.log(least)
        for start in range(0, SIZE, BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < SIZE
            low = _penalised(mine, marks, token, inside, factor, held) < floor
            none = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty)
            tl.store(mine + token, none, inside & low)
