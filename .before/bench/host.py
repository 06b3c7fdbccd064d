"""Where a host's loop thread spends its time, by stage and by phase, and how long the device stands still.

Opens a host in this process, without server and orchestrator (its reports go to a pipe that nobody reads slowly),
admits N requests at once and looks at the time from when all of them sound until the first falls silent.

    python -m bench.host --model released --streams 1 8 32 64 --out host.json     # on a GPU
    python -m bench.host --stub --streams 1 8 32 64                               # the host's own work, on any machine
    python -m bench.host ... --profile                                            # and which functions it went to

With `--stub` the models are not run: a launch makes up its tokens at once, so that what is left is the host's work
(without the launches themselves). Times of a phase are its own: what it calls and is listed too does not count twice.
The device's idle share is the part of the window in which no step of any stage ran, by events around each launch."""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import json
import pstats
import secrets
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.env import describe, quantile
from bench.pipeline import checkpoint, host_fields, rounded
from bench.workload import Question, Workload
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.orchestrator.messages import (
    Admit,
    Configure,
    Connect,
    Ended,
    Failed,
    FromHost,
    Listen,
    Listening,
    Pcm,
    Sampling,
)
from stretto.orchestrator.settings import LINKS, STAGES, HostSettings
from stretto.prompt.build import PromptBuilder
from stretto.prompt.packed import pack_prompt
from stretto.server.command import find_device
from stretto.stage.channel import Channel
from stretto.stage.host import Host
from stretto.stage.nodes.code2wav import Code2WavNode
from stretto.stage.runner.lane import Captured
from stretto.stage.runner.step import Step
from stretto.stage.stage import StageStats
from stretto.types import CODE0, RESIDUAL, SECRET_BYTES, RequestId, SamplingParams, stage_seed


class Stopwatch:
    """Own time and calls of wrapped functions, by name. One thread."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner = 0  # time of wrapped calls within the one that runs

    def wrap(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0
            start = time.perf_counter_ns()
            try:
                return work(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - start
                self.spent[name] += took - self._inner
                self.calls[name] += 1
                self._inner = outer + took

        return timed

    def reset(self) -> None:
        self.spent.clear()
        self.calls.clear()


@dataclass(slots=True)
class Device:
    """When steps ran on the GPU, by events on their streams."""

    on: bool
    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def watch(self, name: str, stream: torch.cuda.Stream | None, launch: Callable[..., Any]) -> Callable[..., Any]:
        if not self.on or stream is None:
            return launch

        def marked(*args: Any) -> Any:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            result = launch(*args)
            after.record(stream)
            self.marks.append((name, before, after))
            return result

        return marked

    def told(self) -> dict[str, Any]:
        """Of the marks since the last reset: step times, and the share of the time without any step."""
        if not self.marks:
            return {}
        torch.cuda.synchronize()
        base = self.marks[0][1]
        spans = sorted((base.elapsed_time(a), base.elapsed_time(b), name) for name, a, b in self.marks)
        busy, end = 0.0, spans[0][0]
        for start, stop, _ in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        whole = end - spans[0][0]
        steps = {n: [b - a for a, b, name in spans if name == n] for n in STAGES}
        return {
            "window_ms": whole,
            "idle_share": 1 - busy / whole if whole else 0.0,
            "step_ms_p50": {n: quantile(values, 0.5) for n, values in steps.items() if values},
            "step_ms_p99": {n: quantile(values, 0.99) for n, values in steps.items() if values},
        }


Counts = dict[str, dict[str, int]]
"""By what is counted, then by stage."""


class Bench:
    def __init__(self, directory: Path, settings: HostSettings, stub: bool) -> None:
        self.watch = Stopwatch()
        self.device = Device(settings.device != "cpu")
        ours, theirs = socket.socketpair()
        self.reader = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        theirs.close()
        self.channel = Channel(ours)
        self.send = self.watch.wrap("report", self.channel.post)
        self.push = self.watch.wrap("report: push", self.channel.push)
        self.spoken: set[RequestId] = set()
        self.ended: dict[str, set[RequestId]] = defaultdict(set)
        self.endpoint = b""
        self.failed: str | None = None
        self.host = Host(Configure(str(directory), STAGES, settings.as_dict()), settings, self._report, self._push)
        start = time.perf_counter()
        self.host.load()
        self.load_s = time.perf_counter() - start
        for link in reversed(LINKS):
            secret = secrets.token_bytes(SECRET_BYTES)
            self.host.handle(Listen(link, "local", 1, secret), b"")
            self.host.handle(Connect(link, "local", self.endpoint, 1, secret), b"")
        self._instrument(stub)

    def _push(self) -> None:
        self.push()

    def _report(self, message: FromHost, blob: bytes) -> None:
        match message:
            case Listening(endpoint=endpoint):
                self.endpoint = endpoint
            case Pcm(request=id):
                self.spoken.add(id)
            case Ended(request=id, stage=stage):
                self.ended[stage].add(id)
            case Failed(message=text):
                self.failed = text
        self.send(message, blob)

    def _instrument(self, stub: bool) -> None:
        wrap = self.watch.wrap
        for name, node in self.host.nodes.items():
            stage: Any = node.stage
            if stub:
                stub_codec(stage) if isinstance(node, Code2WavNode) else stub_runner(stage.runner)
            if isinstance(node, Code2WavNode):
                stage._run = self.device.watch(name, stage.stream, stage._run)
                stage._schedule = wrap(f"{name}: schedule", stage._schedule)
                stage._launch = wrap(f"{name}: launch", stage._launch)
                stage._retire = wrap(f"{name}: retire", stage._retire)
            else:
                runner = stage.runner
                runner.launch = wrap(f"{name}: launch", self.device.watch(name, runner.stream, runner.launch))
                stage.scheduler.schedule = wrap(f"{name}: schedule", stage.scheduler.schedule)
                stage._retire = wrap(f"{name}: retire", stage._retire)
                node.link.flush = wrap(f"{name}: flush", node.link.flush)
                node.link._offer = wrap(f"{name}: link out", node.link._offer)
            if name != "thinker":
                node.intake.turn = wrap(f"{name}: link in", node.intake.turn)
            stage.emit = wrap(f"{name}: emit", stage.emit)
            node.turn = wrap(f"{name}: turn", node.turn)

    def run(self, admits: list[tuple[Admit, bytes]], profile: bool) -> dict[str, Any]:
        """All requests from admission to their end; what is told is the time in between when all of them sound."""
        host, ids = self.host, {a.request for a, _ in admits}
        self.spoken.clear()
        self.ended.clear()
        start = time.perf_counter()
        for admit, blob in admits:
            host.handle(admit, blob)
        admitted = time.perf_counter() - start
        first = None
        profiler = cProfile.Profile() if profile else None
        result: dict[str, Any] = {}
        asleep, window, cpu, counts = 0, 0, 0, self._counts()
        rounds = 0
        while not all(ids <= self.ended[s] for s in STAGES):
            if self.failed is not None:
                raise RuntimeError(self.failed)
            if first is None and self.spoken:
                first = time.perf_counter() - start
            if not window and ids <= self.spoken:
                self.watch.reset()
                self.device.marks.clear()
                asleep, rounds, window, counts = 0, 0, time.perf_counter_ns(), self._counts()
                cpu = time.thread_time_ns()
                if profiler is not None:
                    profiler.enable()
            if window and not result and self.ended["talker"]:
                if profiler is not None:
                    profiler.disable()
                took = time.perf_counter_ns() - window
                result = self._told(took, asleep, time.thread_time_ns() - cpu, rounds, counts, len(ids))
            rounds += 1
            if not host.loop.round():
                before = time.perf_counter_ns()
                host.loop.sleep()
                asleep += time.perf_counter_ns() - before
        if not result:  # all ended in one round
            took = time.perf_counter_ns() - window
            result = self._told(took, asleep, time.thread_time_ns() - cpu, rounds, counts, len(ids))
        result["admit_us"] = 1e6 * admitted / len(ids)
        result["first_packet_ms"] = 1e3 * (first or 0.0)
        if profiler is not None:
            result["profile"] = top(profiler)
        return result

    def _counts(self) -> Counts:
        stats = {name: node.stage.stats for name, node in self.host.nodes.items()}
        ahead = {name: s for name, s in stats.items() if isinstance(s, StageStats)}
        return {
            "steps": {name: s.steps for name, s in stats.items()},
            "held": {name: s.held for name, s in ahead.items()},
            "late": {name: s.late for name, s in ahead.items()},
        }

    def _told(self, window: int, asleep: int, cpu: int, rounds: int, counts: Counts, streams: int) -> dict[str, Any]:
        grown = {
            what: {name: after - counts[what][name] for name, after in values.items()}
            for what, values in self._counts().items()
        }
        steps = grown["steps"]
        frames = max(1, steps["talker"])
        phases = {
            name: {
                "us_per_frame": self.watch.spent[name] / 1000 / frames,
                "calls": self.watch.calls[name],
                "ms": self.watch.spent[name] / 1e6,
            }
            for name in sorted(self.watch.spent)
        }
        return {
            "streams": streams,
            "window_ms": window / 1e6,
            "busy_share": 1 - asleep / window,
            "rounds": rounds,
            **grown,  # steps; of these, launches that were held back, and held back for too long
            "busy_us_per_frame": (window - asleep) / 1000 / frames,
            "busy_us_per_frame_and_stream": (window - asleep) / 1000 / frames / streams,
            # The loop thread's own: what others on a shared machine take does not count.
            "cpu_us_per_frame": cpu / 1000 / frames,
            "cpu_us_per_frame_and_stream": cpu / 1000 / frames / streams,
            "wall_ms_per_frame": window / 1e6 / frames,
            "phases": phases,
            "device": self.device.told(),
        }

    def close(self) -> None:
        self.channel.flush()
        self.reader.kill()
        self.reader.wait()
        self.host.close()


def stub_runner(runner: Any) -> None:
    """Launches that cost nothing and say always the same."""

    def launch(batch: Any, find: Any) -> Step:
        sampling = [i for i, span in enumerate(batch.spans) if span.samples]
        tokens = torch.ones(len(sampling), runner.lane.columns, dtype=torch.int32)
        return Step(batch, sampling, tokens, tokens, None, Captured(), None)

    runner.launch = launch


def stub_codec(stage: Any) -> None:
    rate = stage.model.config.samples_per_frame

    def run(slots: int, size: int) -> tuple[torch.Tensor, None]:
        return torch.zeros(slots, size * rate), None

    stage._run = run


def top(profiler: cProfile.Profile, lines: int = 45) -> str:
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(lines)
    return "\n".join(line for line in out.getvalue().splitlines() if line.strip())


def requests(builder: PromptBuilder, args: argparse.Namespace, streams: int, run: int) -> list[tuple[Admit, bytes]]:
    workload = Workload("host", "", Question(text_tokens=args.prompt), args.text, args.frames)
    made = []
    for i in range(streams):
        number = 1000 * run + i
        messages = workload.messages(number, lambda text: len(builder.tokenizer.encode(text)) if text else 0)
        meta, blob = pack_prompt(builder.build(messages), features=True)
        p = workload.params(number)
        text = SamplingParams(p.temperature, p.top_k, p.top_p, p.repetition_penalty, stage_seed(number, "thinker"))
        speech = stage_seed(number, "talker")
        made.append(
            (
                Admit(
                    request=RequestId(f"r{number}"), prompt=meta, speak=True, voice=None, text=Sampling.of(text),
                    code0=Sampling.of(replace(CODE0, seed=speech)),
                    residual=Sampling.of(replace(RESIDUAL, seed=speech)), max_text_tokens=args.text,
                    max_frames=args.frames, min_text_tokens=args.text,
                    min_frames=args.frames, first_frames=p.packets.first, each_frames=p.packets.each,
                    ramp=p.packets.ramp,
                ),
                blob,
            )
        )  # fmt: skip
    return made


def show(r: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{r['streams']} streams: {r['wall_ms_per_frame']:.2f} ms a frame, the loop thread busy for "
        f"{r['busy_us_per_frame']:.0f} us of it ({100 * r['busy_share']:.0f} %), that is "
        f"{r['busy_us_per_frame_and_stream']:.0f} us for each stream ({r['cpu_us_per_frame_and_stream']:.0f} of CPU); "
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
        yield f"  {name:24}{phase['ms']:>9.2f} ms{phase['us_per_frame']:>9.1f} us a frame{phase['calls']:>8} calls"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="tiny")
    p.add_argument("--device", default=find_device())
    p.add_argument("--stub", action="store_true", help="do not run the models")
    p.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    p.add_argument("--prompt", type=int, default=100)
    p.add_argument("--text", type=int, default=64)
    p.add_argument("--frames", type=int, default=125)
    p.add_argument("--max-rows", type=int, default=128)
    p.add_argument("--host", action="append", default=[], metavar="NAME=VALUE", help="a field of HostSettings")
    p.add_argument("--profile", action="store_true")
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    settings = HostSettings(
        device=args.device,
        load_format="dummy" if args.model == "released" else "safetensors",
        max_rows=args.max_rows,
        **{} if args.device != "cpu" else {"thinker_blocks": 16 * args.max_rows, "talker_blocks": 16 * args.max_rows},
    )
    settings = replace(settings, **host_fields(args.host))
    found = []
    with checkpoint(args.model) as directory:
        builder = PromptBuilder.open(directory, OmniConfig.read(directory))
        bench = Bench(directory, settings, args.stub)
        print(f"loaded in {bench.load_s:.1f} s", flush=True)
        bench.run(requests(builder, args, 1, 999), False)  # warm
        for number, streams in enumerate(args.streams):
            with contextlib.suppress(KeyboardInterrupt):
                found.append(bench.run(requests(builder, args, streams, 2 * number), False))
                print("\n".join(show(found[-1])), flush=True)
                if args.profile:
                    again = bench.run(requests(builder, args, streams, 2 * number + 1), True)
                    found[-1]["profile"] = again["profile"]
                    print(again["profile"], flush=True)
        bench.close()
    result = {
        "env": describe(),
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "load_s": bench.load_s,
        "memory": bench.host.memory,
        "runs": found,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(rounded(result)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
