"""What is told of a replay's error: by run and load, with the sampling interval of what was measured; and how the
table's numbers are read off the results."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from bench.plan.checks import BURST_S, between, check, interval
from bench.plan.fit import Watched, loss
from bench.plan.inputs import captured, end_ms, gaps, prompt_curve, shapes_of, text_us, together_of
from bench.plan.runs import ASKED, FRAME_S, MEASURES, OPENING_S, replays
from stretto.client.stats import percentile
from stretto.planner.error import error_lines, verdict
from stretto.planner.heard import Heard
from stretto.planner.plan import quantile
from stretto.planner.table import Check, pass_of
from tests.planner.test_plan import with_


def one(load: str, error: float, low: float, high: float) -> Check:
    return Check(load, False, 50, {"p99": error}, {"p99": (error, error)}, {"p99": (low, high)})


def test_runs_that_are_off_are_told_apart_by_what_chance_explains() -> None:
    near, chance, far = one("a", -0.1, -0.01, 0.01), one("b", 0.12, -0.2, 0.13), one("b", -0.3, -0.2, 0.1)
    assert verdict([near], "p99") == ["p99 is within 10 % in 1 of 1 runs"]
    assert verdict([near, chance, far], "p99") == [
        "p99 is within 10 % in 1 of 3 runs",
        "  not within, but inside the measured value's own 90 % sampling interval: b (+12.0 %)",
        "  not within, and outside the measured value's own 90 % sampling interval: b (-30.0 %)",
    ]
    table = with_(error={"p99": 0.17}, worst={"p99": 0.3}, checks=[near, chance, far], between={"b": {"p99": 0.5}})
    assert error_lines(table)[:7] == [
        "of the replay against measured runs, on average: p99 17 % (worst 30 %)",
        "by run, in %, with the 90 % sampling interval of what was measured:",
        "                      p99",
        "  a                   -10 [-1 to +1]",
        "  b                   +12 [-20 to +13]",
        "  b                   -30 [-20 to +10]",
        "    runs apart         50",
    ]
    assert error_lines(table)[7:] == verdict(table.checks, "p99")
    fitted = msgspec.structs.replace(near, fitted=True)
    pooled = [one("b", -0.09, -0.1, 0.1)]
    both = error_lines(msgspec.structs.replace(table, checks=[fitted, chance, far], pooled=pooled))
    assert both[3] == "  a, fitted           -10 [-1 to +1]"
    assert both[6] == "    not fitted, all    -9 [-10 to +10]"
    assert both[-1] == "p99 is within 10 % in 1 of 1 loads, of the runs that were not fitted"
    assert error_lines(with_()) == ["of the replay against measured runs: not known"]


def run_of(first: list[float], sent: list[float]) -> dict[str, Any]:
    samples = [{"sent": t, "first_audio": f, "rtf": 0.1, "first_text": f} for t, f in zip(sent, first, strict=True)]
    return {"samples": samples, "answers": len(samples), "streams": 4, "rate": None}


def test_quantiles_are_those_of_the_reports() -> None:
    rng = random.Random(0)
    values = [rng.random() for _ in range(57)]
    for part in (0.5, 0.9, 0.99):
        assert quantile(values, part) == percentile(sorted(values), part)
    assert quantile(values, 0.99) < max(values)


def test_the_interval_of_what_was_measured() -> None:
    rng = random.Random(1)
    first = [rng.uniform(0.01, 0.02) for _ in range(100)]
    alone = interval([run_of(first, [float(i) for i in range(100)])], 500)
    assert set(alone) == set(MEASURES)
    low, high = alone["first_audio_p99"]
    assert low < 0 < high <= max(first) / quantile(first, 0.99) - 1 + 1e-4, "no draw is larger than the largest sample"
    assert alone["rtf_p50"] == pytest.approx((0.0, 0.0))
    assert alone == interval([run_of(first, [float(i) for i in range(100)])], 500), "the same every time"
    # Samples that came together are drawn together: ten bursts say less than a hundred requests.
    few = sorted(first)
    bursts = interval([run_of(few, [i // 10 + (i % 10) * BURST_S / 2 for i in range(100)])], 500)
    width = {name: b[1] - b[0] for name, b in (("alone", alone["first_audio_p50"]), ("few", bursts["first_audio_p50"]))}
    assert width["few"] > 1.5 * width["alone"]


def test_how_far_runs_are_apart() -> None:
    a, b = run_of([0.1, 0.1], [0.0, 1.0]), run_of([0.12, 0.12], [0.0, 1.0])
    assert between([a, b])["4 streams"]["first_audio_p50"] == pytest.approx(0.2)
    assert between([a]) == {}


def test_runs_of_a_load_are_taken_together() -> None:
    a, b = run_of([0.1] * 3, [0.0, 1.0, 2.0]), run_of([0.2] * 4, [0.0, 1.0, 2.0, 3.0])
    heard = [[[Heard(0.0, ASKED["text-100"], 0.05, [(first, 1.0)], 1.0)] * n] for n, first in ((3, 0.1), (4, 0.22))]
    both = check([a, b], heard, False)
    assert both.answers == 7
    assert both.error["first_audio_p50"] == pytest.approx(0.1)
    assert check([a], heard[:1], True).error["first_audio_p50"] == 0.0


def test_prompts_are_as_those_that_were_served() -> None:
    """Known ones count; the others are as much quicker as those beside them."""
    passes = [(64.0, 8.0), (128.0, 10.0), (512.0, 20.0), (2048.0, 40.0), (2560.0, 50.0)]
    curve = prompt_curve(passes, {"128": 9.0, "2048": 30.0})
    assert curve == [(64.0, 7.2), (128.0, 9.0), (512.0, pytest.approx(16.5)), (2048.0, 30.0), (2560.0, 37.5)]
    assert [pass_of(passes, tokens) for tokens in (1, 64, 65, 9999)] == [8.0, 8.0, 10.0, 50.0]
    assert captured([(16.0, 1.0), (2560.0, 2.0)])[0] == (16.0, 1.0)


def test_the_vocoders_shapes_are_as_those_that_were_served() -> None:
    """One that was not seen is as much slower as the nearest, and nobody is quicker beside others than alone."""
    served = {
        "vocoder_beside": {"0": 2.0, "2": 1.5}, "beside_vocoder": {"text": {"0": 0.7, "2": 0.4}, "frames": {"1": 0.5}}
    }  # fmt: skip
    one, eight, many = shapes_of([(1, 1, 1.0), (2, 8, 1.4), (8, 8, 2.0)], served)
    assert (one.beside_ms, one.text_share, one.frames_share) == (2.0, 0.7, 0.5)
    assert (eight.beside_ms, eight.text_share) == (1.4, 0.4)
    assert (many.beside_ms, many.text_share) == (2.0, 0.4)


def test_shares_beside_prompts_are_as_the_nearest() -> None:
    served = {
        "shares": {lane: [(0, 0, 0.6, 9), (0, 8, 0.9, 9)] for lane in ("text", "frames")},
        "prompt_shares": {"small": {"1": 0.5, "8": 0.7}, "large": {"3": 0.4, "5": 0.2}}, "frames_prompt": 0.55,
    }  # fmt: skip
    found = together_of(served)
    assert found.small_prompt == [0.5, 0.5, 0.5, 0.5, 0.5, 0.7, 0.7, 0.7, 0.7]
    assert found.large_prompt == [0.4, 0.4, 0.4, 0.4, 0.4, 0.2, 0.2, 0.2, 0.2]
    assert found.text[5] == [0.6] * 8 + [0.9]


def test_what_the_server_needs_is_read_off_the_samples() -> None:
    assert gaps([3.0, 1.0, 1.5, 10.0], 2.0) == [0.5, 1.5]
    samples = [{"sent": t, "first_text": text} for t, text in ((0.0, 0.02), (0.01, 0.0101))]
    assert text_us([{"samples": samples}]) == pytest.approx(100.0)

    def ended(frames: int, tail: float) -> dict[str, Any]:
        sample = {"audio_s": frames * FRAME_S - OPENING_S, "packets": [[0.1, 1.0]], "end": 0.1 + tail}
        return {"streams": 1, "samples": [sample] * 2}

    parts = {"latency": {"found": [ended(125, 0.0006)]}, "prompts": {"found": [ended(25, 0.0002)]}}
    assert end_ms(parts) == pytest.approx((0.1, 4.0))


def test_the_fit_compares_when_requests_reach_the_host() -> None:
    """With the numbers that made them it finds nothing to change, and more the farther it is off."""
    asked = {"workload": "text-100", "rate": 4.0, "streams": None}
    run = {**asked, "samples": [{"sent": 0.5 * i} for i in range(6)]}
    card = Watched(with_(overhead_ms=5.0))
    [heard] = replays(card.table, run, 1, lambda seed: card)
    took = card.took_ms(heard)
    assert took == pytest.approx([5.0] * 6)
    off = [loss(with_(overhead_ms=ms), [run], {"4 a second": took}) for ms in (5.0, 6.0, 9.0)]
    assert off[0] == pytest.approx(0.0, abs=1e-6)
    assert off[0] < off[1] < off[2]
