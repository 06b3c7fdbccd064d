"""Thinker steps, talker frames and prompts of one model whose weights are stored in several ways,
beside each other in one run.

    python -m bench steps --parts formats --out bench/results/formats_h200.json   # 8 min at most
    python -m bench steps --parts formats --tiny                                 # tries the program

As `decode` measures them: captured graphs, random weights, the floor by the bytes that a step must
read. One format after the other; the last lines compare each with the first. What would begin after
--limit seconds is left out, and the result says so. Without a GPU steps are run as they are, and
times mean nothing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bench.harness.env import describe
from bench.harness.results import arguments, parser, quantile, write
from bench.steps.decode import BLOCK, copy_bandwidth, filled_cache, measure, measure_prompts, seated
from stretto.layers.decoder import PagedPass
from stretto.models.qwen3_omni.config import parse
from stretto.models.qwen3_omni.load import Source
from stretto.models.qwen3_omni.talker import Talker
from stretto.models.qwen3_omni.thinker import Thinker
from stretto.stage.runner.adapter import decode_step
from stretto.testing.qwen3_omni import FORMATS, released_config, released_formats, tiny_config

Found = dict[str, Any]


class OutOfTime(Exception):
    """The next measurement would begin too late."""


class Limit:
    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def check(self) -> None:
        if time.monotonic() > self.end:
            raise OutOfTime


@contextmanager
def loaded(weights: str, stage: str, tiny: bool, device: str) -> Iterator[Thinker | Talker]:
    config = parse(tiny_config() if tiny else released_config())
    formats = released_formats(weights)
    if not tiny or weights.startswith("int4"):  # blocks of FP8 do not divide the tiny sizes
        config = config.with_formats(formats)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    source = Source.open(config, device, dtype, "dummy", False)
    model = source.thinker() if stage == "thinker" else source.talker()
    try:
        yield model
    finally:
        del model, source
        if device == "cuda":
            torch.cuda.empty_cache()


def step(model: Thinker | Talker, batch: int, args: argparse.Namespace) -> Found:
    if args.device == "cuda":
        return measure(model, batch, args.context, args.steps, False, False)
    adapter, mode = seated(model, batch, args.context, False)
    inputs = torch.zeros(3, batch, dtype=torch.int64)
    inputs[0], inputs[1] = torch.arange(batch), args.context - 1
    times = [timed(lambda: decode_step(adapter, *inputs, mode)) for _ in range(3)]
    what = "thinker step" if isinstance(model, Thinker) else "talker frame"
    return {"what": what, "batch": batch, "p50_ms": [quantile(times, 0.5)], "bytes": 0.0}


def timed(run: Any) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def prompts(model: Thinker, args: argparse.Namespace) -> list[Found]:
    if args.device == "cuda":
        return measure_prompts(model, args.prompts)
    found = []
    for size in args.prompts:
        blocks = -(-size // BLOCK)
        cache = filled_cache(model, blocks)
        x = model.embed(torch.randint(0, 1000, (size,)))
        positions, paging = (
            torch.arange(size).float().expand(3, -1),
            cache.page([(list(range(blocks)), 0, size)]),
        )
        run = lambda: model.model(x, positions, PagedPass(cache, paging))  # noqa: B023, E731
        found.append({"tokens": size, "p50_ms": timed(run)})
    return found


def of_format(weights: str, args: argparse.Namespace, limit: Limit, add: Any) -> None:
    """All that is measured of one format; `add` takes each."""
    for stage in args.stages:
        limit.check()
        with loaded(weights, stage, args.tiny, args.device) as model:
            for batch in args.batches:
                limit.check()
                add(step(model, batch, args))
            if isinstance(model, Thinker) and args.prompts:
                limit.check()
                for one in prompts(model, args):
                    add({"what": "prompt", "batch": one["tokens"], **one})


def shown(found: Found, first: Found | None, bandwidth: float) -> str:
    p50 = found["p50_ms"][0] if isinstance(found["p50_ms"], list) else found["p50_ms"]
    line = f"{found['weights']:12} {found['what']:13} {found['batch']:5}: {p50:8.3f} ms"
    if found.get("bytes") and bandwidth:
        floor = found["bytes"] / bandwidth * 1e3
        line += f", floor {floor:7.3f}, {p50 / floor:5.2f} of it"
    if first is not None:
        base = first["p50_ms"][0] if isinstance(first["p50_ms"], list) else first["p50_ms"]
        line += f", {p50 / base:5.2f} of {first['weights']}"
    return line


@torch.inference_mode()
def main(given: Sequence[str]) -> int:
    p = parser("steps --parts formats", __doc__)
    p.add_argument("--weights", nargs="+", choices=FORMATS, default=["bf16", "int4", "fp8"])
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    p.add_argument("--prompts", type=int, nargs="*", default=[100, 500, 2000])
    p.add_argument(
        "--stages", nargs="+", choices=["thinker", "talker"], default=["thinker", "talker"]
    )
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--limit", type=float, default=480.0, help="seconds (default: %(default)s)")
    p.add_argument("--tiny", action="store_true", help="the tiny model, to try the program")
    args = p.parse_args(given)
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and not args.tiny:
        p.error("there is no CUDA device here; --tiny tries the program without one")
    limit = Limit(args.limit)
    bandwidth = copy_bandwidth() if args.device == "cuda" else 0.0
    result: Found = {
        "env": describe(), "arguments": arguments(args), "copy_bytes_per_s": bandwidth,
        "complete": True, "found": [],
    }  # fmt: skip
    firsts: dict[tuple[str, int], Found] = {}

    def add(found: Found) -> None:
        found["weights"] = weights
        first = firsts.setdefault((found["what"], found["batch"]), found)
        result["found"].append(found)
        print(shown(found, None if first is found else first, bandwidth), flush=True)
        write(args.out, result)

    try:
        for weights in args.weights:
            of_format(weights, args, limit, add)
    except OutOfTime:
        result["complete"] = False
        print("out of time", flush=True)
    write(args.out, result)
    return 0
