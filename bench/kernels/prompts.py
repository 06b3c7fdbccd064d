"""Passes over prompts at the sizes of the real model: whole passes, each kernel of a layer,
variants of the products.

    python -m bench kernels --parts prompts --out bench/results/prefill_h200.json      # 1 to 2 min
    python -m bench kernels --parts prompts --passes 64 128 256  # only passes, of so many rows

Passes are timed as a graph, which has room for as many sequences as a server's (`--sequences`), and
launched one by one. Kernels are captured in a graph that goes through all layers, so that neither
the launch nor a warm cache decides the number. A variant that fails is reported as such (a negative
time, the reason printed), and the rest goes on. The order is by importance: what comes after the
time limit is left out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from bench.harness.env import describe
from bench.harness.results import parser, write
from stretto.kernels.triton import grouped
from stretto.kernels.triton.attention_prefill import attend
from stretto.kernels.triton.prefill import add_norm, combine, qkv_write
from stretto.kernels.triton.tuning import name_of
from stretto.layers.config import DecoderConfig, MoeConfig
from stretto.layers.decoder import Decoder
from stretto.layers.decoder_layer import DecoderLayer
from stretto.layers.mlp import MoeMLP
from stretto.layers.prefill import Ragged
from stretto.models.qwen3_omni.audio_encoder import AudioEncoder
from stretto.models.qwen3_omni.audio_graphs import WindowGraphs
from stretto.models.qwen3_omni.config import parse
from stretto.models.qwen3_omni.vision_encoder import VisionEncoder
from stretto.stage.runner.prefill_graphs import PrefillGraphs
from stretto.stage.runner.rows import DeviceRows
from stretto.testing.qwen3_omni import released_config

Report = Callable[[str, float], None]
Launch = dict[str, int]

SIZES = (16, 100, 128, 512, 1024, 2048, 2500)
LIMIT_S = 70.0
DEVICE = "cuda"
THINKER = DecoderConfig(
    152064,
    2048,
    48,
    32,
    4,
    128,
    1e-6,
    1e6,
    (24, 20, 20),
    65536,
    None,
    MoeConfig(128, 8, 768, True, None),
)
TALKER = DecoderConfig(
    3072,
    1024,
    20,
    16,
    2,
    128,
    1e-6,
    1e6,
    (24, 20, 20),
    65536,
    None,
    MoeConfig(128, 6, 384, True, 768),
)


def launch(m: int, n: int, k: int, warps: int, stages: int, swap: int = 0, half: int = 0) -> Launch:
    return {
        "M": m,
        "N": n,
        "K": k,
        "SWAP": swap,
        "HALF": half,
        "num_warps": warps,
        "num_stages": stages,
    }


SWEEP: dict[int, list[Launch]] = {  # rows of the pass -> candidates for both products
    100: [
        launch(16, 64, 128, 4, 3, swap=1),
        launch(16, 64, 128, 4, 5, swap=1),
        launch(16, 64, 64, 4, 6, swap=1),
        launch(16, 128, 64, 4, 5, swap=1),
        launch(16, 128, 128, 8, 3, swap=1),
        launch(16, 64, 128, 4, 3),
    ],
    2500: [
        launch(128, 128, 64, 8, 4, half=1),
        launch(128, 128, 64, 8, 4),
        launch(128, 128, 64, 8, 3, half=1),
        launch(64, 128, 64, 4, 4),
        launch(64, 128, 64, 8, 4),
    ],
    512: [
        launch(64, 64, 64, 4, 4),
        launch(64, 64, 64, 4, 4, half=1),
        launch(64, 128, 64, 4, 4),
        launch(32, 64, 128, 4, 3, swap=1),
    ],
}


ATTEND = [
    (16, 64, 8, 3),
    (16, 64, 8, 2),
    (16, 128, 8, 2),
    (8, 64, 4, 3),
    (8, 64, 4, 2),
]  # queries, keys, warps, stages


class Model:
    """A decoder of random weights, a cache, and one long prompt to cut passes from."""

    def __init__(self, c: DecoderConfig, layers: int, tokens: int) -> None:
        device, dtype = torch.device(DEVICE), torch.bfloat16
        c = replace(c, num_layers=layers)
        self.decoder = random_weights(lambda: Decoder(c))
        self.decoder.prepare(device)
        blocks = -(-tokens // 16)
        self.cache = self.decoder.cache(blocks + 1, 16, device, dtype)
        self.rows = DeviceRows(1, blocks, 4, self.cache)
        self.rows.put_blocks([(0, 0, torch.randperm(blocks).tolist())])
        self.x = torch.randn(tokens, c.hidden_size, device=device, dtype=dtype)
        self.positions = torch.arange(tokens, device=device, dtype=torch.float32).expand(3, -1)

    @property
    def layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.decoder.layers if isinstance(layer, DecoderLayer)]


class Bench:
    def __init__(self, report: Report) -> None:
        self.report, self.begin = report, time.perf_counter()
        self.stream = torch.cuda.Stream()

    def time(self, name: str, measure: Callable[[], float]) -> float | None:
        """Report microseconds, or -1 and the reason."""
        if time.perf_counter() - self.begin > LIMIT_S:
            return None
        try:
            torch.cuda.synchronize()  # inputs were made on another stream
            with torch.cuda.stream(self.stream):
                took = measure()
        except Exception as e:  # noqa: BLE001 - one variant must not cost the others
            print(f"{name}: {type(e).__name__}: {str(e)[:300]}", flush=True)
            torch.cuda.synchronize()
            self.report(name, -1.0)
            return None
        self.report(name, took)
        return took

    def chain(self, call: Callable[[int], object], length: int, replays: int = 5) -> float:
        """Microseconds per call, of a graph of `length` calls."""
        call(0)
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for i in range(length):
                call(i)
        return events(graph.replay, replays) / length


def events(call: Callable[[], object], repeats: int) -> float:
    """Median microseconds on the device, after one call to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def wall(call: Callable[[], object], repeats: int) -> float:
    """Median microseconds from the first launch to the last result."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


@torch.inference_mode()
def run_passes(report: Report, sequences: int, sizes: Sequence[int], layers: int = 48) -> None:
    """Only whole passes, of both models."""
    bench = Bench(report)
    for name, config in (("thinker", THINKER), ("talker", TALKER)):
        model = Model(config, min(layers, config.num_layers), max(sizes))
        passes(bench, name, model, tuple(sizes), sequences, eager=False)
        del model
        torch.cuda.empty_cache()


@torch.inference_mode()
def run(report: Report, sequences: int, layers: int = 48) -> None:
    """Report (name, µs)."""
    bench = Bench(report)
    model = Model(THINKER, layers, max(SIZES))
    passes(bench, "thinker", model, SIZES, sequences)
    for rows in (100, 2500):
        kernels(bench, model, rows, sequences)
    for rows in SWEEP:
        sweep(bench, model, rows)
    for rows in (16, 512, 2048):
        kernels(bench, model, rows, sequences)
    del model
    torch.cuda.empty_cache()
    passes(bench, "talker", Model(TALKER, min(layers, 20), 512), (16, 100, 512), sequences)
    encoders(bench)


def encoders(bench: Bench) -> None:
    """Ten seconds of sound, eagerly and by graphs; a picture of 640 x 640."""
    c = parse(released_config()).thinker
    audio, vision = (
        random_weights(lambda: AudioEncoder(c.audio)),
        random_weights(lambda: VisionEncoder(c.vision)),
    )
    mel = torch.randn(c.audio.num_mel_bins, 1000, device=DEVICE, dtype=torch.bfloat16) * 0.5
    bench.time("audio encoder eager, 10 s", lambda: wall(lambda: audio.encode(mel), 5))

    def captured() -> float:
        graphs = WindowGraphs(audio)
        graphs.capture(bench.stream)
        return wall(lambda: audio.encode(mel, graphs.run), 9)

    bench.time("audio encoder graph, 10 s", captured)
    patches = torch.randn(
        1600, vision.patch_embed.proj.weight[0].numel(), device=DEVICE, dtype=torch.bfloat16
    )
    bench.time(
        "vision encoder eager, 1600 patches",
        lambda: wall(lambda: vision.encode(patches, [(1, 40, 40)]), 5),
    )


M = TypeVar("M", bound=nn.Module)


def random_weights(make: Callable[[], M]) -> M:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        module = make()
    torch.set_default_dtype(before)
    for p in module.parameters():
        if p.dim() == 1:
            p.data.fill_(1.0)
        else:
            p.data.normal_(0, (p.numel() // p.shape[0]) ** -0.5)
    return module


def passes(
    bench: Bench,
    name: str,
    model: Model,
    sizes: tuple[int, ...],
    sequences: int,
    eager: bool = True,
) -> None:
    graphs = PrefillGraphs(
        model.decoder, model.cache, model.rows, sizes=sizes, max_sequences=sequences
    )

    def capture() -> float:
        start = time.perf_counter()
        graphs.capture(bench.stream)
        return (time.perf_counter() - start) * 1e6

    bench.time(f"{name} capture of {len(sizes)} graphs, with compilation", capture)
    for n in sizes:
        one_pass(bench, f"{name} pass", model, graphs, n, eager)


def one_pass(
    bench: Bench, name: str, model: Model, graphs: PrefillGraphs, n: int, eager: bool
) -> None:
    x, positions = model.x[:n], model.positions[:, :n]
    paging = model.rows.mixed_paging([(0, 0, n)])
    ragged = Ragged.of(paging)

    def graph() -> None:
        assert graphs.run(x, positions, paging) is not None

    bench.time(f"{name} graph rows={n}", lambda: wall(graph, 7))

    def launched() -> None:
        cos, sin = model.decoder.rope(positions, x.dtype)
        model.decoder.prefill(x, cos, sin, model.cache, ragged)

    if eager:
        bench.time(f"{name} eager rows={n}", lambda: wall(launched, 3))


def kernels(bench: Bench, model: Model, n: int, sequences: int) -> None:
    layers, c = model.layers, model.decoder.config
    x = model.x[:n]
    paging = model.rows.mixed_paging([(0, 0, n)])
    ragged = Ragged.of(paging)
    assert model.decoder.fused is not None
    counters, empty = model.decoder.fused.split_counters, sequences - 1
    # as in a graph that has room for more sequences
    starts = torch.cat((ragged.starts, ragged.starts.new_full((empty,), n)))
    lengths = torch.cat((ragged.lengths, ragged.lengths.new_zeros(empty)))
    tables = ragged.tables.expand(sequences, -1)
    cos, sin = model.decoder.rope(model.positions[:, :n], x.dtype)
    qkv = F.linear(x, layers[0].self_attn.qkv.weight)
    q = torch.randn(n, c.num_heads, c.head_dim, device=x.device, dtype=x.dtype)
    gain = layers[0].input_layernorm.weight
    mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, MoeMLP)]
    logits = F.linear(x, mlps[0].gate.weight)
    routed = grouped.route(logits, mlps[0].top_k, True, ragged.count)
    y = torch.randn(routed.order.shape[0], c.hidden_size, device=x.device, dtype=x.dtype)
    h = torch.randn(
        routed.order.shape[0], mlps[0].experts.down.shape[2], device=x.device, dtype=x.dtype
    )
    calls: dict[str, Callable[[int], object]] = {
        "gate_up": lambda i: grouped.gate_up(x, mlps[i].experts.gate_up, routed),
        "down": lambda i: grouped.down(h, mlps[i].experts.down, routed),
        "experts by torch": lambda i: grouped.library_experts(
            x, mlps[i].experts.gate_up, mlps[i].experts.down, routed
        ),
        "attend": lambda i: attend(q, model.cache.data[i], starts, lengths, tables,
        counters=counters),
        "qkv product": lambda i: F.linear(x, layers[i].self_attn.qkv.weight),
        "o product": lambda i: F.linear(q.flatten(1), layers[i].self_attn.o_proj.weight),
        "router product": lambda i: F.linear(x, mlps[i].gate.weight),
        "route and sort": lambda i: grouped.route(logits, mlps[i].top_k, True, ragged.count),
        "qkv_write": lambda i: qkv_write(
            qkv, layers[i].self_attn.q_norm.weight, layers[i].self_attn.k_norm.weight, 1e-6, cos,
            sin,
            model.cache.data[i], ragged.slots, ragged.count,
        ),
        "add_norm": lambda i: add_norm(x, x, gain, 1e-6, ragged.count),
        "combine": lambda i: combine(x, y, routed.weights, gain, 1e-6, ragged.count),
    }  # fmt: skip
    for name, call in calls.items():
        bench.time(f"{name} rows={n}", lambda call=call: bench.chain(call, len(layers)))
    if n < 2048:
        return
    for queries, keys, warps, stages in ATTEND:
        launch = {"QUERIES": queries, "N": keys, "num_warps": warps, "num_stages": stages}

        def one(i: int, launch: Launch = launch) -> object:
            return attend(
                q, model.cache.data[i], ragged.starts, ragged.lengths, ragged.tables, launch
            )

        name = f"prefill_attend rows={n} {' '.join(f'{k}={v}' for k, v in launch.items())}"
        bench.time(name, lambda one=one: bench.chain(one, len(layers)))


def sweep(bench: Bench, model: Model, n: int) -> dict[str, Launch]:
    """Every candidate for both products at one number of rows; the best of each, as the tuning file
    keeps them."""
    mlps = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeMLP)]
    x = model.x[:n]
    count = torch.tensor([n], dtype=torch.int32, device=x.device)
    routed = grouped.route(F.linear(x, mlps[0].gate.weight), mlps[0].top_k, True, count)
    experts, hidden, size = mlps[0].experts.down.shape
    h = torch.randn(routed.order.shape[0], size, device=x.device, dtype=x.dtype)
    per_expert = grouped.per_expert(routed.order.shape[0], experts)
    best: dict[str, tuple[float, Launch]] = {}
    for candidate in SWEEP[n]:
        wide = candidate | {
            "N": 2 * candidate["N"]
        }  # down has one weight tile where gate_up has two
        if wide["N"] > 256:
            wide = candidate
        calls: dict[str, tuple[Launch, Callable[[int], object]]] = {
            "prefill_gate_up": (
                candidate,
                lambda i, c=candidate: grouped.gate_up(x, mlps[i].experts.gate_up, routed, c),
            ),
            "prefill_down": (
                wide,
                lambda i, c=wide: grouped.down(h, mlps[i].experts.down, routed, c),
            ),
        }
        for kernel, (config, call) in calls.items():
            text = " ".join(f"{k}={v}" for k, v in config.items())
            took = bench.time(
                f"{kernel} rows={n} {text}", lambda call=call: bench.chain(call, len(mlps), 3)
            )
            key = name_of(kernel, (experts, hidden, size, per_expert))
            if took is not None and (key not in best or took < best[key][0]):
                best[key] = took, config
    for key, (took, config) in best.items():
        print(f"best {key}: {took:.1f} us {config}", flush=True)
    return {key: config for key, (_, config) in best.items()}


def main(given: Sequence[str]) -> int:
    p = parser("kernels --parts prompts", __doc__)
    p.add_argument(
        "--sequences",
        type=int,
        default=128,
        help="that a graph has room for (default: %(default)s)",
    )
    p.add_argument(
        "--passes",
        type=int,
        nargs="+",
        metavar="ROWS",
        help="only whole passes, captured, of so many rows",
    )
    args = p.parse_args(given)
    result: dict[str, Any] = {"env": describe(), "sequences": args.sequences, "times_us": {}}

    def report(name: str, us: float) -> None:
        print(f"{name:90} {us:12.1f} us", flush=True)
        result["times_us"][name] = us
        write(args.out, result)

    if args.passes:
        run_passes(report, args.sequences, args.passes)
    else:
        run(report, args.sequences)
    return 0
