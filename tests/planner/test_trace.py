"""What is read off the trace of a served load."""

from __future__ import annotations

from typing import Any

import pytest

from bench.plan.trace import PROMPT, Ran, alone_ms, decode_shares, filled, full_steps, overlaps, vocoder_shares
from stretto.planner.table import BINS


def ran(lane: str, rows: int, start_ms: float, ms: float, prompt: bool = False) -> Ran:
    return Ran(lane, prompt, rows, start_ms / 1e3, ms)


def test_what_ran_beside_what() -> None:
    text, frames, call = ran("text", 3, 0.0, 10.0), ran("frames", 5, 4.0, 4.0, True), ran("vocoder", 1, 6.0, 1.0)
    overlaps([text, frames, call])
    assert text.beside == pytest.approx({(None, None): 6.0, (PROMPT, None): 3.0, (PROMPT, 0): 1.0})
    assert frames.beside == pytest.approx({(2, None): 3.0, (2, 0): 1.0})
    assert call.beside == pytest.approx({(2, 0): 1.0})
    assert text.part(lambda other, _: other is None) == pytest.approx(0.6)


def served(rng_ms: float, share: float, slowed: float) -> list[Ran]:
    """Steps of four rows that take 5 ms alone: some of them alone, some beside frames for a while, some of these beside
    a call of the vocoder too."""
    steps: list[Ran] = []
    for i in range(60):
        start, beside = 100.0 * i, rng_ms * (i % 6)
        call = 0.5 * (i % 3) if beside > 2 else 0.0
        got = share * (beside - call) + share * slowed * call
        steps.append(ran("text", 4, start, beside + 5.0 - got))
        steps += [ran("frames", 8, start, beside)] if beside else []
        steps += [ran("vocoder", 2, start + 0.5, call)] if call else []
    overlaps(steps)
    return [s for s in steps if s.lane == "text"]


def test_shares_are_found_again() -> None:
    steps = served(1.0, 0.6, 0.5)
    assert alone_ms(steps) == [(4, 5.0, 10)]
    shares = decode_shares(steps, lambda rows: 5.0)
    [(own, other, share, _)] = shares
    assert (BINS[own], BINS[other]) == (4, 8)
    assert share == pytest.approx(0.6, abs=0.002)
    assert vocoder_shares(steps, lambda rows: 5.0, filled(shares))[1] == pytest.approx(0.5, abs=0.01)


def test_what_was_not_seen_is_as_the_nearest() -> None:
    share = filled([(2, 3, 0.5, 10), (4, 3, 0.7, 10), (4, PROMPT, 0.9, 10)])
    assert [share(own, 3) for own in (0, 2, 4, 7)] == [0.5, 0.5, 0.7, 0.7]
    assert share(0, 7) == 0.5, "no such size of the other: its nearest, then the nearest of its own"
    assert share(0, PROMPT) == 0.9


def test_steps_in_the_middle_of_a_burst_are_full() -> None:
    run: dict[str, Any] = {"rate": None}
    rows = [(0, 3), (30, 12), (60, 22), (90, 26), (2000, 35)]
    steps = [ran("text", n, at, 25.0, True) for at, n in rows]
    for s in steps:
        s.run = run
    assert [(s.rows, before) for s, before in full_steps(steps)] == [(12, 3), (22, 12)]
