"""The host's own time for a frame: what its loop thread does, by stage and phase, and how long the
GPU is idle.

    python -m bench host --model released --streams 1 8 32 64 --out host.json     # on a GPU
    python -m bench host --stub --streams 1 8 32 128  # the host's own work, on any machine
    python -m bench host --stub --profile  # and which functions it went to
    python -m bench host --tree ../before --rounds 12 --out bench/results/host_before_after.json

Opens a host in this process, without server and engine (its reports go to a process that
discards them), admits N requests at once, and measures from when all of them have sound until the
first one ends. With `--stub` the models are not run: a launch makes up its tokens at once, so that
what is left is the host's work (without the launches themselves). A phase's time excludes other
phases that it calls. The device's idle share is the part of the window in which no step of any
stage ran, by events around each launch.

`--tree PATH` compares another checkout with this one: a process for each, models stubbed, measured
by turns, and the loop thread's CPU time for a frame beside each other."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness.checkpoint import add_model_arguments, checkpoint, device_here, host_settings
from bench.harness.env import describe, sources
from bench.harness.markdown import markdown
from bench.harness.results import ROOT, arguments, parser, progress, quantile, write
from bench.harness.rounds import Ratio


def show(r: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{r['streams']} streams: {r['wall_ms_per_frame']:.2f} ms a frame, the loop thread busy "
        f"for "
        f"{r['busy_us_per_frame']:.0f} us of it ({100 * r['busy_share']:.0f} %), that is "
        f"{r['busy_us_per_frame_and_stream']:.0f} us for each stream "
        f"({r['cpu_us_per_frame_and_stream']:.0f} of CPU); "
        f"first packet after "
        f"{r['first_packet_ms']:.1f} ms, {r['admit_us']:.0f} us to admit one; steps {r['steps']}, "
        f"held back {r['held']}, too long {r['late']}"
    )
    if r["device"]:
        d = r["device"]
        yield f"  device idle {100 * d['idle_share']:.1f} %; step p50 " + ", ".join(
            f"{n} {v:.2f} ms" for n, v in d["step_ms_p50"].items()
        )
    for name, phase in sorted(r["phases"].items(), key=lambda item: -item[1]["ms"]):
        yield f"  {name:24}{phase['ms']:>9.2f} ms{phase['us_per_frame']:>9.1f} us a frame{phase['calls']:>8} calls"  # noqa: E501


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from bench.harness.host import Asker
    from bench.harness.workload import Question, Workload
    from bench.host.measured import MeasuredHost
    from stretto.models.qwen3_omni.config import OmniConfig
    from stretto.models.qwen3_omni.prompts import PromptBuilder
    from stretto.stage.host.process import settle_down

    device = args.device or device_here()
    blocks = (
        {"thinker": 16 * args.max_rows, "talker": 16 * args.max_rows} if device == "cpu" else {}
    )
    settings = host_settings(args, max_rows=args.max_rows, blocks=blocks)
    workload = Workload("host", "", Question(text_tokens=args.prompt), args.text, args.frames)
    with checkpoint(args.model) as directory:
        asker = Asker(PromptBuilder.open(directory, OmniConfig.read(directory)))
        host = MeasuredHost(directory, settings, args.stub, phases=True)
        print(f"loaded in {host.load_s:.1f} s", flush=True)
        settle_down()  # as a host's process does
        host.run(asker.round(workload, 1))  # warm
        result: dict[str, Any] = {
            "env": describe(),
            "arguments": arguments(args),
            "load_s": host.load_s,
        }
        result |= {"memory": host.host.context.memory, "runs": []}
        for streams in args.streams:
            found = host.run(asker.round(workload, streams))
            print("\n".join(show(found)), flush=True)
            if args.profile:
                found["profile"] = host.run(asker.round(workload, streams), profile=True)["profile"]
                print(found["profile"], flush=True)
            result["runs"].append(found)
            write(args.out, result)
        host.close()
    return result


# ---- two checkouts


class Tree:
    """A checkout whose host runs in a process of its own (tree.py)."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path.resolve()
        environment = {**os.environ, "PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("tree.py"))],
            cwd=self.path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the host of {self.name} ended with {self.process.wait()}")
        return line

    def measure(self, streams: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{streams}\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.line())
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    env = describe()
    trees = [Tree("before", args.tree), Tree("after", ROOT)]
    kept = ("cpu_us_per_frame", "steps", "window_ms", "rounds")
    taken: dict[str, dict[int, list[Any]]] = {t.name: {n: [] for n in args.streams} for t in trees}
    try:
        for tree in trees:
            assert tree.line() == "ready\n"
        for number, streams in progress(
            [(r, n) for r in range(args.rounds) for n in args.streams], "rounds"
        ):
            for tree in (trees, trees[::-1])[number % 2]:
                found = tree.measure(streams)
                taken[tree.name][streams].append({name: found[name] for name in kept})
    finally:
        for tree in trees:
            tree.close()
    return {
        "env": env,
        "trees": {t.name: sources(t.path) for t in trees},
        "arguments": arguments(args),
        "samples": {
            name: {str(n): of for n, of in counts.items()} for name, counts in taken.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    """CPU time of the loop thread for a frame of all streams: medians, and the ratio of the same
    rounds."""
    lines = []
    for streams in result["samples"]["before"]:
        before, after = (
            [s["cpu_us_per_frame"] for s in result["samples"][t][streams]]
            for t in ("before", "after")
        )
        middle = [quantile(values, 0.5) for values in (before, after)]
        each = (f"{us / int(streams):.1f} µs" for us in middle)
        lines.append(
            (streams, *(f"{us:.0f} µs" for us in middle), *each, str(Ratio.of(after, before)))
        )
    head = (
        "streams",
        "a frame of all of them: before",
        "after",
        "of one of them: before",
        "after",
        "ratio (quartiles)",
    )
    return markdown((*head, "ratio (quartiles)"), lines)


def main(given: Sequence[str]) -> int:
    p = parser("host --parts loop", __doc__)
    add_model_arguments(p)
    p.add_argument("--stub", action="store_true", help="do not run the models")
    p.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    p.add_argument("--prompt", type=int, default=100, help="tokens (default: %(default)s)")
    p.add_argument(
        "--text", type=int, default=64, help="tokens of the answer (default: %(default)s)"
    )
    p.add_argument("--frames", type=int, default=125, help="of the answer (default: %(default)s)")
    p.add_argument("--max-rows", type=int, default=128)
    p.add_argument("--profile", action="store_true", help="also a profile by function")
    p.add_argument(
        "--tree", type=Path, metavar="PATH", help="compare the checkout there with this one"
    )
    p.add_argument("--rounds", type=int, default=12, help="of --tree (default: %(default)s)")
    args = p.parse_args(given)
    if args.tree is not None:
        found = compare(args)
        write(args.out, found)
        print(table(found))
    else:
        measure(args)
    return 0
