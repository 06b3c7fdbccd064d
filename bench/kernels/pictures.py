"""Encoding pictures at the size of the released model, launched kernel by kernel and as captured
graphs.

    python -m bench kernels --parts pictures --out bench/results/vision_h200.json      # 1 min

Weights and pixels are random. Three times for each way, medians printed, in milliseconds:

- host: from the call to its return, with an idle device. What the stage's thread cannot use for
  anything else.
- device: of the same work behind a pause that is longer than the host needs, so that no launch is
  waited for.
- both: from the call to the result, with an idle device.

`embed` is the part before the blocks, which both ways launch kernel by kernel. Several images
(NxWIDTHxHEIGHT) go together the plain way, and one after the other by graphs; the service takes the
plain way then, and this is to check that. An image that no graph is large enough for has no times
by graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness.env import describe
from bench.harness.results import parser, quantile, write
from stretto.models.qwen3_omni.config import parse
from stretto.models.qwen3_omni.patches import fit
from stretto.models.qwen3_omni.vision_encoder import VisionEncoder, VisionRows
from stretto.models.qwen3_omni.vision_graphs import SIZES, FrameGraphs
from stretto.models.random_weights import fill_dummy
from stretto.models.weights import build
from stretto.testing.qwen3_omni import released_config, tiny_config

IMAGES = "64x64,224x224,384x384,448x448,512x512,640x480,640x640,800x600,1024x768,2x224x224,2x448x448,4x224x224"  # noqa: E501
PIXELS = (3136, 12_845_056)  # the released processor's bounds
AHEAD_CYCLES = 20_000_000  # some ten milliseconds; doubled where the host needs more
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """So many images of one size."""

    text: str
    count: int
    rows: int  # of patches
    columns: int

    @classmethod
    def read(cls, text: str, patch: int, merge: int) -> Case:
        *count, width, height = (int(n) for n in text.split("x"))
        h, w = fit(height, width, patch * merge, *PIXELS)
        return cls(text, count[0] if count else 1, h // patch, w // patch)

    @property
    def patches(self) -> int:
        return self.rows * self.columns


class Bench:
    def __init__(
        self, encoder: VisionEncoder, graphs: FrameGraphs, stream: torch.cuda.Stream, repeats: int
    ) -> None:
        self.encoder, self.graphs, self.stream, self.repeats = encoder, graphs, stream, repeats
        self.ahead = AHEAD_CYCLES

    def case(self, case: Case) -> dict[str, Any]:
        encoder, size = self.encoder, (case.rows, case.columns)
        weight = encoder.patch_embed.proj.weight
        values = weight[0].numel()
        patches = torch.randn(
            case.count * case.patches, values, device=weight.device, dtype=weight.dtype
        )
        grids, each = [(1, *size)] * case.count, torch.split(patches, case.patches)

        def plain() -> VisionRows:
            return encoder.encode(patches, grids)

        def captured() -> list[VisionRows]:
            return [encoder.encode(one, [(1, *size)], self.graphs.run) for one in each]

        found: dict[str, Any] = {
            "images": case.text,
            "count": case.count,
            "patches": case.patches,
            "grid": size,
        }
        found["embed"] = self.times(lambda: encoder.embed(patches, [size] * case.count))
        found["plain"] = self.times(plain)
        fitting = next((s for s in self.graphs.sizes if s >= case.patches), None)
        if fitting is not None:
            found["graph"] = {
                "size": fitting,
                **self.times(captured),
                "distance": distance(plain(), captured()),
            }
        return found

    def times(self, call: Call) -> dict[str, Any]:
        """Milliseconds: medians, and every sample."""
        call()
        self.stream.synchronize()
        idle = [self.idle(call) for _ in range(self.repeats)]
        samples = {
            "host": [host for host, _ in idle],
            "device": [self.queued(call) for _ in range(self.repeats)],
            "both": [both for _, both in idle],
        }
        return {
            **{f"{name}_ms": quantile(s, 0.5) for name, s in samples.items()},
            "raw_ms": samples,
        }

    def idle(self, call: Call) -> tuple[float, float]:
        self.stream.synchronize()
        begin = time.perf_counter()
        kept = call()  # what it returns is not freed before the end
        host = time.perf_counter()
        self.stream.synchronize()
        end = time.perf_counter()
        del kept
        return 1e3 * (host - begin), 1e3 * (end - begin)

    def queued(self, call: Call) -> float:
        """On the device, everything being enqueued before it begins."""
        while True:
            self.stream.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(self.ahead)
            begin.record()
            kept = call()
            end.record()
            waited = begin.query()
            self.stream.synchronize()
            del kept
            if not waited:
                return begin.elapsed_time(end)
            if self.ahead > 100 * AHEAD_CYCLES:
                raise RuntimeError("the host waits for the device within one encoding")
            self.ahead *= 2


def distance(plain: VisionRows, captured: Sequence[VisionRows]) -> float:
    """Of the results, relative to their size; the largest over main rows and DeepStack levels."""
    pairs = [(plain.main, torch.cat([rows.main for rows in captured]))]
    pairs += [
        (level, torch.cat([rows.deep[i] for rows in captured]))
        for i, level in enumerate(plain.deep)
    ]
    return max(float((a.float() - b.float()).norm() / a.float().norm()) for a, b in pairs)


def say(found: dict[str, Any]) -> None:
    parts = [f"{found['images']:>11} {found['patches']:5} patches"]
    for way in ("embed", "plain", "graph"):
        if way in found:
            r = found[way]
            parts.append(
                f"{way} host {r['host_ms']:6.2f} device {r['device_ms']:6.2f} both "
                f"{r['both_ms']:6.2f}"
            )
    if "graph" in found:
        parts.append(f"in {found['graph']['size']}, {found['graph']['distance']:.1e} apart")
    print(" | ".join(parts), flush=True)


def make(config_of: dict[str, Any], dtype: torch.dtype) -> VisionEncoder:
    config = parse(config_of).thinker.vision
    encoder = build(lambda: VisionEncoder(config), "cuda", dtype)
    fill_dummy(encoder, 0, "thinker.visual.")
    return encoder


@torch.inference_mode()
def main(given: Sequence[str]) -> int:
    p = parser("kernels --parts pictures", __doc__)
    p.add_argument("--images", default=IMAGES, help="[N x] width x height, by commas")
    p.add_argument("--sizes", default=",".join(map(str, SIZES)), help="of the graphs, in patches")
    p.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    p.add_argument("--repeats", type=int, default=30)
    p.add_argument("--tiny", action="store_true", help="the tiny model, to try the program")
    args = p.parse_args(given)
    encoder = make(tiny_config() if args.tiny else released_config(), getattr(torch, args.dtype))
    c = encoder.config
    cases = [Case.read(text, c.patch_size, c.merge) for text in args.images.split(",")]
    stream = torch.cuda.Stream()
    graphs = FrameGraphs(encoder, [int(n) for n in args.sizes.split(",")])
    torch.cuda.synchronize()
    before, begin = torch.cuda.memory_reserved(), time.perf_counter()
    graphs.capture(stream)
    torch.cuda.synchronize()
    result: dict[str, Any] = {
        "env": describe(),
        "dtype": args.dtype,
        "tiny": args.tiny,
        "sizes": graphs.sizes,
        "capture_s": time.perf_counter() - begin,
        "capture_bytes": torch.cuda.memory_reserved() - before,
        "cases": [],
    }
    print(
        f"{len(graphs.sizes)} graphs: {result['capture_s']:.1f} s, "
        f"{result['capture_bytes'] / 2**20:.0f} MiB reserved"
    )
    with torch.cuda.stream(stream):
        bench = Bench(encoder, graphs, stream, args.repeats)
        for case in cases:
            found = bench.case(case)
            result["cases"].append(found)
            say(found)
    write(args.out, result)
    return 0
