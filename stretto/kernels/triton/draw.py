"""What sampling kernels are made of: images of scores, noise, and the search for what survives
top_k and top_p.

Nothing is sorted. A score is compared as its image, an integer that rises with it; the top_k-th
score and the border of top_p are found by a search over images, some pivots per round, each round
counting (or summing) what lies above every pivot at once. Tensors over a vocabulary are [1, ids],
so that comparing them with pivots [pivots, 1] needs no other layout (and no trip through shared
memory). Device functions only, for the kernels of `sampling`."""

from __future__ import annotations

import triton
import triton.language as tl

PIVOTS = tl.constexpr(4)  # per search round
LOWEST = tl.constexpr(-2139095040)  # image of the smallest number: -inf lies just below
INFINITE = tl.constexpr(0x7F800000)  # image of +inf: it and NaN are bad
LAST_ID = tl.constexpr(0x7FFFFFFF)
CHUNK = tl.constexpr(4096)  # ids read at once in a pass over a whole row


@triton.jit
def image(x):
    """int32 that rises with x; -0 and 0 are the same, NaN is above everything."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, LAST_ID, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def score(images):
    return (images ^ ((images >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def held_id(floor, row, position, END: tl.constexpr):
    """The id that must not come yet, or -1."""
    return tl.where(position + 1 < tl.load(floor + row), END, -1)


@triton.jit
def scores(logits, seen, penalty, held, ids, SIZE):
    """Scores of some ids of a row, as far as they come before the temperature."""
    x = tl.load(logits + ids, mask=ids < SIZE, other=float("-inf")).to(tl.float32)
    x = tl.where(ids == held, float("-inf"), x)
    if penalty != 1.0:
        known = tl.load(seen + ids, mask=ids < SIZE, other=0)
        x = tl.where(known != 0, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty)), x)
    return x


# Drawing.


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise(seed, draw, ids):
    """The reference's `counter_noise`, bit for bit up to the logarithm."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    start = _mix(_mix(seed.to(tl.uint64)) + draw.to(tl.uint64) * golden)
    bits = _mix(start + ids.to(tl.uint64) * golden)
    uniform = ((bits >> 40).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 16777216)
    return -tl.log(tl.minimum(uniform, 1.0 - 1.0 / 16777216))


@triton.jit
def heat_of(temperature):
    """What a difference of scores is multiplied with to be a power of two. Finite, that 0 times it
    is 0."""
    return tl.minimum(1.4426950408889634 / temperature, 3.0e38)


@triton.jit
def race(p, seed, draw, ids, kept):
    """Keys whose highest wins the draw: p over exponential noise, as bits (they rise with a number
    above 0)."""
    ratio = p / _noise(seed, draw, ids)
    return tl.where(kept, ratio.to(tl.int32, bitcast=True), -1)


@triton.jit
def winner_of(keys, ids):
    """Key and id, in one number, of the highest key, at the first id that has it."""
    return tl.max((keys.to(tl.int64) << 32) | (ids ^ LAST_ID).to(tl.int64))


@triton.jit
def id_of(winner):
    return (winner & LAST_ID).to(tl.int32) ^ LAST_ID


# Searches. `source` is where images (and masses) are: held in registers, or to be read from memory
# chunk by chunk.


@triton.jit
def _pivots(low, high):
    """Points that cut (low, high] in equal parts (some may lie beyond), as int64, and their
    distance."""
    step = ((high - low).to(tl.uint32) // (PIVOTS + 1)).to(tl.int64) + 1
    return low + (tl.arange(0, PIVOTS).to(tl.int64) + 1) * step, step


@triton.jit
def narrow(at):
    return tl.minimum(at, LAST_ID).to(tl.int32)


@triton.jit
def _count_held(source, at):
    """How many images reach each pivot."""
    return tl.sum((source[0] >= at[:, None]).to(tl.int32), 1)


@triton.jit
def _mass_held(source, at):
    """The mass below each pivot."""
    return tl.sum(tl.where(source[0] < at[:, None], source[1], 0.0), 1)


@triton.jit
def _at(count: tl.constexpr, source, at):
    return tl.max(count(source, tl.full((1,), 0, tl.int32) + narrow(at)), 0)


@triton.jit
def _kth(count: tl.constexpr, source, k, low, top, SHIFT: tl.constexpr):
    """A border above which are the k highest images (and what ties with the last), and how many
    reach it.

    It lies in [low, top]; if fewer than k reach low, it is low."""
    high = top
    span = tl.full((), 1 << (24 - SHIFT), tl.int64)  # two octaves below the best one: mostly enough
    border = tl.maximum(high - span, low)
    reach = _at(count, source, border)
    while (reach < k) & (border > low):
        high = border - 1
        span = span * 16
        border = tl.maximum(high - span, low)
        reach = _at(count, source, border)
    while (border < high) & (reach > k):
        at, step = _pivots(border, high)
        counts = count(source, narrow(at))
        up = tl.sum((counts >= k).to(tl.int64), 0)
        reach = tl.min(tl.where(counts >= k, counts, reach), 0)
        high = tl.minimum(high, border + (up + 1) * step - 1)
        border = border + up * step
    return border, reach


@triton.jit
def _border_of(mass: tl.constexpr, source, rest, below, limit, low, high):
    """The highest border in [low, high] that at most `limit` of the mass lies below, and that mass
    (`below` at low). `rest` is mass below them all that the source does not have."""
    while low < high:
        at, step = _pivots(low, high)
        sums = rest + mass(source, narrow(at))
        light = (sums <= limit) & (at <= high)
        below = tl.max(tl.where(light, sums, below), 0)
        up = tl.sum(light.to(tl.int64), 0)
        high = tl.minimum(high, low + (up + 1) * step - 1)
        low = low + up * step
    return low, below


@triton.jit
def candidates(images, top, top_k, CAP: tl.constexpr, SHIFT: tl.constexpr):
    """A border that at most CAP images reach, and (unless ties forbid) top_k of them or, if that is
    too much, half of CAP. And how many reach it."""
    wanted = tl.where((top_k > 0) & (top_k <= CAP), top_k, CAP // 2).to(tl.int32)
    high = (
        top.to(tl.int64) + 1
    )  # reached by `reach`, at most CAP; `low` is reached by more, or the lowest of all
    reach = tl.full((), 0, tl.int32)
    span = tl.full((), 1 << (23 - SHIFT), tl.int64)  # one octave
    low = high
    while (low == high) & (high > (LOWEST >> SHIFT)) & (reach < wanted):
        low = tl.maximum(high - span, LOWEST >> SHIFT)
        span = span * 4
        counted = _at(_count_held, (images,), low)
        if counted <= CAP:
            high = low
            reach = counted
    while (low + 1 < high) & (reach < wanted):
        at, step = _pivots(low, high - 1)
        counts = _count_held((images,), narrow(at))
        full = counts > CAP
        up = tl.sum(full.to(tl.int64), 0)
        reach = tl.maximum(reach, tl.max(tl.where(full, 0, counts), 0))
        high = tl.minimum(high, low + (up + 1) * step)
        low = low + up * step
    return narrow(high), reach


@triton.jit
def cut(
    images, p, top, best, heat, top_k, top_p, low, rest, SHIFT: tl.constexpr, WHOLE: tl.constexpr
):
    """What survives top_k and top_p, among images held in registers with masses p: those above a
    border, and those at it but for the first `drop`. If these are not a WHOLE row, the others are
    all below `low`, with mass `rest`; the last value says whether they can be left out."""
    border = low.to(tl.int64)
    base = tl.full((), LOWEST >> SHIFT, tl.int32)
    drop = tl.full((), 0, tl.int32)
    fits = top_k >= 0
    if top_k > 0:
        border, reach = _kth(_count_held, (images,), top_k, border, top.to(tl.int64), SHIFT)
        base = narrow(border)
        rest = rest * 0.0
        if not WHOLE:
            fits = (reach >= top_k) | (low <= LOWEST)
    if (top_p < 1.0) & fits:
        mass = tl.where(images >= base, p, 0.0)
        limit = (1.0 - top_p) * (rest + tl.sum(mass))
        below = tl.full((), 0.0, tl.float32)
        if not WHOLE:
            below = rest + tl.sum(tl.where(images < narrow(border), mass, 0.0))
            fits = below <= limit
        if fits:
            border, below = _border_of(
                _mass_held, (images, mass), rest, below, limit, border, top.to(tl.int64)
            )
            drop = _num_dropped(narrow(border), best, heat, limit - below, SHIFT)
            if drop > 0:
                drop = tl.minimum(drop, tl.sum((images == narrow(border)).to(tl.int32)) - 1)
    return narrow(border), drop, fits


@triton.jit
def _num_dropped(border, best, heat, spare, SHIFT: tl.constexpr):
    """Ties at the border go one by one, the first first, while the mass allows. One must stay: to
    be seen to."""
    whole = (border << SHIFT) | ((border >> 31) & ((1 << SHIFT) - 1))
    each = tl.exp2((score(whole) - best) * heat)
    return tl.minimum(spare / tl.maximum(each, 1e-30), 1e9).to(tl.int32)


@triton.jit
def survivors(images, border, drop, before):
    """Which images survive a cut; `before` ties came earlier."""
    kept = images >= border
    if drop > before:
        ties = (images == border).to(tl.int32)
        kept = kept & ((ties == 0) | (before + tl.cumsum(ties, 1) > drop))
    return kept


# A whole row, read chunk by chunk.


@triton.jit
def _read(row, start):
    """Ids, scores and images of a chunk of a row."""
    ids = start + tl.arange(0, CHUNK)[None, :]
    x = scores(row[0], row[1], row[2], row[3], ids, row[6])
    return ids, x, image(x)


@triton.jit
def _count_read(row, at):
    counts = tl.zeros_like(at)
    for start in range(0, row[6], CHUNK):
        _, _, images = _read(row, start)
        counts += _count_held((images,), at)
    return counts


@triton.jit
def _mass_read(source, at):
    mass = tl.zeros_like(at).to(tl.float32)
    for start in range(0, source[0][6], CHUNK):
        _, x, images = _read(source[0], start)
        p = tl.where(images >= source[1], tl.exp2((x - source[0][4]) * source[0][5]), 0.0)
        mass += _mass_held((images, p), at)
    return mass


@triton.jit
def draw_read(row, top, top_k, top_p, seed, draw):
    """The winner of a row of any shape, in some passes over all of it: for the rare row of which
    more survives than the blocks' candidates. `row`: logits, seen, penalty, held id, best score,
    heat, vocabulary size."""
    border = tl.full((), LOWEST, tl.int64)
    high = top.to(tl.int64)
    drop = tl.full((), 0, tl.int32)
    if top_k > 0:
        border, _ = _kth(_count_read, row, top_k, border, high, 0)
    if top_p < 1.0:
        base = narrow(border)
        limit = (1.0 - top_p) * _at(_mass_read, (row, base), high + 1)
        nothing = tl.full((), 0.0, tl.float32)
        border, below = _border_of(_mass_read, (row, base), nothing, nothing, limit, border, high)
        drop = _num_dropped(narrow(border), row[4], row[5], limit - below, 0)
        if drop > 0:
            drop = tl.minimum(
                drop, _at(_count_read, row, border) - _at(_count_read, row, border + 1) - 1
            )
    winner = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
    ties = tl.full((), 0, tl.int32)
    for start in range(0, row[6], CHUNK):
        ids, x, images = _read(row, start)
        p = tl.exp2((x - row[4]) * row[5])
        kept = survivors(images, narrow(border), drop, ties)
        winner = tl.maximum(winner, winner_of(race(p, seed, draw, ids, kept), ids))
        ties += tl.sum((images == narrow(border)).to(tl.int32))
    return winner
