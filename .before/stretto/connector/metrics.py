"""What a link measures of itself, at each end. Plain numbers; the exporter reads them, nothing is exported here.

Every number has one writing thread (the courier's, or the stage loop's for queues), so plain integers will do;
readers on other threads see a value that is at most one update old."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

# Powers of two from 1 µs to 8.4 s: a hop in shared memory takes tens of microseconds, a stalled one seconds.
BUCKETS_S = tuple(2.0**i * 1e-6 for i in range(24))


@dataclass(slots=True)
class Histogram:
    """Counts of durations by bucket (`buckets[i]`: at most `BUCKETS_S[i]`; the last: longer), with their sum."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(BUCKETS_S, seconds)] += 1
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def quantile(self, q: float) -> float:
        """Upper bound of the bucket that holds the q-quantile (the longest seen, in the last); 0 when empty."""
        rank = q * self.count
        seen = 0
        for bound, count in zip(BUCKETS_S, self.buckets):
            seen += count
            if seen >= rank and seen:
                return min(bound, self.longest_s)
        return self.longest_s


@dataclass(slots=True)
class LinkMetrics:
    """One end of one link. The sending end fills `put`, the receiving one `take`, both the rest."""

    link: str
    chunks: int = 0
    bytes: int = 0  # of payload
    put: Histogram = field(default_factory=Histogram)  # from the first attempt to the end of the put, credits included
    take: Histogram = field(default_factory=Histogram)  # from a chunk's arrival to its hand-over, upload included
    queue: Histogram = field(default_factory=Histogram)  # between stage loop and courier
    credits: int = 0  # at the last look
    queued: int = 0  # chunks now between stage loop and courier
    stalls: int = 0  # chunks that found no credit (receiving: no room in the queue)
    refused_offers: int = 0  # times that the stage loop was told to wait
    purged: int = 0  # chunks dropped because their epoch was over
    errors: Counter[str] = field(default_factory=Counter)  # by class name

    def error(self, error: Exception) -> None:
        self.errors[type(error).__name__] += 1
