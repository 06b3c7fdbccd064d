"""How much of a decode step the device stands idle: the gap between the end of one step and the start of the next.

Runs a whole stage (scheduler, runner, graphs) in steady decode, for thinker and talker, with and without a payload
that is copied to the host beside it, at overlap depth 1 and 2, for several batch sizes. Times are the device's own
(events around each graph), host time is what scheduling, launching and retiring took on the loop thread. With
`--lead-ms` (1.5 in service) the second step is launched just in time, so the gap tells whether that is early enough.

python bench/overlap.py [--config released|tiny] [--stages thinker,talker] [--batches 1,8,32] [--steps 100]"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.env import describe, quantile
from stretto.connector.switches import OverlapSwitches
from stretto.models.qwen3_omni.bridge import talker_prompt
from stretto.models.qwen3_omni.config import OmniConfig, parse
from stretto.models.qwen3_omni.load import Source
from stretto.models.qwen3_omni.tiny import released_config, tiny_config
from stretto.prompt.prompt import Prompt
from stretto.stage.ahead import Ahead
from stretto.stage.loop import Bell, Loop
from stretto.stage.payload.copies import DeviceToHost
from stretto.stage.payload.ring import Ring
from stretto.stage.request import RequestSpec
from stretto.stage.runner.graphs import DecodeGraphs
from stretto.stage.runner.rows import How
from stretto.stage.runner.runner import Runner
from stretto.stage.runner.talker import TalkerInput, TalkerLane
from stretto.stage.runner.thinker import ThinkerInput, ThinkerLane
from stretto.stage.runner.waiter import Waiter
from stretto.stage.scheduler.config import SchedulerConfig
from stretto.stage.scheduler.scheduler import Scheduler
from stretto.stage.stage import Output, Stage
from stretto.types import CODE0, RESIDUAL, RequestId


class TimedGraphs(DecodeGraphs):
    """Graphs with an event on either side of each replay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, graph: torch.cuda.CUDAGraph) -> None:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        super().run(graph)
        stop.record()
        self.marks.append((start, stop))


def request(kind: str, i: int, config: OmniConfig, prompt: int, new: int, device: torch.device) -> tuple:
    t = config.tokens
    words = np.random.default_rng(i).integers(0, min(1000, t.im_start), prompt - 8).tolist()
    ids = [t.im_start, t.user, 198, *words, t.im_end, 198, t.im_start, t.assistant, 198]
    id = RequestId(f"r{i}")
    if kind == "thinker":
        positions = np.broadcast_to(np.arange(len(ids), dtype=np.float32), (3, len(ids)))
        return RequestSpec(id, new), ThinkerInput(positions, float(len(ids))), ids, True
    plan = talker_prompt(Prompt(tuple(ids)), config)
    given = TalkerInput(plan, CODE0, RESIDUAL, text=[words[0]], text_ended=True)
    spec = RequestSpec(id, new, paced=True, cache_output=False)
    return spec, given, len(plan), True


def measure(
    kind: str,
    model: Any,
    config: OmniConfig,
    batch: int,
    depth: int,
    payload: bool,
    steps: int,
    prompt: int,
    lead_ms: float | None,
) -> dict[str, Any]:
    device, block = model.device, 16
    context = prompt + steps + 64
    blocks = batch * (-(-context // block) + 1)
    cache = model.cache(blocks + 1, block)
    lane = (ThinkerLane if kind == "thinker" else TalkerLane)(model, cache, batch, context)
    ways = [How(False, False)] if kind == "thinker" else [How(True, True)]
    graphs = TimedGraphs(lane, sizes=(batch,), ways=ways)
    runner = Runner(lane, graphs)
    assert runner.stream is not None
    graphs.capture(runner.stream)
    settings = SchedulerConfig(num_blocks=blocks, block_size=block, max_rows=batch, max_context=context,
                               max_step_tokens=16384, overlap_depth=depth, prefix_cache=False)  # fmt: skip
    bell = Bell()
    waiter = Waiter(bell.ring, kind)
    copies = None
    if payload:
        # As if the consumer were in another process: one hidden row per request and step for the thinker (far more
        # than it sends in truth), the frames for the talker.
        width = config.thinker.text.hidden_size if kind == "thinker" else config.talker.num_code_groups
        copies = DeviceToHost(Ring(16, 1 << 20, pin=True), device, OverlapSwitches())
        rows = torch.zeros(batch, width, device=device, dtype=torch.bfloat16 if kind == "thinker" else torch.int32)
    leases: list[Any] = []
    done: list[Output] = []
    ahead = Ahead((batch,), int(1e6 * (lead_ms or 0.0)), on=lead_ms is not None)
    stage = Stage(kind, Scheduler(settings), runner, done.append, waiter=waiter, ahead=ahead)
    loop = Loop([stage], bell)
    launch = runner.launch

    def with_payload(b: Any, find: Any) -> Any:
        step = launch(b, find)
        if copies is not None:
            with runner.on_stream():
                lease = copies.copy({"rows": rows})
            if lease is not None:
                leases.append(lease)
            while len(leases) > 4:
                leases.pop(0).release()
        return step

    runner.launch = with_payload  # type: ignore[method-assign]
    new = steps + 8
    for i in range(batch):
        spec, given, rows_in, closed = request(kind, i, config, prompt, new, device)
        stage.submit(spec, given, rows_in, closed=closed)
        if spec.paced:
            stage.scheduler.end_text(spec.id)
    while not stage.idle:
        if len(graphs.marks) == 4:  # the warm-up is over
            stage.stats.launch_ns = stage.stats.retire_ns = stage.stats.steps = 0
        if not loop.round():
            loop.sleep()
    torch.cuda.synchronize()
    for lease in leases:
        lease.release()
    waiter.close()
    marks = graphs.marks[4:]
    step_ms = [a.elapsed_time(b) for a, b in marks]
    gap_ms = [a[1].elapsed_time(b[0]) for a, b in itertools.pairwise(marks)]
    host_us = (stage.stats.launch_ns + stage.stats.retire_ns) / 1000 / max(1, stage.stats.steps)
    return {
        "stage": kind, "batch": batch, "depth": depth, "payload": payload, "steps": len(step_ms),
        "step_ms_p50": quantile(step_ms, 0.5), "step_ms_p99": quantile(step_ms, 0.99),
        "gap_us_p50": 1000 * quantile(gap_ms, 0.5), "gap_us_p99": 1000 * quantile(gap_ms, 0.99),
        "idle_share": sum(gap_ms) / (sum(gap_ms) + sum(step_ms[1:])),
        "host_us_per_step": host_us,
        "held": stage.stats.held, "late": stage.stats.late,
        "raw": {"step_ms": step_ms, "gap_ms": gap_ms},
    }  # fmt: skip


def wake_up(rounds: int = 2000) -> dict[str, float]:
    """From a ring on one thread to the other thread running: the loop's wake-up."""
    import threading

    bell, back, times = Bell(), Bell(), []
    rung = 0.0

    def sleeper() -> None:
        for _ in range(rounds):
            bell.sleep()
            times.append(time.perf_counter() - rung)
            back.ring()

    thread = threading.Thread(target=sleeper)
    thread.start()
    for _ in range(rounds):
        rung = time.perf_counter()
        bell.ring()
        back.sleep()
    thread.join()
    return {"p50_us": 1e6 * quantile(times, 0.5), "p99_us": 1e6 * quantile(times, 0.99)}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--config", choices=["released", "tiny"], default="released")
    p.add_argument("--stages", default="thinker,talker")
    p.add_argument("--batches", default="1,8,32")
    p.add_argument("--depths", default="1,2")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--prompt", type=int, default=128)
    p.add_argument("--lead-ms", type=float, help="launch so long before it is needed; default: at once")
    p.add_argument("--out", type=Path, default=Path("bench/results/overlap.json"))
    args = p.parse_args()
    config = parse(released_config() if args.config == "released" else tiny_config())
    result: dict[str, Any] = {"env": describe(), "args": {k: str(v) for k, v in vars(args).items()}, "runs": []}
    result["wake_up"] = wake_up()
    print("wake-up", result["wake_up"], flush=True)
    source = Source.open(config, "cuda", torch.bfloat16, "dummy", progress=False)
    for kind in args.stages.split(","):
        model = source.thinker() if kind == "thinker" else source.talker()
        for batch in map(int, args.batches.split(",")):
            for depth in map(int, args.depths.split(",")):
                for payload in (False, True):
                    run = measure(kind, model, config, batch, depth, payload, args.steps, args.prompt, args.lead_ms)
                    result["runs"].append(run)
                    print(
                        json.dumps(
                            {k: round(v, 4) if isinstance(v, float) else v for k, v in run.items() if k != "raw"}
                        ),
                        flush=True,
                    )
        del model
        torch.cuda.empty_cache()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
