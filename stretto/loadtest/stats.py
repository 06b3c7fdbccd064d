"""Medians and tails. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor


@dataclass(frozen=True, slots=True)
class Summary:
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def percentile(ordered: list[float], share: float) -> float:
    """Between the two nearest values of a sorted list, in proportion."""
    place = share * (len(ordered) - 1)
    low, high = ordered[floor(place)], ordered[ceil(place)]
    return low + (high - low) * (place - floor(place))


def summarize(values: Iterable[float | None]) -> Summary | None:
    """None if there is no value at all; values that are None are left out."""
    ordered = sorted(v for v in values if v is not None)
    if not ordered:
        return None
    return Summary(
        count=len(ordered),
        mean=sum(ordered) / len(ordered),
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )
