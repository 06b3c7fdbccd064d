"""What the trace of a served load says: how long steps take when nothing runs beside them, and how fast they are beside
the steps of the other stages, of what they are alone. Used by `bench/plan/inputs.py`, which keeps just that.

A step that runs beside others gets on at a share of its speed. How long it ran beside what is in the trace, and what it
takes alone is known, so the shares are those with which all steps of a size come out at that: least squares. They are
told by the sizes of both steps, in bins of powers of two."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from stretto.planner.table import BINS, at, bin_of

LANES = {"thinker": "text", "talker": "frames", "code2wav": "vocoder"}
OTHER = {"text": "frames", "frames": "text"}
PROMPT = len(BINS)  # in place of a bin: a step that holds prompts
WHOLE, LITTLE = 0.999, 0.02  # of a step: all of it, next to nothing of it
FEW = 3  # steps say nothing yet
FAR = 0.15  # steps that come out farther off are left out: something else has held them up
CHUNK, NEAR_S = 1024, 0.12  # tokens of prompts in a step at most while others are answered; steps of one burst
PROMPT_TOKENS, OPENING = 108, 7  # of a request, and the rows of frames that follow before the first token of text

Seconds = dict[tuple[int | None, int | None], float]


@dataclass(slots=True)
class Ran:
    """A step, and how long it ran beside which size of the other stage's step and of the vocoder's."""

    lane: str
    prompt: bool
    rows: int
    start: float
    ms: float
    run: Mapping[str, Any] | None = None
    beside: Seconds = field(default_factory=lambda: defaultdict(float))

    @property
    def size(self) -> int:
        return PROMPT if self.prompt else bin_of(self.rows)

    def times(self, unit_ms: float, others: Container[int]) -> dict[int, float]:
        """How long it ran beside each of these."""
        found: dict[int, float] = defaultdict(float)
        for (other, _), ms in self.beside.items():
            if other is not None and other in others:
                found[other] += ms / unit_ms
        return found

    def part(self, of: Callable[[int | None, int | None], bool]) -> float:
        """Of its time, with those beside it."""
        return sum(t for key, t in self.beside.items() if of(*key)) / self.ms


def read_trace(result: Mapping[str, Any]) -> list[Ran]:
    """The steps that ran while requests of the result's runs were answered."""
    steps = [Ran(LANES[s[0]], s[1] != "decode", s[2], s[3], 1e3 * s[4]) for s in result["steps"] if s[4] > 0]
    overlaps(steps)
    for part in result["parts"].values():
        for run in part["found"]:
            end = run["began"] + max(s["sent"] + s["end"] for s in run["samples"])
            for step in steps:
                if run["began"] <= step.start <= end:
                    step.run = run
    return [step for step in steps if step.run is not None]


def overlaps(steps: Sequence[Ran]) -> None:
    """Fill in what ran beside what. A stage's steps run one after the other."""
    edges = [(s.start, 1, i) for i, s in enumerate(steps)] + [(s.start + s.ms / 1e3, 0, i) for i, s in enumerate(steps)]
    now: dict[str, Ran | None] = {"text": None, "frames": None, "vocoder": None}
    last = -math.inf
    for when, begins, i in sorted(edges):
        for lane, step in now.items():
            if step is not None and when > last:
                other = now[OTHER[lane]] if lane in OTHER else now["text"] or now["frames"]
                call = now["vocoder"]
                key = (None if other is None else other.size, None if call is None else call.size)
                step.beside[key] += 1e3 * (when - last)
        last = when
        step = steps[i]
        if begins:
            now[step.lane] = step
        elif now[step.lane] is step:
            now[step.lane] = None


def alone_ms(steps: Iterable[Ran]) -> list[tuple[int, float, int]]:
    """Rows, the median of decode steps beside which nothing ran, and how many there were."""
    by: dict[int, list[float]] = defaultdict(list)
    for s in steps:
        if not s.prompt and s.part(lambda other, call: other is None and call is None) >= WHOLE:
            by[s.rows].append(s.ms)
    return [(rows, round(statistics.median(ms), 4), len(ms)) for rows, ms in sorted(by.items()) if len(ms) >= FEW]


def least_squares(rows: Sequence[Mapping[int, float]], wanted: Sequence[float]) -> dict[int, float]:
    """The shares by which the times of each row add up to what is wanted, as shares of it too."""
    keys = sorted({key for row in rows for key in row})
    x, y = np.array([[row.get(key, 0.0) for key in keys] for row in rows]), np.array(wanted)
    kept = np.ones(len(y), bool)
    for _ in range(4):
        found = np.linalg.lstsq(x[kept], y[kept], rcond=None)[0]
        kept = np.abs(x @ found - y) < FAR
    return {key: float(share) for key, share in zip(keys, found, strict=True)}


def decode_shares(steps: Sequence[Ran], alone: Callable[[int], float]) -> list[tuple[int, int, float, int]]:
    """Of decode steps beside the other stage's, where the vocoder has little to do with it: the bin of their rows, that
    of the other's (or PROMPT), the share, and how many steps' time there was."""
    found = []
    for size in range(len(BINS)):
        own = [s for s in steps if s.size == size and s.part(lambda _, call: call is not None) < LITTLE]
        times: dict[int, float] = defaultdict(float)
        for s in own:
            for (other, _), ms in s.beside.items():
                if other is not None:
                    times[other] += ms / alone(s.rows)
        known = {other for other, count in times.items() if count >= 10 and count >= 0.005 * len(own)}
        unknown = set(times) - known
        own = [s for s in own if s.part(lambda other, _, unknown=unknown: other in unknown) < LITTLE]
        rows = [s.times(alone(s.rows), known) for s in own]
        rest = [1 - s.part(lambda other, _: other is None) * s.ms / alone(s.rows) for s in own]
        if own and known:
            shares = least_squares(rows, rest)
            found += [(size, other, round(share, 3), round(times[other])) for other, share in shares.items()]
    return found


Share = Callable[[int, int], float]
"""Of a step of a bin, beside one of the other stage of another."""


def vocoder_shares(steps: Sequence[Ran], alone: Callable[[int], float], share: Share) -> dict[int, float]:
    """How much slower yet decode steps are while a call of the vocoder runs, by the bin of its streams."""
    rows, rest = [], []
    for s in steps:
        if s.prompt or s.part(lambda _, call: call is not None) < 5 * LITTLE:
            continue
        row: dict[int, float] = defaultdict(float)
        done = 0.0
        for (other, call), ms in s.beside.items():
            got = ms / alone(s.rows) * (1.0 if other is None else share(s.size, other))
            if call is None:
                done += got
            else:
                row[call] += got
        rows.append(row)
        rest.append(1 - done)
    return {call: round(min(1.0, max(0.02, found)), 3) for call, found in least_squares(rows, rest).items()}


def prompt_shares(own: Sequence[tuple[Ran, int]], slowed: Mapping[int, float]) -> tuple[float, float, dict[int, float]]:
    """Of steps that hold prompts, with the rows that decode in each: milliseconds alone, more for each of those rows,
    and the share beside frames, by the bin of their rows (or PROMPT)."""
    times: dict[int, float] = defaultdict(float)
    for s, _ in own:
        for (other, _), ms in s.beside.items():
            if other is not None:
                times[other] += ms
    keys = sorted(times)
    x, y = [], []
    for s, decodes in own:
        row: dict[int | None, float] = defaultdict(float)
        for (other, call), ms in s.beside.items():
            row[other] += ms * (1.0 if call is None else slowed.get(call, 1.0))
        x.append([1.0, float(decodes), *(-row[key] for key in keys)])
        y.append(row[None])
    a, b = np.array(x), np.array(y)
    kept = np.ones(len(b), bool)
    for _ in range(4):
        found = np.linalg.lstsq(a[kept], b[kept], rcond=None)[0]
        kept = np.abs(a @ found - b) < 2.0
    shares = {key: round(float(share), 3) for key, share in zip(keys, found[2:], strict=True) if times[key] >= 100}
    return float(found[0]), float(found[1]), shares


def full_steps(steps: Iterable[Ran]) -> list[tuple[Ran, int]]:
    """Steps that hold as many tokens of prompts as one may: in the middle of a burst, where each step has as many
    requests more than the one before it as fit. With the rows that decode: those that were there before."""
    fit = CHUNK // PROMPT_TOKENS
    ordered = sorted((s for s in steps if s.prompt and s.run and s.run["rate"] is None), key=lambda s: s.start)
    near = [(a, b) for a, b in pairwise(ordered) if a.run is b.run and b.start - a.start < NEAR_S]
    return [(b, a.rows) for a, b in near if fit <= b.rows - a.rows <= fit + 1]


def is_lone(step: Ran, tokens: int) -> bool:
    """Whether a step that holds prompts can hold but one, and of so many tokens: few came at once then."""
    run = step.run
    assert run is not None
    if run["samples"][0]["prompt_tokens"] != tokens:
        return False
    return run["rate"] is not None or (run["streams"] <= 2 and step.rows <= run["streams"])


def vocoder_own(calls: Sequence[Ran], shapes: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """How fast the vocoder's calls are beside anything, by the streams that they are padded to. A trace does not say
    how many frames a call has: that of the captured shapes is taken which fits best."""
    found: dict[int, float] = {}
    least = 1
    for width, known in shapes.items():
        own = [s for s in calls if least <= s.rows <= width]
        beside = [s.part(lambda other, _: other is not None) for s in own]
        share = 0.6
        for _ in range(50):
            got = [s.ms * (1 - part + share * part) for s, part in zip(own, beside, strict=True)]
            alone = [min(known, key=lambda ms, g=g: abs(math.log(g / ms))) for g in got]
            rows = [{0: part * s.ms / ms} for s, part, ms in zip(own, beside, alone, strict=True)]
            rest = [1 - (1 - part) * s.ms / ms for s, part, ms in zip(own, beside, alone, strict=True)]
            share = least_squares(rows, rest)[0]
        found[width], least = round(share, 3), width + 1
    return found


def frames_prompt_share(steps: Iterable[Ran], alone: float) -> float:
    """How fast a step with one prompt of frames is beside one of text."""
    lone = [s for s in steps if s.prompt and s.rows == 1 and is_lone(s, PROMPT_TOKENS)]
    return round(alone / statistics.median(s.ms for s in lone if s.beside.get((PROMPT, None), 0.0) >= WHOLE * s.ms), 3)


def filled(shares: Sequence[tuple[int, int, float, int]]) -> Share:
    """A share for each pair of bins: where there is none, that of the nearest size of its own."""
    known = {(own, other): share for own, other, share, _ in shares}

    def share(own: int, other: int) -> float:
        near = [(abs(o - own), o) for o, x in known if x == other]
        if near:
            return known[min(near)[1], other]
        near = [(abs(x - other), x) for o, x in known if x != PROMPT]
        return share(own, min(near)[1])

    return share


def reduced(result: Mapping[str, Any], shapes: Mapping[int, Sequence[float]], talker_ms: float) -> dict[str, Any]:
    """All of it. `talker_ms`: what a lone prompt of frames takes by itself."""
    steps = read_trace(result)
    usual = [s for s in steps if s.run is not None and s.run["workload"] == "text-100"]
    found: dict[str, Any] = {"bins": list(BINS), "alone": {}, "shares": {}, "beside_vocoder": {}}
    for lane in OTHER:
        own = [s for s in usual if s.lane == lane]
        curve = alone_ms(own)
        points = [(float(rows), ms) for rows, ms, _ in curve]

        def alone(rows: int, points: list[tuple[float, float]] = points) -> float:
            return at(points, rows)

        shares = decode_shares([s for s in own if not s.prompt], alone)
        found["alone"][lane], found["shares"][lane] = curve, shares
        found["beside_vocoder"][lane] = vocoder_shares(own, alone, filled(shares))
    text = [s for s in steps if s.lane == "text"]
    usual_text = [s for s in usual if s.lane == "text"]
    slowed = found["beside_vocoder"]["text"]
    one = [(s, s.rows - 1) for s in text if s.prompt and is_lone(s, PROMPT_TOKENS)]
    *lone, few = prompt_shares(one, slowed)
    *full, many = prompt_shares(full_steps(usual_text), slowed)
    beside = many | few
    long = [s for s in text if s.prompt and s.run is not None and s.run["workload"] == "text-2000"]
    [tokens] = {s.run["samples"][0]["prompt_tokens"] for s in long if s.run is not None}
    alone_long = [sum(t * (1.0 if o is None else beside[o]) for (o, _), t in s.beside.items()) for s in long]
    known = ((PROMPT_TOKENS, lone, 0), (PROMPT_TOKENS, lone, 20), (CHUNK, full, 0), (CHUNK, full, 100))
    points = [(size + rows, round(ms + rows * row_ms, 3)) for size, (ms, row_ms), rows in known]
    found["prompt"] = [*points, (tokens, round(statistics.median(alone_long), 3))]
    found["prompt_shares"] = beside
    found["frames_prompt"] = frames_prompt_share([s for s in steps if s.lane == "frames"], talker_ms)
    found["vocoder"] = vocoder_own([s for s in usual if s.lane == "vocoder"], shapes)
    return found
