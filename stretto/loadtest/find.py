"""`stretto bench URL --find`: how much a server carries. Searches for the most listeners whose
players never wait, and for the highest rate at which first audio comes in time.

The search itself (`loads`, `find`) knows no server: it names a load, learns whether the server
carried it, and names the next. A `Limit` judges what was measured. `Prober` measures one load,
after a warm-up that does not count."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from stretto.loadtest.player import play
from stretto.loadtest.report import rates, show
from stretto.loadtest.runner import (
    Bench,
    Closed,
    Level,
    Load,
    OnSample,
    Open,
    Sample,
    Targets,
    ignore,
)
from stretto.loadtest.stats import percentile, summarize

PRECISION = 0.05
"""The search ends when the lowest load that failed is this much above the highest that passed."""
LEAST_RATE, MOST = 0.01, 1024
HALVINGS = 3  # of a rate that failed at the start
REFUSALS = ("http 429", "http 503")
BUSY = 0.9  # of a core; above this the client may be the bottleneck


# --- the search


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which loads may be tried. `whole`: a load is a number of listeners."""

    start: float
    least: float
    most: float
    whole: bool = False

    def next(self, low: float, high: float) -> float:
        """The load to try between `low`, the highest that passed (0: none), and `high`, the lowest
        that failed (infinity: none). It is `low` itself when nothing is left to try between the
        two."""
        if not low:
            return self.start if math.isinf(high) else max(self.least, self.rounded(high / 2))
        if math.isinf(high):
            return min(2 * low, self.most)
        if high - low <= max(PRECISION * low, 1 if self.whole else 0):
            return low
        return self.rounded((low + high) / 2)

    def rounded(self, load: float) -> float:
        return math.floor(load) if self.whole else float(f"{load:.3g}")


def loads(bounds: Bounds) -> Generator[float, bool, None]:
    """The loads of a search, one after the other; the caller sends whether each one passed. They
    double (or halve, if the first one fails), then they bisect. The highest load that passed is
    tried again at the end, because one probe can pass by chance. If it fails then, the search goes
    on below it."""
    passed: set[float] = set()
    high = math.inf
    while True:
        load = bounds.next(max(passed, default=0.0), high)
        again = load in passed
        if (yield load):
            if again:
                return
            passed.add(load)
        elif load <= bounds.least:
            return
        else:
            passed.discard(load)
            high = load


@dataclass(frozen=True, slots=True)
class Probe:
    """One load that was tried. `failure` says in a few words what was beyond the limit; None:
    nothing was."""

    load: float
    failure: str | None
    level: Level
    # it was interrupted, or the server does not answer: another probe would show no more
    last: bool = False
    client_cpu: float = 0.0  # share of one core

    @property
    def passed(self) -> bool:
        return self.failure is None and not self.level.interrupted


@dataclass(slots=True)
class Search:
    """All probes of one search, in their order."""

    probes: list[Probe] = field(default_factory=list)

    @property
    def highest(self) -> Probe | None:
        """The latest probe of the highest load that passed and never failed."""
        failed = {p.load for p in self.probes if p.failure is not None}
        carried = [p for p in reversed(self.probes) if p.passed and p.load not in failed]
        return max(carried, key=lambda p: p.load, default=None)

    @property
    def lowest_failure(self) -> Probe | None:
        return min(
            (p for p in self.probes if p.failure is not None), key=lambda p: p.load, default=None
        )

    @property
    def complete(self) -> bool:
        """The highest load passed twice, which is how a search ends."""
        highest = self.highest
        return (
            highest is not None
            and sum(p.passed and p.load == highest.load for p in self.probes) > 1
        )


Measure = Callable[[float], Awaitable[Probe]]


async def find(
    measure: Measure, bounds: Bounds, on_probe: Callable[[Probe], None] = lambda probe: None
) -> Search:
    search, plan = Search(), loads(bounds)
    load = next(plan)
    while True:
        probe = await measure(load)
        search.probes.append(probe)
        on_probe(probe)
        if probe.last:
            return search
        try:
            load = plan.send(probe.passed)
        except StopIteration:
            return search


# --- what is searched for


@dataclass(frozen=True, slots=True)
class NoUnderrun:
    """No player waits longer than `wait_s` in all. Listeners ask again as soon as they have their
    answer."""

    wait_s: float = 0.0

    @property
    def name(self) -> str:
        return "listeners"

    @property
    def title(self) -> str:
        allowed = (
            f"with waits of at most {show(self.wait_s, 's')}"
            if self.wait_s
            else "without an underrun"
        )
        return f"most listeners {allowed}"

    def describe(self, load: float) -> str:
        return f"{load:.0f} listener{'s' if load != 1 else ''}"

    def load(self, load: float, seed: int) -> Closed:
        return Closed(int(load))

    def num_answers(self, load: float, requests: int | None = None) -> tuple[int, int]:
        """How many answers a probe needs (`requests` of them if that is possible), and how many
        come before them as a warm-up. One for each listener at least, or there would not be so
        many."""
        listeners = int(load)
        return max(32, 4 * listeners) if requests is None else max(listeners, requests), listeners

    def failure(self, good: Sequence[Sample]) -> str | None:
        longest = longest_wait(good)
        return f"a player waited {show(longest, 's')}" if longest > self.wait_s else None


@dataclass(frozen=True, slots=True)
class FirstWithin:
    """First audio (or first text, where answers are not spoken) comes within `limit_s` for this
    share of the answers. Requests come at random moments, whether or not the server keeps up."""

    limit_s: float
    share: float = 0.99
    spoken: bool = True

    @property
    def name(self) -> str:
        return "rate"

    @property
    def title(self) -> str:
        return f"highest rate with {self.measure} within {show(self.limit_s, 's')}"

    @property
    def measure(self) -> str:
        return f"first {'audio' if self.spoken else 'text'} p{100 * self.share:g}"

    def describe(self, load: float) -> str:
        return f"{load:g} requests/s"

    def load(self, load: float, seed: int) -> Open:
        return Open(load, seed)

    def num_answers(self, load: float, requests: int | None = None) -> tuple[int, int]:
        """As of `NoUnderrun`: enough for the percentile to be one of them, and ten seconds of
        requests at least."""
        usual = max(32, math.ceil(1 / (1 - self.share) - 1e-9), math.ceil(10 * load))
        number = usual if requests is None else requests
        return number, math.ceil(number / 5)

    def failure(self, good: Sequence[Sample]) -> str | None:
        first = sorted(
            f for s in good if (f := s.first_audio if self.spoken else s.first_text) is not None
        )
        reached = percentile(first, self.share) if first else math.inf
        return f"{self.measure} was {show(reached, 's')}" if reached > self.limit_s else None


Limit = NoUnderrun | FirstWithin
"""What a level must keep to, and which loads are searched."""


def longest_wait(good: Sequence[Sample]) -> float:
    return max(
        (playback.wait for s in good if (playback := play(s.packets)) is not None), default=0.0
    )


# --- measuring


@dataclass(slots=True)
class Prober:
    """Measures one load after another for a limit. `requests` and `warmup` replace the limit's own
    numbers of answers; no request begins after `seconds`."""

    bench: Bench
    limit: Limit
    requests: int | None = None
    seconds: float | None = None
    warmup: int | None = None
    seed: int = 0
    on_begin: Callable[[Load, int], None] = lambda load, requests: None
    on_sample: OnSample = ignore
    cpu: Callable[[], float] = time.process_time
    numbers: Iterator[int] = field(default_factory=count)  # of probes: each has arrivals of its own

    async def __call__(self, load: float) -> Probe:
        requests, warmup = self.limit.num_answers(load, self.requests)
        warmup = warmup if self.warmup is None else self.warmup
        target = self.limit.load(load, self.seed + next(self.numbers))
        self.on_begin(target, requests + warmup)
        cpu, start = self.cpu(), self.bench.clock.now()
        targets = Targets(requests + warmup, self.seconds, until_error=True)
        level = await self.bench.run(target, targets, self.on_sample)
        busy = (self.cpu() - cpu) / max(self.bench.clock.now() - start, 1e-9)
        level.skip(warmup)
        if level.interrupted:
            return Probe(load, None, level, last=True, client_cpu=busy)
        return Probe(load, self.failure(level), level, last=unreachable(level), client_cpu=busy)

    def failure(self, level: Level) -> str | None:
        if (failure := failed_requests(level)) is not None:
            return failure
        if not level.samples:
            return f"it ended within its warm-up of {len(level.warmup)} answers"
        return self.limit.failure(level.good)


def failed_requests(level: Level) -> str | None:
    """Requests without a whole answer, those of the warm-up included: a load that is refused is not
    carried."""
    all_samples = [*level.warmup, *level.samples]
    failed = [s for s in all_samples if s.error is not None]
    if not failed:
        return None
    verb = "were refused" if all(s.error in REFUSALS for s in failed) else "failed"
    return (
        f"{len(failed)} of {len(all_samples)} requests {verb} ({failed[0].error}: "
        f"{failed[0].message})"
    )


def unreachable(level: Level) -> bool:
    """No request has an answer, and not because the server is full."""
    errors = [s.error for s in (*level.warmup, *level.samples)]
    return bool(errors) and all(error is not None and error not in REFUSALS for error in errors)


# --- for people and machines


def probe_line(limit: Limit, probe: Probe) -> str:
    level = probe.level
    parts = [
        "interrupted"
        if level.interrupted
        else f"failed: {probe.failure}"
        if probe.failure
        else "passed"
    ]
    parts.append(f"{len(level.good)} answers in {level.seconds:.1f} s")
    for name, values in (
        ("first text", [s.first_text for s in level.good if not s.packets]),
        ("first audio", [s.first_audio for s in level.good]),
    ):
        if (first := summarize(values)) is not None:
            parts.append(f"{name} p50 {show(first.p50, 's')}, p99 {show(first.p99, 's')}")
    if (rtf := summarize(s.rtf for s in level.good)) is not None:
        parts.append(
            f"RTF {show(rtf.p50, 'x')}, longest wait {show(longest_wait(level.good), 's')}"
        )
    if probe.client_cpu > BUSY:
        parts.append(
            f"this client used {100 * probe.client_cpu:.0f} % of a core and may be the bottleneck"
        )
    return f"  {limit.describe(probe.load)}: " + "; ".join(parts)


def conclusion(limit: Limit, search: Search, bounds: Bounds) -> str:
    highest, beyond = search.highest, search.lowest_failure
    if highest is None:
        reason = (
            f" ({limit.describe(beyond.load)}: {beyond.failure})"
            if beyond
            else " before the interruption"
        )
        return f"{limit.title}: none{reason}"
    speed = rates(highest.level)
    or_more = " or more" if highest.load >= bounds.most else ""
    text = f"{limit.title}: {limit.describe(highest.load)}{or_more}"
    text += f", {speed['requests_per_s']:.2f} answers/s"
    if speed["audio_s_per_s"]:
        text += f", {speed['audio_s_per_s']:.1f} s of speech per second"
    if beyond is not None:
        text += f"\n  beyond it, {limit.describe(beyond.load)}: {beyond.failure}"
    if not search.complete:
        text += (
            "\n  the search did not end: the server may carry more, and this load was tried only "
            "once"
        )
    return text


def to_json(limit: Limit, search: Search, first_level: int) -> dict[str, Any]:
    """`first_level`: the place of the search's first probe among the levels of the record."""
    highest = search.highest
    return {
        "name": limit.name,
        "title": limit.title,
        "highest": None if highest is None else highest.load,
        "complete": search.complete,
        "probes": [
            {
                "level": n,
                "load": p.load,
                "passed": p.passed,
                "failure": p.failure,
                "client_cpu": p.client_cpu,
            }
            for n, p in enumerate(search.probes, first_level)
        ],
    }
