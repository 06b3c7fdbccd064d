from __future__ import annotations

import random

from stretto.connector.metrics import LinkMetrics
from stretto.errors import Gone, WireError
from stretto.observe.recorder import BUCKETS_S, Histogram


def test_quantiles_are_right_to_a_bucket() -> None:
    rng, histogram = random.Random(1), Histogram()
    assert histogram.quantile(0.5) == 0
    durations = sorted(10 ** rng.uniform(-6.5, 1.2) for _ in range(999))
    for duration in durations:
        histogram.observe(duration)
    for q in (0.01, 0.5, 0.99, 1.0):
        exact = durations[max(0, int(q * 999 + 0.5) - 1)]
        got = histogram.quantile(q)
        assert exact <= got * 1.0001
        assert got <= max(2.1 * exact, BUCKETS_S[0]) or got == durations[-1]
    assert histogram.count == sum(histogram.buckets) == 999
    assert abs(histogram.total_s - sum(durations)) < 1e-6
    assert histogram.longest_s == durations[-1]


def test_errors_by_kind() -> None:
    metrics = LinkMetrics("a-b")
    for error in (WireError("x"), Gone("y"), WireError("z")):
        metrics.error(error)
    assert metrics.errors == {"WireError": 2, "Gone": 1}
