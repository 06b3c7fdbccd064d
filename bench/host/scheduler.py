"""Host time of the scheduler alone: `schedule` and `retire` per step and per running request, with
no model.

    python -m bench host --parts scheduler

Cases: `thinker` decodes freely; `talker` is fed one text token and one deadline per frame, as the
stage does (`feed_us`); `full` is `thinker` with a queue of requests that find no blocks. Medians
over steps; the 99th percentile shows how busy the machine was."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from bench.harness.env import describe
from bench.harness.results import parser, write
from stretto.stage.request import RequestSpec
from stretto.stage.scheduler import Batch, Scheduler, SchedulerConfig, StepResult
from stretto.types import RequestId

PROMPT = 100
STEPS = 400


def build(case: str, rows: int, steps: int, depth: int) -> Scheduler:
    blocks = rows * ((PROMPT + steps + 64) // 16 + 2)
    config = SchedulerConfig(
        num_blocks=blocks,
        max_rows=rows + 8,
        max_waiting=4 * rows + 64,
        overlap_depth=depth,
        max_context=1 << 20,
    )
    scheduler = Scheduler(config)
    for i in range(rows):
        spec = RequestSpec(
            RequestId(f"r{i}"),
            max_new=steps + 32,
            stop_ids=frozenset({0}),
            paced=case == "talker",
            cache_output=False,
        )
        scheduler.submit(spec, [i + 1] * PROMPT)
        if case == "talker":
            scheduler.append_step_inputs(spec.id, depth)
    if case == "full":
        for i in range(64):
            spec = RequestSpec(RequestId(f"w{i}"), max_new=16)
            scheduler.submit(spec, [1000 + i] * (blocks * 16 - 32))
    return scheduler


def feed(scheduler: Scheduler, batch: Batch, now: float) -> None:
    for span in batch.spans:
        scheduler.append_step_inputs(span.request.id)
        scheduler.set_deadline(span.request.id, now + span.row * 1e-3)


def measure(case: str, rows: int, steps: int, depth: int) -> dict[str, float | int | str]:
    scheduler = build(case, rows, steps, depth)
    flying: deque[Batch] = deque()
    schedule_us, feed_us, retire_us = [], [], []
    warm = 0
    while len(schedule_us) < steps:
        start = time.perf_counter()
        batch = scheduler.schedule()
        middle = time.perf_counter()
        assert batch is not None
        flying.append(batch)
        if case == "talker":
            feed(scheduler, batch, middle)
        fed = time.perf_counter()
        if len(flying) < depth:
            continue
        oldest = flying.popleft()
        result = StepResult([[7]] * len(oldest.spans))
        before = time.perf_counter()
        scheduler.retire(oldest, result)
        after = time.perf_counter()
        warm += 1
        if batch.decode_only and len(batch.spans) == rows and warm > 8:
            schedule_us.append((middle - start) * 1e6)
            feed_us.append((fed - middle) * 1e6)
            retire_us.append((after - before) * 1e6)
    all_us = [a + b + c for a, b, c in zip(schedule_us, feed_us, retire_us)]
    return {
        "case": case,
        "rows": rows,
        "depth": depth,
        "schedule_us": round(statistics.median(schedule_us), 1),
        "feed_us": round(statistics.median(feed_us), 1),
        "retire_us": round(statistics.median(retire_us), 1),
        "p99_us": round(statistics.quantiles(all_us, n=100)[98], 1),
        "per_request_us": round(statistics.median(all_us) / rows, 2),
    }


def main(given: Sequence[str]) -> int:
    args = parser("host --parts scheduler", __doc__).parse_args(given)
    result: dict[str, Any] = {"env": describe(), "runs": []}
    for case in ("thinker", "talker", "full"):
        for rows in (1, 32, 128):
            result["runs"].append(found := measure(case, rows, STEPS, depth=2))
            print("  ".join(f"{name}={value}" for name, value in found.items()), flush=True)
    write(args.out, result)
    return 0
