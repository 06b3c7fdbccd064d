"""Thinker steps and talker frames on a GPU, at several batch sizes, and the time that their memory
reads need.

    python -m bench steps --trace --out bench/results/steps_h200.json                        # 1 min
    python -m bench steps --stages thinker --expert-weights float8 --out
    bench/results/steps_h200_float8.json
    python -m bench steps --weights int4 --batches 1 8 32 128 --prompts 16 100 500 2000

Captured graphs of the full-size model with random weights. The rows hold different random tokens,
so that they choose different experts. Every step is timed by CUDA events around its graph, in two
identical passes. Also counted: the experts that a layer reads in a step, and with them the bytes
that must be read. At the copy bandwidth measured here, these bytes give the floor of a step's time.
`--trace` also records when each kernel of a step ran."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bench.harness.env import describe
from bench.harness.results import arguments, parser, quantile, write
from bench.report.measured import second
from stretto.kernels.reference.paged import KVCache
from stretto.layers.decoder import Decoder
from stretto.layers.mlp import MoeMLP
from stretto.models.qwen3_omni.config import parse
from stretto.models.qwen3_omni.load import Source
from stretto.models.qwen3_omni.params import RESIDUAL
from stretto.models.qwen3_omni.talker import Talker, TalkerAdapter
from stretto.models.qwen3_omni.thinker import Thinker, ThinkerAdapter
from stretto.stage.runner.adapter import decode_step
from stretto.stage.runner.columns import SamplingMode
from stretto.stage.runner.graphs import DecodeGraphs
from stretto.testing.qwen3_omni import FORMATS, released_config, released_formats, tiny_config
from stretto.types import GREEDY, SamplingParams

CODE0 = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05)
"""SamplingMode the released talker picks code 0 of a frame."""
BLOCK = 16


def copy_bandwidth(size: int = 4 << 30) -> float:
    """Bytes read and written per second by a large copy."""
    a, b = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = []
    for _ in range(8):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return 2 * size / quantile(times, 0.5) * 1e3


def filled_cache(model: Thinker | Talker, blocks: int) -> KVCache:
    cache = model.cache(blocks + 1, BLOCK)
    for layer in cache.data:
        layer.normal_()
    return cache


def seat(
    adapter: ThinkerAdapter | TalkerAdapter,
    batch: int,
    context: int,
    sampling: SamplingParams | None,
) -> None:
    """Give each row its blocks, words and sampling parameters, as a request would have left
    them."""
    per_row = -(-(context + 512) // BLOCK)
    for row in range(batch):
        adapter.rows.join(row, range(row * per_row, (row + 1) * per_row), 0.0, ())
        if isinstance(adapter, ThinkerAdapter):
            adapter.params.write(row, sampling or GREEDY)
        else:
            adapter.code0.write(row, CODE0)
            adapter.residual.write(row, RESIDUAL)
    if isinstance(adapter, ThinkerAdapter):
        adapter.next[:batch] = torch.randint(
            0, 150_000 if adapter.rows.seen.shape[1] > 150_000 else 1000, (batch,)
        ).to(adapter.next)
    else:
        adapter.embedding.normal_(std=0.02)


class Routes:
    """Counts, in an eager step, how many different experts each layer of a decoder reads."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.distinct = decoder, []

    def count(self, run: Any) -> float:
        from stretto.kernels.triton import experts_choice, experts_many, packed_experts

        plain, found = experts_choice.route, self.distinct
        users: tuple[Any, ...] = (experts_many, packed_experts)

        def route(*args: Any, **kwargs: Any) -> Any:
            parts = plain(*args, **kwargs)
            found.append(parts.sum(0))
            return parts

        for user in users:
            user.route = route
        try:
            run()
        finally:
            for user in users:
                user.route = plain
        moe = self.decoder.config.moe
        assert moe is not None
        if not found:  # one row is routed inside its kernel
            return float(moe.top_k)
        ids = [logits[:, : moe.num_experts].topk(moe.top_k).indices for logits in found]
        return float(np.mean([len(chosen.unique()) for chosen in ids]))


def bytes_read(model: Thinker | Talker, distinct: float, batch: int, context: int) -> float:
    """The fewest bytes of a step: every weight in use once, and the keys and values."""

    def decoder(d: Decoder) -> float:
        total = 0.0
        for layer in d.layers:
            for name, p in (*layer.named_parameters(), *layer.named_buffers()):
                total += p.nbytes * (distinct / p.shape[0] if ".experts." in name else 1.0)
        return total

    c = model.model.config
    cache = batch * context * c.num_layers * 2 * c.num_kv_heads * c.head_dim * 2.0
    if isinstance(model, Thinker):
        return decoder(model.model) + model.lm_head.weight.nbytes + cache
    predictor = model.code_predictor
    heads = sum(p.nbytes for p in predictor.lm_head.parameters())
    passes = predictor.num_groups - 1
    return (
        decoder(model.model)
        + model.codec_head.weight.nbytes
        + cache
        + passes * decoder(predictor.model)
        + heads
    )


def seated(
    model: Thinker | Talker, batch: int, context: int, sampled: bool
) -> tuple[ThinkerAdapter | TalkerAdapter, SamplingMode]:
    """A adapter with `batch` rows at position `context`, and how they pick."""
    thinker = isinstance(model, Thinker)
    per_row = -(-(context + 512) // BLOCK)
    cache = filled_cache(model, batch * per_row)
    adapter = (ThinkerAdapter if thinker else TalkerAdapter)(model, cache, batch, per_row * BLOCK)  # type: ignore[arg-type]
    seat(
        adapter,
        batch,
        context,
        SamplingParams(0.7, top_k=20, top_p=0.8, seed=1) if sampled else None,
    )
    return adapter, SamplingMode(sampled or not thinker, not thinker)


def ready(
    model: Thinker | Talker, batch: int, context: int, sampled: bool, stream: torch.cuda.Stream
) -> tuple[DecodeGraphs, SamplingMode, float]:
    """A captured step of `batch` seated rows, how it picks, and the different experts that a layer
    reads in it."""
    adapter, mode = seated(model, batch, context, sampled)
    distinct = float("nan")
    with torch.cuda.stream(stream):
        inputs = torch.zeros(3, batch, dtype=torch.int64, device="cuda")
        inputs[0] = torch.arange(batch, device="cuda")
        inputs[1] = context - 1
        decoder = model.model
        if (
            any(isinstance(layer.mlp, MoeMLP) for layer in decoder.layers)
            and decoder.fused is not None
        ):
            distinct = Routes(decoder).count(
                lambda: decode_step(adapter, inputs[0], inputs[1], inputs[2], mode)
            )
    graphs = DecodeGraphs(adapter, sizes=(batch,), modes=[mode])
    graphs.capture(stream)
    return graphs, mode, distinct


def measure(
    model: Thinker | Talker, batch: int, context: int, steps: int, sampled: bool, trace: bool
) -> dict[str, Any]:
    thinker = isinstance(model, Thinker)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graphs, mode, distinct = ready(model, batch, context, sampled, stream)
    host = np.zeros((3, batch), np.int64)
    host[0] = np.arange(batch)
    runs = []
    for _ in range(2):
        marks = []
        with torch.cuda.stream(stream):
            for i in range(steps + 20):
                host[1] = context - 1 + i
                start, stop = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                start.record()
                graphs.replay(host, mode)
                stop.record()
                marks.append((start, stop))
            stream.synchronize()
        runs.append([a.elapsed_time(b) for a, b in marks[20:]])
    timeline = None
    if trace:
        from torch.profiler import ProfilerActivity, profile

        with torch.cuda.stream(stream), profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(3):
                graphs.replay(host, mode)
            stream.synchronize()
        events = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        events.sort(key=lambda e: e.time_range.start)
        zero = events[0].time_range.start
        timeline = second([(e.name[:40], e.time_range.start - zero, e.device_time) for e in events])
    return {
        "timeline": timeline,
        "what": ("thinker step" if thinker else "talker frame")
        + (" (sampled)" if sampled and thinker else ""),
        "batch": batch,
        "context": context,
        "p50_ms": [quantile(r, 0.5) for r in runs],
        "p99_ms": [quantile(r, 0.99) for r in runs],
        "distinct_experts": distinct,
        "bytes": bytes_read(model, distinct, batch, context),
        "raw_ms": runs,
    }


def measure_prompts(model: Thinker, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Passes over whole prompts of random words, as captured graphs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    longest, found = max(sizes), []
    blocks = -(-longest // BLOCK)
    cache = filled_cache(model, blocks)
    adapter = ThinkerAdapter(model, cache, 1, blocks * BLOCK)
    assert adapter.prompts is not None, "kernels are switched off"
    adapter.prompts.capture(stream)
    vocabulary = model.config.thinker.text.vocab_size
    for size in sizes:
        with torch.cuda.stream(stream):
            x = model.embed(torch.randint(0, vocabulary, (size,), device="cuda"))
            positions = torch.arange(size, device="cuda").float().expand(3, -1)
            paging = cache.page([(list(range(blocks)), 0, size)])
            marks = []
            for _ in range(30):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                adapter.prompts.run(x, positions, paging)
                stop.record()
                marks.append((start, stop))
            stream.synchronize()
        times = [a.elapsed_time(b) for a, b in marks[10:]]
        found.append({"tokens": size, "p50_ms": quantile(times, 0.5), "raw_ms": times})
        print(f"prompt of {size:5} tokens: p50 {found[-1]['p50_ms']:6.3f} ms", flush=True)
    return found


def add_step_arguments(p: argparse.ArgumentParser, batches: Sequence[int]) -> None:
    p.add_argument(
        "--batches", type=int, nargs="+", default=batches, help="rows (default: %(default)s)"
    )
    p.add_argument(
        "--expert-weights", choices=["full", "float8"], default="full", help="of the thinker"
    )
    p.add_argument(
        "--weights", choices=FORMATS, default="bf16", help="how they are stored, as in checkpoints"
    )
    p.add_argument("--tiny", action="store_true", help="the tiny model, to try the program")


def opened(args: argparse.Namespace) -> tuple[Source, dict[str, Any]]:
    """The models to measure, and the result to fill."""
    config = parse(tiny_config() if args.tiny else released_config())
    config = config.with_formats(released_formats(args.weights))
    source = Source.open(config, "cuda", torch.bfloat16, "dummy", False, args.expert_weights)
    return source, {
        "env": describe(),
        "arguments": arguments(args),
        "expert_weights": args.expert_weights,
        "weights": args.weights,
    }


@torch.inference_mode()
def main(given: Sequence[str]) -> int:
    p = parser("steps --parts decode", __doc__)
    add_step_arguments(p, [1, 8, 32])
    p.add_argument(
        "--stages", nargs="+", choices=["thinker", "talker"], default=["thinker", "talker"]
    )
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--prompts", type=int, nargs="*", default=[], help="tokens, for the thinker")
    p.add_argument(
        "--trace", action="store_true", help="also record when each kernel of a step ran"
    )
    args = p.parse_args(given)
    source, result = opened(args)
    result |= {"copy_bytes_per_s": copy_bandwidth(), "steps": []}
    print(f"copy: {result['copy_bytes_per_s'] / 1e12:.2f} TB/s", flush=True)
    for kind in args.stages:
        model = source.thinker() if kind == "thinker" else source.talker()
        for batch in args.batches:
            for sampled in (False, True) if kind == "thinker" else (True,):
                traced = args.trace and not (
                    sampled and kind == "thinker"
                )  # it would say the same again
                run = measure(model, batch, args.context, args.steps, sampled, traced)
                run["floor_ms"] = run["bytes"] / result["copy_bytes_per_s"] * 1e3
                result["steps"].append(run)
                print(
                    f"{run['what']:24} batch {batch:3}: p50 {run['p50_ms'][0]:6.3f} / "
                    f"{run['p50_ms'][1]:6.3f} ms, "
                    f"floor {run['floor_ms']:6.3f} ms, distinct experts "
                    f"{run['distinct_experts']:.1f}",
                    flush=True,
                )
                write(args.out, result)
        if isinstance(model, Thinker) and args.prompts:
            result["prompts"] = measure_prompts(model, args.prompts)
            write(args.out, result)
        del model
        torch.cuda.empty_cache()
    return 0
