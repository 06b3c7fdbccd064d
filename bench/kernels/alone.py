"""Each decode kernel by itself: finds launch parameters on this machine's GPU and keeps them on
disk.

    python -m bench kernels --parts alone --out bench/results/tune_h200.json      # 3 to 6 min

Each candidate runs as a chain over several copies of its weights (more than the cache holds),
captured in a graph, as it runs in a decode step; the time is the median over replays. Candidates
are compiled by several processes first. Without `--tuned` the parameters go to the file that
`stretto.kernels.triton.tuning` reads. The result has for each kernel and shape the best candidate,
its time, how many were tried and what the slowest took."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness.env import describe
from bench.harness.results import parser, write
from bench.kernels.cases import CHAIN, Case, cases
from stretto.kernels.triton.descent import Tuned
from stretto.kernels.triton.tuning import name_of, own_file, save


def compile_some(
    only: list[str], batches: list[int], kernels: tuple[str, ...], share: int, jobs: int
) -> None:
    """Run every candidate of this share once, so that the compiled kernels are on disk."""
    with torch.inference_mode():
        for number, case in enumerate(cases(only, batches, kernels)):
            run: Callable[[Tuned, int], Any] | None = None
            for i, c in enumerate(case.candidates):
                if (number * 7 + i) % jobs == share:
                    try:
                        run = run or case.make()
                        run(c, 0)
                    except Exception as e:  # noqa: BLE001 - a candidate that cannot run is reported when timed
                        _ = e
            del run
            torch.cuda.empty_cache()


def time_one(run: Callable[[Tuned, int], Any], c: Tuned, replays: int = 12) -> float:
    """Median microseconds per launch."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3):
            run(c, i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(CHAIN):
                run(c, i)
        times = []
        for _ in range(replays):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / CHAIN)
    return statistics.median(times[2:])


def best_of(case: Case, deadline: float) -> dict[str, Any] | None:
    """The fastest candidate. None: nothing ran."""
    run = case.make()
    times: list[tuple[float, Tuned]] = []
    failed = 0
    for c in case.candidates:
        if time.perf_counter() > deadline and times:
            break
        try:
            times.append((time_one(run, c), c))
        except Exception:  # noqa: BLE001 - too much shared memory, for one: not a candidate here
            failed += 1
    del run
    torch.cuda.empty_cache()
    if not times:
        print(f"{name_of(case.kernel, case.key)}: nothing ran", flush=True)
        return None
    us, config = min(times, key=lambda t: t[0])
    worst = max(us for us, _ in times)
    print(
        f"{name_of(case.kernel, case.key):34} {us:7.2f} us {case.bytes / us / 1e6:5.2f} TB/s  "
        f"{config}"
        f"   (worst {worst:.1f}, of {len(times)})",
        flush=True,
    )
    found = {
        "kernel": case.kernel,
        "key": case.key,
        "config": config,
        "us": us,
        "bytes": case.bytes,
    }
    return found | {"worst_us": worst, "tried": len(times), "failed": failed}


def main(given: Sequence[str]) -> int:
    p = parser("kernels --parts alone", __doc__)
    p.add_argument("--tuned", type=Path, help="where the tuned parameters go")
    p.add_argument("--only", default="vector,matrix,split,float8")
    p.add_argument(
        "--kernels", default="", help="only those whose names (kernel/key) begin with one of these"
    )
    p.add_argument("--batches", default="8,32", help="rows for the matrix kernels")
    p.add_argument("--jobs", type=int, default=12, help="processes that compile")
    p.add_argument(
        "--limit", type=float, default=400.0, help="seconds after which no further case is timed"
    )
    args = p.parse_args(given)
    only, batches = args.only.split(","), [int(b) for b in args.batches.split(",")]
    kernels = tuple(args.kernels.split(","))
    begin = time.perf_counter()
    if args.jobs:
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=compile_some, args=(only, batches, kernels, i, args.jobs))
            for i in range(args.jobs)
        ]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    result: dict[str, Any] = {"env": describe(), "times": []}
    with torch.inference_mode():
        for case in cases(only, batches, kernels):
            if time.perf_counter() - begin > args.limit:
                print("out of time", flush=True)
                break
            if (found := best_of(case, begin + args.limit)) is not None:
                result["times"].append(found)
                write(args.out, result)
    save(
        args.tuned or own_file(),
        {name_of(t["kernel"], t["key"]): t["config"] for t in result["times"]},
    )
    return 0
