"""Goodput in the report of a load test."""

from __future__ import annotations

import pytest

from stretto.loadtest.player import Packet
from stretto.loadtest.report import overview, rates, table
from stretto.loadtest.runner import Closed, Goal, Level, Sample


def test_bench_counts_good_answers() -> None:
    good = Sample(0, 0.0, [0.1, 0.2, 0.3], [Packet(0.2, 1.0), Packet(0.9, 1.0)], 1.0, text_tokens=5)
    late = Sample(1, 0.0, [0.1], [Packet(1.5, 1.0)], 2.0)
    torn = Sample(2, 0.0, [0.1], [Packet(0.2, 0.1), Packet(2.0, 1.0)], 2.5)
    failed = Sample(3, 0.0, error="busy", message="later")
    level = Level(Closed(4), [good, late, torn, failed], 2.0)
    goal = Goal(first=1.0, wait=0.1)
    assert [goal.met(s) for s in level.samples] == [True, False, False, False]
    assert good.token_seconds == pytest.approx(0.05)
    speed = rates(level, goal)
    assert (speed["good_share"], speed["good_requests_per_s"]) == (0.25, 0.5)
    shown = table(level, (0.0,), goal)
    assert "goodput: 25 % of 4 requests, 0.50 a second" in shown
    assert "text tokens/s" in shown
    assert "per text token" in shown
    assert "25 %" in overview([level], goal)
