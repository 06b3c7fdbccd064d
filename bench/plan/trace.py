"""What the trace of a served load says: how long steps take when nothing runs beside them, how fast they are beside the
steps of the other stages, and what the host's thread needs for them. Used by `bench/plan/inputs.py`, which keeps just
that.

A step that runs beside others gets on at a share of its speed. How long it ran beside what is in the trace, so the
shares are those with which all steps of a size come out at what they take alone: least squares. They are told by the
sizes of both steps, in bins of powers of two; those of prompts by the captured pass too, and calls of the vocoder by
the shapes that are captured."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.plan.runs import FRAME_S, OPENING_S
from stretto.planner.lanes import up
from stretto.planner.table import BINS, SMALL, Curve, at, bin_of

LANES = {"thinker": "text", "talker": "frames", "code2wav": "vocoder"}
STAGES = {lane: stage for stage, lane in LANES.items()}
OTHER = {"text": "frames", "frames": "text"}
PROMPT = len(BINS)  # in place of a bin: a step that holds prompts
WHOLE, LITTLE = 0.999, 0.02  # of a step: all of it, next to nothing of it
FEW = 3  # steps say nothing yet
FAR = 0.15  # steps that come out farther off are left out: something else has held them up
FAR_PROMPT = 0.25
LEAST, MOST = 0.02, 1.0  # shares
PROMPT_TOKENS = 108  # of a request
NEXT_S = 0.0001  # of two admissions, the second follows the first at once
QUANTILES, VARIED = 200, 4  # of what varies; without prompts, in steps of so many rows or more
AWAKE_MS = 5.0  # between two things that the loop does, if it did not sleep
CLEAR_MS, FAR_MS, CROWD = 0.5, 0.6, 64
"""Packets of a call came so long before the next one's; by so much off, something else was in their way; in runs of so
many listeners at most."""

Seconds = dict[tuple[int | None, int | None], float]
Loop = Sequence[tuple[str, float, float]]
"""What the host's thread did: what, when and for how many seconds."""
Shapes = Sequence[tuple[int, int]]
"""Of the vocoder's calls that are captured: streams and frames, by size."""


@dataclass(slots=True)
class Ran:
    """A step, and how long it ran beside which size of the other stage's step and which shape of the vocoder's."""

    lane: str
    prompt: bool
    rows: int
    tokens: int  # of a call of the vocoder: frames of a stream
    start: float
    ms: float
    size: int = 0  # the bin of its rows, or PROMPT; of a call of the vocoder: its shape
    run: Mapping[str, Any] | None = None
    beside: Seconds = field(default_factory=lambda: defaultdict(float))
    launch_ms: float = 0.0  # of the host's thread
    retire_ms: float = 0.0
    noticed_s: float = 0.0  # when it began with that, after the step's end

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

    @property
    def prompts(self) -> int:
        """Requests whose prompts it holds, if all are of the usual length and none is cut."""
        rows = self.tokens - self.rows
        return min(self.rows, max(1, round(rows / (PROMPT_TOKENS - 1)))) if self.lane == "text" else self.rows

    def decoding(self, curve: Curve) -> float:
        """What the rows count for that decode beside its prompts."""
        return at(curve, self.rows - self.prompts) if self.rows > self.prompts else 0.0


def traced_steps(result: Mapping[str, Any], shapes: Shapes) -> list[Ran]:
    """All of them, with what the host's thread did for each."""
    steps = [
        Ran(LANES[stage], kind != "decode", rows, tokens, start, 1e3 * seconds)
        for stage, kind, rows, tokens, start, seconds in result["steps"]
    ]
    for step in steps:
        if step.lane == "vocoder":
            step.size = shapes.index(shape_of(shapes, step.rows, step.tokens))
        else:
            step.size = PROMPT if step.prompt else bin_of(step.rows)
    of_the_loop(steps, result["loop"])
    return steps


def answering(steps: Sequence[Ran], parts: Mapping[str, Any]) -> list[Ran]:
    """Those that ran while requests of a run were answered, with the run and with what ran beside them."""
    steps = [step for step in steps if step.ms > 0]
    overlaps(steps)
    for part in parts.values():
        for run in part["found"]:
            end = run["began"] + max(s["sent"] + s["end"] for s in run["samples"])
            for step in steps:
                if run["began"] <= step.start <= end:
                    step.run = run
    return [step for step in steps if step.run is not None]


def shape_of(shapes: Shapes, streams: int, frames: int) -> tuple[int, int]:
    """That a call runs in."""
    width = up(sorted({n for n, _ in shapes}), streams)
    return width, up(sorted(f for n, f in shapes if n == width), frames)


def of_the_loop(steps: Sequence[Ran], loop: Loop) -> None:
    """Fill in what the host's thread did for each step. A stage's steps are launched and retired in their order."""
    for stage, lane in LANES.items():
        own = sorted((s for s in steps if s.lane == lane), key=lambda s: s.start)
        launches, retired = (
            sorted((start, seconds) for name, start, seconds in loop if name == f"{what} {stage}")
            for what in ("launch", "retire")
        )
        for step, launch, retire in zip(own, launches, retired, strict=True):
            step.launch_ms, step.retire_ms = 1e3 * launch[1], 1e3 * retire[1]
            step.noticed_s = retire[0] - step.start - step.ms / 1e3


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


# ---- steps that decode


def alone_ms(steps: Iterable[Ran]) -> list[tuple[int, float, int]]:
    """Rows, the median of decode steps beside which nothing ran, and how many there were."""
    by: dict[int, list[float]] = defaultdict(list)
    for s in steps:
        if not s.prompt and s.part(lambda other, call: other is None and call is None) >= WHOLE:
            by[s.rows].append(s.ms)
    return [(rows, round(statistics.median(ms), 4), len(ms)) for rows, ms in sorted(by.items()) if len(ms) >= FEW]


Row = Mapping[Any, float]


def least_squares(rows: Sequence[Row], wanted: Sequence[float], far: float = FAR) -> dict[Any, float]:
    """The factors by which the parts of each row add up to what is wanted of it, without those rows that come out
    farther off. None is less than the least share."""
    keys = sorted({key for row in rows for key in row}, key=str)
    x, y = np.array([[row.get(key, 0.0) for key in keys] for row in rows]), np.array(wanted)
    kept, free = np.ones(len(y), bool), np.ones(len(keys), bool)
    found = np.zeros(len(keys))
    for i in range(4 + len(keys)):
        least = np.where(free, 0.0, LEAST)
        found = least.copy()
        found[free] = np.linalg.lstsq(x[kept][:, free], (y - x @ least)[kept], rcond=None)[0]
        if i >= 4:  # what is left out has settled
            if found.min() >= LEAST:
                break
            free[found.argmin()] = False
        else:
            kept = np.abs(x @ found - y) < far
    return {key: float(factor) for key, factor in zip(keys, found, strict=True)}


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


# ---- beside the vocoder


def vocoder_shares(steps: Sequence[Ran], alone: Callable[[int], float], share: Share) -> dict[int, float]:
    """How much slower yet decode steps are while a call of the vocoder runs, by its shape."""
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
    return {call: round(min(MOST, found), 3) for call, found in least_squares(rows, rest).items()}


def vocoder_beside(calls: Sequence[Ran]) -> dict[int, float]:
    """What calls of each shape take beside steps of others, the median in milliseconds."""
    by: dict[int, list[float]] = defaultdict(list)
    for s in calls:
        if s.part(lambda other, _: other is not None) >= 1 - LITTLE:
            by[s.size].append(s.ms)
    return {shape: round(statistics.median(ms), 4) for shape, ms in by.items() if len(ms) >= FEW}


# ---- prompts


def prompt_shares(
    own: Sequence[Ran], passes: Sequence[int], slowed: Mapping[int, float]
) -> tuple[dict[int, float], dict[bool, dict[int, float]]]:
    """Of steps that hold prompts: milliseconds alone, by the captured pass, and the share beside frames, by whether the
    pass is small and by the bin of their rows (or PROMPT)."""
    rows, rest = [], []
    for s in own:
        row: dict[tuple[str, int, int], float] = {("alone", up(passes, s.tokens), 0): -1 / s.ms}
        done = 0.0
        for (other, call), ms in s.beside.items():
            got = ms / s.ms * (1.0 if call is None else slowed.get(call, MOST))
            if other is None:
                done += got
            else:
                key = ("share", s.tokens <= SMALL, other)
                row[key] = row.get(key, 0.0) + got
        rows.append(row)
        rest.append(-done)
    found = least_squares(rows, rest, FAR_PROMPT)
    counted = {key: sum(key in row for row in rows) for key in found}
    alone = {size: ms for (what, size, _), ms in found.items() if what == "alone" and counted[what, size, 0] >= FEW}
    shares: dict[bool, dict[int, float]] = {True: {}, False: {}}
    for (what, small, other), share in found.items():
        if what == "share" and counted[what, small, other] >= FEW:
            shares[bool(small)][other] = round(min(MOST, share), 3)
    return {size: round(ms, 3) for size, ms in sorted(alone.items())}, shares


def frames_prompt_share(steps: Iterable[Ran], alone: Callable[[int], float]) -> float:
    """How fast steps with prompts of frames are beside those of text."""
    beside = [s for s in steps if s.prompt and s.part(lambda other, _: other is not None) >= 1 - LITTLE]
    return round(statistics.median(alone(s.tokens) / s.ms for s in beside), 3)


# ---- the host's thread, and the server's


def by_size(points: Iterable[tuple[int, float]], middle: Callable[[Iterable[float]], float] = statistics.mean) -> Curve:
    """By bins of sizes: the mean size, and the mean (or another middle) of what was found."""
    bins: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for size, ms in points:
        bins[bin_of(size)].append((size, ms))
    means = ((statistics.mean(n for n, _ in some), middle(ms for _, ms in some)) for some in bins.values())
    return [(round(n, 2), round(ms, 4)) for n, ms in sorted(means)]


def host_ms(steps: Sequence[Ran]) -> dict[str, Curve]:
    """Of one stage: what the thread needs to launch a step and to pass on what came of it, by its rows, and what more
    where it holds prompts, by the requests that these are of."""
    decodes, prompts = ([s for s in steps if s.prompt == holds] for holds in (False, True))
    launch = by_size((s.rows, s.launch_ms) for s in decodes)
    retire = by_size((s.rows, s.retire_ms) for s in decodes)
    found = {"launch": launch, "retire": retire}
    if prompts:
        found["launch_prompts"] = by_size((s.prompts, s.launch_ms - s.decoding(launch)) for s in prompts)
        found["retire_prompts"] = by_size((s.prompts, s.retire_ms - s.decoding(retire)) for s in prompts)
    return found


def varies(steps: Sequence[Ran], curves: Mapping[str, Mapping[str, Curve]], prompts: bool) -> list[float]:
    """How much what the thread needs for a step varies, with prompts (to launch it) or without: quantiles of what it
    was over what it is on average."""
    ratios = []
    for s in steps:
        own = curves[s.lane]
        if s.prompt and prompts:
            ratios.append(s.launch_ms / (s.decoding(own["launch"]) + at(own["launch_prompts"], s.prompts)))
        elif not s.prompt and not prompts and s.rows >= VARIED:
            ratios += [s.launch_ms / at(own["launch"], s.rows), s.retire_ms / at(own["retire"], s.rows)]
    found = [float(np.quantile(ratios, (i + 0.5) / QUANTILES)) for i in range(QUANTILES)]
    mean = statistics.mean(found)
    return [round(ratio / mean, 3) for ratio in found]


def between_ms(steps: Sequence[Ran], loop: Loop) -> dict[str, Curve]:
    """Of the same, what nothing is written down for: to hand frames to the vocoder, between a turn of the stage that
    makes them and the call that sounds them, and packets to the server, between a call's end and the next launch. By
    the streams of that call; the medians."""
    calls = [s.rows for s in sorted((s for s in steps if s.lane == "vocoder"), key=lambda s: s.start)]
    frames, vocoder = STAGES["frames"], STAGES["vocoder"]
    numbers = {f"launch {vocoder}": iter(calls), f"retire {vocoder}": iter(calls)}
    found: dict[str, list[tuple[int, float]]] = {"send": [], "push": []}
    last, ended, streams = "", -math.inf, 0
    for name, start, seconds in sorted(loop, key=lambda item: item[1]):
        before, gap_ms = streams, 1e3 * (start - ended)
        streams = next(numbers[name]) if name in numbers else 0
        if gap_ms < AWAKE_MS and name == f"launch {vocoder}" and last.endswith(f" {frames}"):
            found["send"].append((streams, gap_ms))
        elif gap_ms < AWAKE_MS and name == f"launch {frames}" and last == f"retire {vocoder}":
            found["push"].append((before, gap_ms))
        last, ended = name, start + seconds
    return {what: by_size(points, statistics.median) for what, points in found.items()}


def admit_ms(loop: Loop) -> tuple[float, float]:
    """Of the same for a request that is announced, and for one that follows another at once."""
    admitted = sorted((start, seconds) for name, start, seconds in loop if name == "admit")
    first, then, last = [], [], -math.inf
    for start, seconds in admitted:
        (then if start - last < NEXT_S else first).append(1e3 * seconds)
        last = start + seconds
    return round(statistics.mean(first), 4), round(statistics.mean(then), 4)


def announced_ms(run: Mapping[str, Any], loop: Loop) -> list[float]:
    """How long requests of a run took to the host, by their order: those that do not count came first."""
    sent = sorted(run["began"] + s["sent"] for s in run["samples"])
    end = run["began"] + max(s["sent"] + s["end"] for s in run["samples"])
    heard = sorted(start for name, start, _ in loop if name == "admit" and run["began"] <= start <= end)[-len(sent) :]
    return [round(1e3 * (b - a), 2) for a, b in zip(sent, heard, strict=True)]


def passed_on(loop: Loop, stage: str) -> list[float]:
    """When the host had passed on what came of the stage's steps."""
    return sorted(start + seconds for name, start, seconds in loop if name == f"retire {stage}")


def opening_ms(run: Mapping[str, Any], loop: Loop) -> float:
    """From there to the listener, for the first text of an answer: the median."""
    passed = passed_on(loop, STAGES["text"])
    came = [run["began"] + s["sent"] + s["first_text"] for s in run["samples"]]
    return round(1e3 * statistics.median(t - passed[bisect_right(passed, t) - 1] for t in came), 3)


def delivery_ms(runs: Sequence[Mapping[str, Any]], loop: Loop) -> tuple[float, float, float]:
    """The way of a packet to its listener, and the server's time for each of those that left with it, and for each of
    their frames: by when the last packet of each of the vocoder's calls came, if that was before the next call's."""
    passed = passed_on(loop, STAGES["vocoder"])
    rows, last = [], []
    for run in runs:
        calls: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for s in run["samples"]:
            for i, (came, seconds) in enumerate(s["packets"]):
                when = run["began"] + s["sent"] + came
                call = bisect_right(passed, when) - 1
                frames = round((seconds + (0.0 if i else OPENING_S)) / FRAME_S)
                calls[call].append((1e3 * (when - passed[call]), frames))
        for call, packets in calls.items():
            ms = max(ms for ms, _ in packets)
            if call + 1 < len(passed) and ms < 1e3 * (passed[call + 1] - passed[call]) - CLEAR_MS:
                rows.append({"way": 1.0, "packet": float(len(packets)), "frame": float(sum(f for _, f in packets))})
                last.append(ms)
    found = least_squares(rows, last, FAR_MS)
    return round(found["way"], 4), round(found["packet"], 4), round(found["frame"], 4)


def reduced(
    result: Mapping[str, Any], shapes: Shapes, passes: Sequence[int], frames_alone: Callable[[int], float]
) -> dict[str, Any]:
    """All of it. `passes`: rows of those that are captured; `frames_alone`: what prompts of frames take by
    themselves."""
    traced, loop = traced_steps(result, shapes), result["loop"]
    usual = [s for s in answering(traced, result["parts"]) if s.run is not None and s.run["workload"] != "audio-10s"]
    found: dict[str, Any] = {"alone": {}, "shares": {}, "beside_vocoder": {}, "host": {}}
    for lane in LANES.values():
        own = [s for s in usual if s.lane == lane]
        found["host"][lane] = host_ms([s for s in own if s.run is not None and s.run["workload"] == "text-100"])
        if lane not in OTHER:
            continue
        curve = alone_ms(own)
        points = [(float(rows), ms) for rows, ms, _ in curve]

        def alone(rows: int, points: list[tuple[float, float]] = points) -> float:
            return at(points, rows)

        shares = decode_shares([s for s in own if not s.prompt], alone)
        found["alone"][lane], found["shares"][lane] = curve, shares
        found["beside_vocoder"][lane] = vocoder_shares(own, alone, filled(shares))
    prompts = [s for s in usual if s.lane == "text" and s.prompt]
    found["prompt"], beside = prompt_shares(prompts, passes, found["beside_vocoder"]["text"])
    found["prompt_shares"] = {"small": beside[True], "large": beside[False]}
    found["frames_prompt"] = frames_prompt_share([s for s in usual if s.lane == "frames"], frames_alone)
    found["vocoder_beside"] = vocoder_beside([s for s in usual if s.lane == "vocoder"])
    runs = [run for part in ("latency", "open") for run in result["parts"][part]["found"]]
    one = next(run for run in runs if run["streams"] == 1)
    found["varies"], found["varies_prompts"] = (varies(usual, found["host"], prompts) for prompts in (False, True))
    found["admit_ms"] = admit_ms(loop)
    found["between"] = between_ms(traced, loop)
    lone = [s.noticed_s for s in usual if s.run is one and s.lane in OTHER]
    found["hop_us"] = round(1e6 * statistics.median(lone), 1)
    found["opening_ms"] = opening_ms(one, loop)
    found["delivery_ms"] = delivery_ms([run for run in runs if (run["streams"] or 1) <= CROWD], loop)
    return found
