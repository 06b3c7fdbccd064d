"""Speed of the code2wav step: frames per second for combinations of slots and frames per step.

    python bench/code2wav.py
    python bench/code2wav.py --config released --device cuda --dtype bfloat16 --slots 1,8 --frames 1,4 --graph

Weights are random (speed does not depend on them). Every slot takes a full share of frames in every step. Prints
one JSON object with the hardware, the versions and every step's time; one frame is 80 ms of audio.

On a GPU in bfloat16 the transformer, and what stands around the decoder's convolutions, are kernels of ours; with
--plain everything is PyTorch, to compare."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from stretto.kernels.fast import usable
from stretto.layers.targets import targets
from stretto.models.qwen3_omni.code2wav import Code2Wav
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT, Code2WavConfig, OmniConfig, parse
from stretto.models.qwen3_omni.tiny import released_config, tiny_config

Step = Callable[[], object]


def read_config(name: str) -> Code2WavConfig:
    match name:
        case "tiny":
            return parse(tiny_config()).code2wav
        case "released":
            return parse(released_config()).code2wav
        case directory:
            return OmniConfig.read(directory).code2wav


def random_model(config: Code2WavConfig, device: torch.device, dtype: torch.dtype) -> Code2Wav:
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


def make_step(model: Code2Wav, slots: int, frames: int, graph: bool) -> Step:
    """One step on static tensors, launched op by op or replayed as one captured graph."""
    device = model.code_embedding.weight.device
    state = model.state(slots, max(frames, 25))
    c = model.config
    codes = torch.randint(0, c.codebook_size, (slots, c.num_quantizers, frames), device=device)
    lengths = torch.full((slots,), frames, device=device)

    def step() -> object:
        return model.step(state, codes, lengths)

    if not graph:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries must have chosen their kernels and workspaces before the capture
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    return captured.replay


def measure(step: Step, steps: int, cuda: bool) -> list[float]:
    """Seconds per step. On a GPU: between two events around each step, with the launches running ahead."""
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


def environment(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    root = Path(__file__).resolve().parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny", help="tiny, released, or a checkpoint directory")
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--slots", default=[1, 4], type=integers)
    parser.add_argument("--frames", default=[1, 4], type=integers, help="frames per step and slot")
    parser.add_argument("--steps", default=30, type=int, help="measured steps per combination")
    parser.add_argument("--graph", action="store_true", help="also replay the step as a captured CUDA graph")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try its kernels for each shape")
    parser.add_argument("--plain", action="store_true", help="as with STRETTO_KERNELS=off")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    cuda = args.device.type == "cuda"
    if args.graph and not cuda:
        parser.error("--graph needs --device cuda")
    if args.plain:
        os.environ["STRETTO_KERNELS"] = "off"

    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    config = read_config(args.config)
    model = random_model(config, args.device, getattr(torch, args.dtype))
    frame_seconds = config.samples_per_frame / SAMPLE_RATE_OUT
    runs = []
    for graph in (False, True) if args.graph else (False,):
        for slots in args.slots:
            for frames in args.frames:
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
                line = {k: v for k, v in runs[-1].items() if k != "seconds"}
                print(json.dumps(line), file=sys.stderr, flush=True)
    result = {
        "bench": "code2wav",
        "config": args.config,
        "dtype": args.dtype,
        "kernels": cuda and usable(next(model.parameters())),
        "cudnn_benchmark": args.cudnn_benchmark,
        "parameters": sum(p.numel() for p in model.parameters()),
        "environment": environment(args.device),
        "runs": runs,
    }
    text = json.dumps(result)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
