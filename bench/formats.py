"""One model whose weights are stored in several ways, served by turns; and quantised ones in little
memory.

    python -m bench formats --out bench/results/formats_served_h200.json       # 9 min at most
    python -m bench formats --weights bf16 int4 --rounds 2 --levels 1 32 128 --caps
    python -m bench formats --model tiny --device cpu --quick                  # tries the program

Each turn starts `stretto serve` with random weights, and listeners at each of --levels (`bench
serve --parts latency`): first audio, and seconds of speech made in a second. Then servers whose
memory is capped, to --caps GiB of the card: the plan by --memory-share, and what PyTorch may
allocate by its own limit, so that more ends the server. A cap of 24 GiB takes int4 with the
talker's experts in int4 too. A turn that would end after --limit seconds, going by the longest so
far, is left out, and the result says so."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.checkpoint import checkpoint, device_here
from bench.harness.results import arguments, parser, write
from bench.harness.rounds import turns
from bench.harness.serving import Stopped, serving
from bench.serve import described, kernels_cached, over_http
from stretto.testing.qwen3_omni import FORMATS

CONTEXT_GIB = 0.7
"""Of a CUDA context, its modules and libraries, which PyTorch's limit does not count."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Turn:
    weights: str
    levels: tuple[int, ...]
    round: int = 0
    cap: float = 0.0  # GiB of the card; 0: all of it

    @property
    def name(self) -> str:
        return self.weights + (f" in {self.cap:g} GiB" if self.cap else "")


def planned(args: argparse.Namespace) -> list[Turn]:
    found = [Turn(w, tuple(args.levels), n) for n, w in turns(args.weights, args.rounds)]
    for cap in args.caps:
        small = cap < 32
        found.append(Turn("int4-talker" if small else "int4", (2 if small else 8,), cap=cap))
    return found


def memory_flags(cap: float, card: int) -> tuple[list[str], dict[str, str]]:
    """Flags and environment of a server that takes so many GiB of a card with so many bytes."""
    if not cap:
        return [], {}
    share = (cap - CONTEXT_GIB) * GIB / card
    limit = f"per_process_memory_fraction:{share:.5f}"
    return ["--memory-share", f"{share:.5f}"], {"PYTORCH_CUDA_ALLOC_CONF": limit}


def card_bytes(device: str) -> int:
    """Of the card, asked by a process of its own: this one must not hold GPU memory."""
    if not device.startswith("cuda"):
        return 0
    ask = "import torch; print(torch.cuda.mem_get_info()[1])"
    said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return int(said.stdout)


def model_of(args: argparse.Namespace, turn: Turn) -> str:
    if args.model != "released":
        return str(args.model)
    return "released" if turn.weights == "bf16" else f"released-{turn.weights}"


def served(args: argparse.Namespace, turn: Turn, card: int) -> dict[str, Any]:
    """One turn: how the server came up, and what its listeners heard."""
    flags, environment = memory_flags(turn.cap, card)
    model = model_of(args, turn)
    rounds = 1 if args.quick else 2  # of all streams, at least
    values = {**vars(args), "model": model, "levels": list(turn.levels), "rounds": rounds}
    own = argparse.Namespace(**{**values, "serve": [*args.serve, *flags], "out": None})
    if turn.cap:
        own.max_rows = max(turn.levels)
    result: dict[str, Any] = {
        "env": args.env, "weights": turn.weights, "cap_gib": turn.cap, "round": turn.round,
        "parts": {}, "starts": [],
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="stretto-formats-") as name,
        checkpoint(model) as directory,
    ):
        try:
            with serving(own, directory, Path(name), more=environment) as server:
                over_http(own, server, directory, Path(name), ["latency"], result, kernels_cached())
                result["server_log"] = server.tail(4000)
        except Stopped as e:
            result["error"] = str(e)
            print(f"stopped: {e}", flush=True)
    return result


def cells(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for part in result["parts"].values():
        yield from part["found"]


def line(turn: Turn, cell: dict[str, Any]) -> str:
    first = cell["summary"].get("first_audio_s", {}).get("p50", float("nan"))
    made = cell["rates"]["audio_s_per_s"]
    return (
        f"{turn.name:24} {cell['streams']:4} streams: first audio {1e3 * first:7.1f} ms, "
        f"{made:7.1f} s of speech a second, {sum(cell['errors'].values())} failed"
    )


def main(given: Sequence[str]) -> int:
    p = parser("formats", __doc__)
    p.add_argument("--weights", nargs="+", choices=FORMATS, default=["bf16", "int4", "fp8"])
    p.add_argument("--levels", type=int, nargs="+", default=[1, 32, 128])
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--caps", type=float, nargs="*", default=[32.0, 24.0], help="GiB")
    p.add_argument("--model", default="released", help="or tiny, to try the program")
    p.add_argument("--device", default=None)
    p.add_argument("--requests", type=int, default=16, help="at each level (default: %(default)s)")
    p.add_argument("--seconds", type=float, default=12.0, help="at each level at most")
    p.add_argument("--max-rows", type=int, default=128)
    p.add_argument("--processes", type=int, default=6, help="of listeners, at most")
    p.add_argument("--limit", type=float, default=540.0, help="seconds (default: %(default)s)")
    p.add_argument("--start-timeout", type=float, default=200.0)
    p.add_argument("--quick", action="store_true", help="a few short requests: does it run at all?")
    args = p.parse_args(given)
    args.device, args.serve, args.beside = args.device or device_here(), [], 0
    args.last_first = False
    if args.quick:
        args.requests, args.seconds, args.levels = 2, 10.0, args.levels[:1]
    return run(args)


def run(args: argparse.Namespace) -> int:
    begin, longest = time.monotonic(), 0.0
    args.env, card = described(), card_bytes(args.device)
    result: dict[str, Any] = {
        "env": args.env, "arguments": arguments(args), "complete": True, "turns": [],
    }  # fmt: skip
    lines = []
    for turn in planned(args):
        start = time.monotonic()
        if start + longest > begin + args.limit:
            result["complete"] = False
            lines.append(f"{turn.name}: out of time")
            continue
        print(f"== {turn.name}", flush=True)
        one = served(args, turn, card)
        longest = max(longest, time.monotonic() - start)
        result["turns"].append(one)
        lines += [line(turn, cell) for cell in cells(one)] or [f"{turn.name}: did not serve"]
        write(args.out, result)
    print("\n".join(lines), flush=True)
    write(args.out, result)
    failed = any("error" in one for one in result["turns"])
    return int(failed or any(part["error"] for one in result["turns"]
                             for part in one["parts"].values()))  # fmt: skip
