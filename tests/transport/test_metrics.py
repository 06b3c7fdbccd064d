from __future__ import annotations

import random
from itertools import accumulate

from stretto.errors import Gone, WireError
from stretto.observe.recorder import BUCKETS_S, Histogram
from stretto.transport.metrics import LinkMetrics


def test_durations_fall_into_their_buckets() -> None:
    rng, histogram = random.Random(1), Histogram()
    durations = sorted(10 ** rng.uniform(-6.5, 1.2) for _ in range(999))
    for duration in durations:
        histogram.observe(duration)
    upto = [sum(d <= bound for d in durations) for bound in (*BUCKETS_S, float("inf"))]
    assert list(accumulate(histogram.buckets)) == upto
    assert histogram.count == 999
    assert abs(histogram.total_s - sum(durations)) < 1e-6


def test_errors_by_kind() -> None:
    metrics = LinkMetrics("a-b")
    for error in (WireError("x"), Gone("y"), WireError("z")):
        metrics.error(error)
    assert metrics.errors == {"WireError": 2, "Gone": 1}
