"""What is told of a replay's error: by run and load, with the sampling interval of what was measured; and how the
table's numbers are read off the results."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from bench.plan.checks import BURST_S, between, check, interval
from bench.plan.inputs import (
    admit_ms,
    end_ms,
    gaps,
    jitter_ms,
    launch_ms,
    prompt_curve,
    retire_ms,
    server_us,
)
from bench.plan.runs import ASKED, FRAME_S, MEASURES, OPENING_S
from stretto.client.stats import percentile
from stretto.planner.error import error_lines, verdict
from stretto.planner.heard import Heard
from stretto.planner.plan import quantile
from stretto.planner.table import Check
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
    """Known ones count; those between are as much quicker as the largest of the small ones."""
    passes = [(100, 10.0), (500, 20.0), (1024, 40.0), (2000, 60.0)]
    curve = prompt_curve(passes, [(100, 9.0), (300, 12.0), (1024, 30.0), (2000, 50.0)])
    assert curve == [(100.0, 9.0), (300.0, 12.0), (500.0, 16.0), (1024.0, 32.0), (1025.0, 30.0), (2000.0, 50.0)]


def test_what_host_and_server_need_is_read_off_the_samples() -> None:
    def run(steps: float, rows: float, seconds: float, streams: int = 8, **more: Any) -> dict[str, Any]:
        host = {
            'stretto_stage_steps_total{stage="thinker",kind="decode"}': steps,
            'stretto_stage_tokens_total{stage="thinker"}': rows,
            'stretto_stage_retire_seconds_total{stage="thinker"}': seconds,
        }
        return {"host": host, "streams": streams, "workload": "text-100", **more}

    # 0.1 ms for a step and 0.02 ms for each row
    found = retire_ms([run(10, 10, 0.0012), run(10, 100, 0.003)], "thinker")
    assert found == pytest.approx((0.1, 0.02))
    codec = {
        "samples": [{"packets": [0] * 20}] * 5,
        "host": {
            'stretto_stage_steps_total{stage="code2wav",kind="decode"}': 100,
            'stretto_stage_frames_total{stage="code2wav"}': 10 * ASKED["text-100"].frames,
            'stretto_stage_retire_seconds_total{stage="code2wav"}': 0.03,
        },
        "workload": "text-100",
    }
    half = codec | {"host": codec["host"] | {'stretto_stage_retire_seconds_total{stage="code2wav"}': 0.01}}  # type: ignore[operator]
    fewer = half | {"samples": [{"packets": [0] * 10}] * 5}
    assert retire_ms([codec, fewer], "code2wav") == pytest.approx((-0.1, 0.2)), "packets of all requests, not of five"

    def launched(steps: float, seconds: float, tokens: float) -> dict[str, Any]:
        names = [f'stretto_stage_launch_seconds_{what}{{stage="thinker",kind="mixed"}}' for what in ("count", "sum")]
        host = dict(zip(names, (steps, seconds), strict=True))
        return {"workload": "text-100", "host": host | {'stretto_stage_tokens_total{stage="thinker"}': tokens}}

    # 2 ms for a step and 0.5 ms for each prompt: 10 and 40 requests of 64 tokens in 10 steps
    loads = [launched(10, 0.025, 640), launched(10, 0.04, 2560)]
    assert launch_ms(loads, "thinker", ["prefill", "mixed"]) == pytest.approx((2.0, 0.5))

    assert gaps([3.0, 1.0, 1.5, 10.0], 2.0) == [0.5, 1.5]
    times = ((0.0, 0.02, 0.03), (0.01, 0.0101, 0.0201))
    samples = [{"sent": t, "first_text": text, "first_audio": audio} for t, text, audio in times]
    assert server_us([{"samples": samples}]) == pytest.approx(100.0)
    phases = [{"server and socket": 0.001, "admission": 0.002}, {"server and socket": 0.001, "admission": 0.0013}]
    told = {"samples": [{"sent": 0.0}, {"sent": 0.001}], "phases_raw": phases}
    assert admit_ms({"found": [told]}) == pytest.approx(0.3)

    def ended(frames: int, tail: float) -> dict[str, Any]:
        sample = {"audio_s": frames * FRAME_S - OPENING_S, "packets": [[0.1, 1.0]], "end": 0.1 + tail}
        return {"streams": 1, "samples": [sample | {"first_text": text} for text in (0.02, 0.022)]}

    parts = {"latency": {"found": [ended(125, 0.0006)]}, "prompts": {"found": [ended(25, 0.0002)]}}
    assert end_ms(parts) == pytest.approx((0.1, 4.0))
    assert jitter_ms(parts) == pytest.approx(1.0)
