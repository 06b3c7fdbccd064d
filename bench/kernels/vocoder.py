"""A step of the vocoder: frames per second for combinations of slots and frames per step.

    # 1 min
    python -m bench kernels --parts vocoder --config released --device cuda --dtype bfloat16 \\
        --slots 1,8,32 --frames 1,4 --steps 100 --graph --cudnn-benchmark \\
        --out bench/results/code2wav_h200.json
    # as graphs, in the shapes that a server captures
    python -m bench kernels --parts vocoder --config released --device cuda --dtype bfloat16 \\
        --captured --cudnn-benchmark
    python -m bench kernels --parts vocoder  # the tiny model, on any machine

Weights are random (speed does not depend on them). Every slot takes a full share of frames in every
step; one frame is 80 ms of audio.

On a GPU in bfloat16 the transformer, and what stands around the decoder's convolutions, are kernels
of ours; with --plain everything is PyTorch, to compare."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from bench.harness.env import describe
from bench.harness.results import parser, write
from stretto.kernels.triton import usable
from stretto.layers.targets import targets
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT, OmniConfig, parse
from stretto.models.speech.config import VocoderConfig
from stretto.stage.vocoder.config import CodecConfig
from stretto.testing.qwen3_omni import released_config, tiny_config

SLOTS = 128  # that a server has by default

Step = Callable[[], object]


def read_config(name: str) -> VocoderConfig:
    match name:
        case "tiny":
            return parse(tiny_config()).code2wav
        case "released":
            return parse(released_config()).code2wav
        case directory:
            return OmniConfig.read(directory).code2wav


def random_model(config: VocoderConfig, device: torch.device, dtype: torch.dtype) -> Code2Wav:
    with torch.device("meta"):
        model = Code2Wav(config)
    model = model.to(dtype).to_empty(device=device)
    torch.manual_seed(0)
    for name, view in targets(model, "").items():
        if view.dim() > 1:
            view.normal_(0, view[0].numel() ** -0.5)
        elif name.endswith("norm.weight"):
            view.fill_(1.0)
        else:
            view.normal_(0, 0.1)
    model.prepare()
    return model


def make_step(model: Code2Wav, streams: int, frames: int, graph: bool) -> Step:
    """One step on static tensors, launched op by op or replayed as one captured graph. Its streams
    are some of those that a server has room for, as there."""
    device = model.code_embedding.weight.device
    state = model.state(max(SLOTS, streams), max(frames, 25))
    c = model.config
    codes = torch.randint(0, c.codebook_size, (streams, c.num_quantizers, frames), device=device)
    lengths = torch.full((streams,), frames, device=device)
    slots = torch.randperm(state.num_slots, device=device)[:streams]

    def step() -> object:
        return model.step(state, codes, lengths, slots)

    if not graph:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(
        side
    ):  # libraries must have chosen their kernels and workspaces before the capture
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    return captured.replay


def measure(step: Step, steps: int, cuda: bool) -> list[float]:
    """Seconds per step. On a GPU: between two events around each step, with the launches running
    ahead."""
    for _ in range(3):
        step()
    if not cuda:
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return times
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def combinations(args: argparse.Namespace) -> list[tuple[bool, int, int]]:
    """Whether as a graph, slots, frames."""
    if args.captured:
        return [(True, slots, frames) for slots, frames in CodecConfig().captured().shapes()]
    ways = (False, True) if args.graph else (False,)
    return [
        (graph, slots, frames) for graph in ways for slots in args.slots for frames in args.frames
    ]


def main(given: Sequence[str]) -> int:
    p = parser("kernels --parts vocoder", __doc__)
    p.add_argument("--config", default="tiny", help="tiny, released, or a checkpoint directory")
    p.add_argument("--device", default="cpu", type=torch.device)
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    p.add_argument("--slots", default=[1, 4], type=integers)
    p.add_argument("--frames", default=[1, 4], type=integers, help="frames per step and slot")
    p.add_argument("--steps", default=30, type=int, help="measured steps per combination")
    p.add_argument(
        "--graph", action="store_true", help="also replay the step as a captured CUDA graph"
    )
    p.add_argument(
        "--captured", action="store_true", help="only graphs, of the slots and frames of a server's"
    )
    p.add_argument(
        "--cudnn-benchmark", action="store_true", help="let cuDNN try its kernels for each shape"
    )
    p.add_argument("--plain", action="store_true", help="as with STRETTO_KERNELS=off")
    args = p.parse_args(given)
    cuda = args.device.type == "cuda"
    if (args.graph or args.captured) and not cuda:
        p.error("graphs need --device cuda")
    if args.plain:
        os.environ["STRETTO_KERNELS"] = "off"

    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    config = read_config(args.config)
    model = random_model(config, args.device, getattr(torch, args.dtype))
    frame_seconds = config.samples_per_frame / SAMPLE_RATE_OUT
    runs = []
    for graph, slots, frames in combinations(args):
        times = measure(make_step(model, slots, frames, graph), args.steps, cuda)
        median = statistics.median(times)
        speed = slots * frames / median
        runs.append(
            {
                "slots": slots,
                "frames": frames,
                "graph": graph,
                "median_ms": round(median * 1e3, 4),
                "frames_per_s": round(speed, 1),
                "audio_s_per_s": round(speed * frame_seconds, 2),
                "seconds": times,
            }
        )
        print("  ".join(f"{k} {v}" for k, v in runs[-1].items() if k != "seconds"), flush=True)
    result = {
        "env": describe(),
        "config": args.config,
        "dtype": args.dtype,
        "kernels": cuda and usable(next(model.parameters())),
        "cudnn_benchmark": args.cudnn_benchmark,
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "runs": runs,
    }
    write(args.out, result)
    return 0
