"""The recorder of a process: numbers by their Prometheus names, durations as histograms, and spans
for a trace.

Stages, links and hosts write to it; the engine asks for all of it at once (`values`,
`take_spans`). Each number has one writing thread, so plain integers will do; readers on other
threads see a value that is at most one update old. Imports nothing of ours."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

# Powers of two from 4 µs to 8.4 s: a hop in shared memory takes tens of microseconds, a stalled one
# seconds.
BUCKETS_S = tuple(2.0**i * 1e-6 for i in range(2, 24))
MAX_SPANS = 100_000  # that wait to be taken; older ones go


@dataclass(slots=True)
class Histogram:
    """Counts of durations by bucket (`buckets[i]`: at most `BUCKETS_S[i]`; the last: longer), with
    their sum."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    count: int = 0
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(BUCKETS_S, seconds)] += 1
        self.count += 1
        self.total_s += seconds


TraceSpan = tuple[str, str, int, int]
"""Lane (a stage, or an end of a link), name, start and stop in nanoseconds of the monotonic
clock."""


class Recorder:
    def __init__(self, trace: bool = False) -> None:
        """`trace`: spans are kept, to be taken."""
        self.trace = trace
        self._numbers: dict[str, Callable[[], float]] = {}
        self._histograms: dict[str, tuple[Histogram, list[str]]] = {}
        self._spans: deque[TraceSpan] = deque(maxlen=MAX_SPANS)

    def number(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """A counter (its name ends in `_total`) or a gauge, read whenever all are asked for. A name
        that is there already is replaced: whoever comes back counts anew."""
        self._numbers[labelled(name, **labels)] = read

    def histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        """Durations; `name` ends in `_seconds`."""
        bounds = [*(repr(b) for b in BUCKETS_S), "+Inf"]
        names = [labelled(f"{name}_bucket", **labels, le=bound) for bound in bounds]
        names += [labelled(f"{name}_sum", **labels), labelled(f"{name}_count", **labels)]
        self._histograms[labelled(name, **labels)] = histogram, names

    def forget(self, **labels: str) -> None:
        """Drop all numbers with these labels."""
        matchers = [f'{k}="{v}"' for k, v in labels.items()]
        for series in (self._numbers, self._histograms):
            for name in [n for n in series if all(w in n for w in matchers)]:
                del series[name]

    def span(self, lane: str, name: str, start_ns: int, stop_ns: int) -> None:
        if self.trace:
            self._spans.append((lane, name, start_ns, stop_ns))

    def values(self) -> dict[str, float]:
        values = {name: float(read()) for name, read in self._numbers.items()}
        for histogram, names in self._histograms.values():
            total = 0
            for name, count in zip(names, histogram.buckets, strict=False):
                total += count
                values[name] = total
            values[names[-2]], values[names[-1]] = histogram.total_s, histogram.count
        return values

    def take_spans(self, most: int) -> list[TraceSpan]:
        """The oldest spans, which are then the caller's."""
        return [self._spans.popleft() for _ in range(min(most, len(self._spans)))]


def labelled(name: str, **labels: str) -> str:
    """A number's name with more labels, in Prometheus form."""
    added = ",".join(f'{k}="{v}"' for k, v in labels.items())
    if not added:
        return name
    return f"{name[:-1]},{added}}}" if name.endswith("}") else f"{name}{{{added}}}"
