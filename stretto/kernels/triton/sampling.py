"""Picking tokens in one or two kernels: `stretto.kernels.reference.sampling.sample` and all that
its callers do around it.

The kernels read the parameters by row, hold the end back, apply penalty and suppression, draw,
check that the logits are numbers, and write the token wherever the next step looks for it. What a
row needs is decided on the device: a greedy row runs no search. Called by the adapters, on the
stage's stream, inside captured graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stretto.kernels.triton.device import protocol
from stretto.kernels.triton.draw import (
    INFINITE,
    LAST_ID,
    LOWEST,
    candidates,
    cut,
    draw_read,
    heat_of,
    held_id,
    id_of,
    image,
    race,
    score,
    scores,
    survivors,
    winner_of,
)
from stretto.kernels.triton.tuning import config

CAPACITY = 64  # candidates of a block of a large vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Sampling parameters by row, as the runner keeps them."""

    floats: torch.Tensor  # [3, rows] float32: temperature, top_p, repetition penalty
    ints: torch.Tensor  # [2, rows] int64: top_k, seed


@dataclass(frozen=True, slots=True, eq=False)
class PickState:
    """What is known of each row's answer so far, and what may come next."""

    seen: (
        torch.Tensor
    )  # [rows, vocabulary] bool: tokens under the repetition penalty; the picked ones are added
    floor: torch.Tensor  # [rows] int64: index of the first token that may be the end
    end: int  # the token that ends an answer


@dataclass(frozen=True, slots=True, eq=False)
class FrameOut:
    """Where the codes of a batch's frames go as they are picked, and the running sum of their
    embeddings."""

    codes: torch.Tensor  # [batch, groups] int64
    total: torch.Tensor  # [batch, hidden] float32


def pick_text(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: Columns,
    answer: PickState,
    next: torch.Tensor,
) -> torch.Tensor:
    """Tokens [batch] from logits [batch, vocabulary] of any size, -1 where the logits are not
    numbers.

    Position i of `rows` and `positions` (both [batch] int64) says who logits[i] belongs to and
    where it stands. `next` [rows] int64 and `answer.seen` are written at the picked tokens'
    places."""
    batch, size = logits.shape
    check_picks(logits, rows, positions)
    assert answer.seen.is_contiguous(), "one row of marks after the other"
    c = config("pick_text", (size,), {"block": 4096, "warps": 8, "merge_warps": 8})
    blocks = triton.cdiv(size, c["block"])
    device = logits.device
    found = torch.empty(2, batch, blocks, CAPACITY, dtype=torch.int32, device=device)  # images, ids
    about = torch.empty(4, batch, blocks, dtype=torch.int32, device=device)  # see _search_blocks
    tokens = torch.empty(batch, dtype=torch.int64, device=device)
    shared = (
        logits, logits.stride(0), rows, positions, params.floats, params.ints,
        params.floats.shape[1],
        answer.seen.view(torch.uint8), answer.floor, found, about,
    )  # fmt: skip
    launch = protocol(logits)
    _search_blocks[(batch, blocks)](
        *shared,
        END=answer.end,
        SIZE=size,
        BLOCK=c["block"],
        CAP=CAPACITY,
        num_warps=c["warps"],
        **launch,
    )
    _merge_blocks[(batch,)](
        *shared, tokens, next, END=answer.end, SIZE=size, BLOCKS=blocks, CAP=CAPACITY,
        num_warps=c["merge_warps"], **launch,
    )  # fmt: skip
    return tokens


def pick_code0(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: Columns,
    answer: PickState,
    suppress: torch.Tensor,
    table: torch.Tensor,
    x: torch.Tensor,
    out: FrameOut,
    inputs: torch.Tensor | None = None,
) -> None:
    """Code 0 of each frame from logits [batch, vocabulary]; its row of `table` goes to `x` [batch,
    hidden] and starts the sum. `suppress` [vocabulary] bool marks codes that must never be picked.
    With `inputs`, a table of another width, it is this one's row that goes to `x`."""
    _pick(
        logits,
        rows,
        positions,
        params,
        0,
        table,
        x,
        out,
        inputs=inputs,
        answer=answer,
        suppress=suppress,
    )


def pick_residual(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: Columns,
    group: int,
    table: torch.Tensor,
    x: torch.Tensor,
    out: FrameOut,
    inputs: torch.Tensor | None = None,
) -> None:
    """Code `group` (1, 2, ...) of each frame; its row of `table` goes to `x` and joins the sum.
    With `inputs`, it is this one's row that goes to `x`."""
    _pick(logits, rows, positions, params, group, table, x, out, inputs=inputs)


def pick_last(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: Columns,
    group: int,
    table: torch.Tensor,
    embedding: torch.Tensor,
    out: FrameOut,
) -> None:
    """The last code of each frame; the finished sum goes, rounded once, to `embedding` [rows,
    hidden], by row."""
    _pick(logits, rows, positions, params, group, table, embedding, out, last=True)


def _pick(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: Columns,
    group: int,
    table: torch.Tensor,
    x: torch.Tensor,
    out: FrameOut,
    *,
    inputs: torch.Tensor | None = None,
    answer: PickState | None = None,
    suppress: torch.Tensor | None = None,
    last: bool = False,
) -> None:
    batch, size = logits.shape
    hidden = table.shape[1]
    fed = table if inputs is None else inputs
    check_picks(logits, rows, positions)
    assert answer is None or answer.seen.is_contiguous(), "one row of marks after the other"
    assert table.is_contiguous(), "one row of the table per code"
    assert fed.is_contiguous(), "and of the inputs'"
    assert x.stride(1) == out.total.stride(1) == out.codes.stride(1) == 1
    c = config("pick_code", (size,), {"warps": 4 if size <= 2048 else 8, "shortlist": 128})
    # The image of an unpenalised bfloat16 ends in 16 equal bits: search among the rest.
    shift = 16 if answer is None and logits.dtype == torch.bfloat16 else 0
    found = torch.empty(batch, 2, c["shortlist"], dtype=torch.int32, device=logits.device)
    _pick_code[(batch,)](
        logits, logits.stride(0), rows, positions, params.floats, params.ints,
        params.floats.shape[1],
        answer.seen.view(torch.uint8) if answer else None, answer.floor if answer else None,
        suppress.view(torch.uint8) if suppress is not None else None,
        group, out.codes, out.codes.stride(0), table, fed, x, x.stride(0), out.total,
        out.total.stride(0), found,
        END=answer.end if answer else -1, FIRST=answer is not None, LAST=last, SIZE=size,
        BLOCK=triton.next_power_of_2(size), GROUPS=out.codes.shape[1], HIDDEN=hidden,
        HIDDEN_BLOCK=triton.next_power_of_2(hidden), FED=0 if inputs is None else fed.shape[1],
        FED_BLOCK=triton.next_power_of_2(fed.shape[1]), SHIFT=shift, CAP=c["shortlist"],
        num_warps=c["warps"],
        **protocol(logits),
    )  # fmt: skip


def check_picks(logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
    assert logits.stride(1) == 1, logits.stride()
    assert rows.dtype == positions.dtype == torch.int64, (rows.dtype, positions.dtype)
    assert rows.is_contiguous(), rows.stride()
    assert positions.is_contiguous(), positions.stride()


@triton.jit
def _parameters(floats, ints, num_rows, row, PDL: tl.constexpr):
    """How a row is sampled. They are as old as the request, so they are read before the wait; all
    else may come from the kernel in front, so it is waited for here."""
    temperature = tl.load(floats + row)
    top_p = tl.load(floats + num_rows + row)
    penalty = tl.load(floats + 2 * num_rows + row)
    top_k = tl.load(ints + row)
    seed = tl.load(ints + num_rows + row)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    return temperature, top_p, penalty, top_k, seed


# Small vocabularies: one program per row holds all of it.


@triton.jit
def _shortlist(images, ids, kept, count, found, m, CAP: tl.constexpr):
    """Few images and their ids, in order, that the rest of the work be about them alone."""
    # As int64 on purpose: stores of int32 places make the compiler change the layout before the
    # sum, not after it.
    place = m * 2 * CAP + tl.cumsum(kept.to(tl.int32), 1) - 1
    tl.store(found + place, images, mask=kept)
    tl.store(found + CAP + place, ids, mask=kept)
    tl.debug_barrier()  # each thread reads what others wrote
    i = tl.arange(0, CAP)[None, :]
    there = i < count
    found += m * 2 * CAP
    return tl.load(found + i, mask=there, other=LOWEST - 1), tl.load(
        found + CAP + i, mask=there, other=LAST_ID
    )


@triton.jit
def _draw_held(images, ids, top, temperature, top_k, top_p, seed, draw, SHIFT: tl.constexpr):
    """The winner of a whole row, or of what of it can survive top_k."""
    best, heat = score(top), heat_of(temperature)
    p = tl.exp2((score(images) - best) * heat)
    coarse = images >> SHIFT
    low = tl.full((), LOWEST >> SHIFT, tl.int32)
    rest = tl.full((), 0.0, tl.float32)
    border, drop, _ = cut(coarse, p, top >> SHIFT, best, heat, top_k, top_p, low, rest, SHIFT, True)
    return winner_of(race(p, seed, draw, ids, survivors(coarse, border, drop, 0)), ids)


@triton.jit(do_not_specialize=["num_rows", "group"])
def _pick_code(
    logits, logits_stride, rows, positions, floats, ints, num_rows, seen, floor, suppress, group,
    codes, codes_stride, table, fed, x_out, x_stride, total, total_stride, found,
    END: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_BLOCK: tl.constexpr, FED: tl.constexpr,
    FED_BLOCK: tl.constexpr, SHIFT: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + m)
    position = tl.load(positions + m)
    ids = tl.arange(0, BLOCK)[None, :]
    temperature, top_p, penalty, top_k, seed = _parameters(floats, ints, num_rows, row, PDL)
    if FIRST:
        held = held_id(floor, row, position, END)
        x = scores(logits + m * logits_stride, seen + row * SIZE, penalty, held, ids, SIZE)
        forbidden = tl.load(suppress + ids, mask=ids < SIZE, other=0)
        # What is not a number stays, to be noticed.
        x = tl.where((forbidden != 0) & (tl.abs(x) < float("inf")), float("-inf"), x)
    else:
        x = tl.load(logits + m * logits_stride + ids, mask=ids < SIZE, other=float("-inf")).to(
            tl.float32
        )
    images = image(x)
    top = tl.max(images)
    bad = (top >= INFINITE) | (top < LOWEST)
    if (temperature > 0) & (top < INFINITE) & (top >= LOWEST):
        draw = (position + 1) * GROUPS + group
        k = tl.minimum(top_k, SIZE).to(tl.int32)
        coarse = images >> SHIFT
        border = tl.full((), LOWEST >> SHIFT, tl.int32)
        count = tl.full((), -1, tl.int32)
        if (k > 0) & (k <= CAP // 2):
            border, count = candidates(coarse, top >> SHIFT, k, CAP, SHIFT)
        if count >= k:
            few, few_ids = _shortlist(images, ids, coarse >= border, count, found, m, CAP)
            winner = _draw_held(few, few_ids, top, temperature, k, top_p, seed, draw, SHIFT)
        else:
            winner = _draw_held(images, ids, top, temperature, k, top_p, seed, draw, SHIFT)
    else:
        winner = winner_of(images, ids)
    code = tl.where(
        bad, 0, id_of(winner)
    )  # whatever came of bad numbers: it is looked up below, and must be there
    tl.store(codes + m * codes_stride + group, tl.where(bad, -1, code))
    if FIRST:
        tl.store(seen + row * SIZE + code, tl.full((), 1, tl.uint8))

    h = tl.arange(0, HIDDEN_BLOCK)
    inside = h < HIDDEN
    value = tl.load(table + code.to(tl.int64) * HIDDEN + h, mask=inside)
    sums = total + m * total_stride + h
    new = value.to(tl.float32)
    if not FIRST:
        new += tl.load(sums, mask=inside)
    if LAST:
        tl.store(x_out + row * x_stride + h, new.to(x_out.dtype.element_ty), mask=inside)
    else:
        if FED:  # the next input comes from a table of its own
            f = tl.arange(0, FED_BLOCK)
            next_input = tl.load(fed + code.to(tl.int64) * FED + f, mask=f < FED)
            tl.store(x_out + m * x_stride + f, next_input, mask=f < FED)
        else:
            tl.store(x_out + m * x_stride + h, value, mask=inside)
        tl.store(sums, new, mask=inside)


# Large vocabularies: blocks of a row leave candidates, then one program per row decides among them.


@triton.jit
def _truncates(top_k, top_p, SIZE: tl.constexpr):
    return ((top_k > 0) & (top_k < SIZE)) | (top_p < 1.0)


@triton.jit(do_not_specialize=["num_rows"])
def _search_blocks(
    logits, logits_stride, rows, positions, floats, ints, num_rows, seen, floor, found, about,
    END: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Of each block: its best image, how many candidates it has, the image they all reach, and (as
    bits, relative to its best) the mass of the others. A row that truncates nothing has one
    candidate per block."""
    m = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1)
    row = tl.load(rows + m)
    position = tl.load(positions + m)
    temperature, top_p, penalty, top_k, seed = _parameters(floats, ints, num_rows, row, PDL)
    ids = b * BLOCK + tl.arange(0, BLOCK)[None, :]
    held = held_id(floor, row, position, END)
    x = scores(logits + m * logits_stride, seen + row * SIZE, penalty, held, ids, SIZE)
    images = image(x)
    top = tl.max(images)
    best = score(top)
    fine = (top < INFINITE) & (top >= LOWEST)
    slot = m * tl.num_programs(1) + b
    slots = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    count = tl.full((), 1, tl.int32)
    border = tl.full((), LOWEST, tl.int32)
    rest = tl.full((), 0.0, tl.float32)
    if (temperature > 0) & fine & _truncates(top_k, top_p, SIZE):
        # The best of a row are mostly spread over its blocks: half of CAP is enough for a large
        # top_k as well.
        border, count = candidates(images, top, top_k, CAP, 0)
        kept = images >= border
        place = slot * CAP + tl.cumsum(kept.to(tl.int32), 1) - 1
        tl.store(found + place, images, mask=kept)
        tl.store(found + slots * CAP + place, ids, mask=kept)
        if (top_k == 0) | (top_k >= SIZE):
            rest = tl.sum(
                tl.where(kept, 0.0, tl.exp2((score(images) - best) * heat_of(temperature)))
            )
    else:
        keys = images
        if (temperature > 0) & fine:
            p = tl.exp2((score(images) - best) * heat_of(temperature))
            keys = race(p, seed, position + 1, ids, images >= LOWEST)
        id = id_of(winner_of(keys, ids))
        tl.store(found + slot * CAP, tl.max(tl.where(ids == id, images, -LAST_ID)))
        tl.store(found + (slots + slot) * CAP, id)
    tl.store(about + slot, top)
    tl.store(about + slots + slot, count)
    tl.store(about + 2 * slots + slot, border)
    tl.store(about + 3 * slots + slot, rest.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["num_rows"])
def _merge_blocks(
    logits, logits_stride, rows, positions, floats, ints, num_rows, seen, floor, found, about,
    tokens, next,
    END: tl.constexpr, SIZE: tl.constexpr, BLOCKS: tl.constexpr, CAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + m)
    position = tl.load(positions + m)
    temperature, top_p, penalty, top_k, seed = _parameters(floats, ints, num_rows, row, PDL)
    slots = tl.num_programs(0).to(tl.int64) * BLOCKS
    WIDTH: tl.constexpr = triton.next_power_of_2(BLOCKS)
    n = tl.arange(0, WIDTH)
    here = about + m * BLOCKS + n
    tops = tl.load(here, mask=n < BLOCKS, other=LOWEST - 1)
    low = tl.max(tl.load(here + 2 * slots, mask=n < BLOCKS, other=LOWEST), 0)
    rests = tl.load(here + 3 * slots, mask=n < BLOCKS, other=0).to(tl.float32, bitcast=True)
    top = tl.max(tops, 0)

    i = tl.arange(0, WIDTH * CAP)[None, :]
    counts = tl.load(about + slots + m * BLOCKS + i // CAP, mask=i < BLOCKS * CAP, other=0)
    there = i % CAP < counts
    images = tl.load(found + m * BLOCKS * CAP + i, mask=there, other=LOWEST - 1)
    ids = tl.load(found + (slots + m * BLOCKS) * CAP + i, mask=there, other=LAST_ID)

    fine = (top < INFINITE) & (top >= LOWEST)
    k = tl.where(top_k < SIZE, top_k, 0).to(tl.int32)
    winner = tl.full((), 0, tl.int64)
    if (temperature > 0) & fine:
        best, heat = score(top), heat_of(temperature)
        p = tl.exp2((score(images) - best) * heat)
        border = tl.full((), LOWEST, tl.int32)
        drop = tl.full((), 0, tl.int32)
        fits = fine
        if _truncates(top_k, top_p, SIZE):
            rest = tl.sum(tl.where(rests > 0, rests * tl.exp2((score(tops) - best) * heat), 0.0), 0)
            border, drop, fits = cut(images, p, top, best, heat, k, top_p, low, rest, 0, False)
        if fits:
            winner = winner_of(
                race(p, seed, position + 1, ids, survivors(images, border, drop, 0)), ids
            )
        else:
            held = held_id(floor, row, position, END)
            size = tl.full((), SIZE, tl.int32)  # a constant would get lost in the tuple
            whole = (logits + m * logits_stride, seen + row * SIZE, penalty, held, best, heat, size)
            winner = draw_read(whole, top, k, top_p, seed, position + 1)
    else:
        winner = winner_of(images, ids)
    token = tl.where(fine, id_of(winner), 0)  # the next step looks it up, and must find a word
    tl.store(tokens + m, tl.where(fine, token, -1))
    tl.store(next + row, token)
    tl.store(seen + row * SIZE + token, tl.full((), 1, tl.uint8))
