"""The ladder of the links: stages in three processes on one card, each link overlap off in turn.

    python -m bench engine --parts links --model released --out links.json   # 3 minutes, GPU
    python -m bench engine --parts links --levels 1 2 --workload small-audio --rounds 1 --requests 4

One engine is loaded; its links are laid anew with other switches between the cells (link_host.py),
and the variants take turns. Prompts hold sound, since only their rows are large: those of text are
ids. `payload_stream`: payloads are copied on a stream of their own; off: behind the step, on its
stream. `async_h2d`: the receiver's copy to the device runs ahead; off: it is waited for.
`async_d2h`: couriers wait for the sender's copy to the host; off: the loop does.
`zero_copy_encode`: chunks are encoded into the slot; off: into bytes, which are then copied.

The streams of a cell begin one after another, spread over the time of one answer (taken from a
warm-up at each level): streams that begin together send all prompts at once, again and again, and
first audio is then mostly their place in that queue. The file is written after each cell; no cell
begins after `--limit` seconds."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.engine.link_host import FILE, SWITCHES
from bench.engine.load import Questions, add_engine_arguments, engine_config, sender
from bench.harness.checkpoint import checkpoint
from bench.harness.host import swapped
from bench.harness.listening import Listeners, Staggered
from bench.harness.results import arguments, parser, write
from bench.harness.rounds import turns
from bench.harness.workload import WORKLOADS
from bench.report.proofs import ladder_table, middle
from bench.serve import described
from stretto.engine import local_host
from stretto.engine.engine import PipelineEngine
from stretto.loadtest.runner import Bench, Closed, Level, Sample, SystemClock, Targets
from stretto.preprocess.template import Tokenizer

HOST = "stretto.stage.host.process"
VARIANTS: dict[str, tuple[str, ...]] = {
    "all on": (),
    **{f"no {name}": (name,) for name in SWITCHES},
    "all off": SWITCHES,
}
"""By name, what is off."""


def switchable(start: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Starts hosts whose links can be switched."""

    def started(*words: str, **more: Any) -> Awaitable[Any]:
        return start(*("bench.engine.link_host" if w == HOST else w for w in words), **more)

    return started


@dataclass(slots=True)
class Run:
    args: argparse.Namespace
    engine: PipelineEngine
    bench: Bench
    questions: Questions
    switches: Path
    begun: float
    result: dict[str, Any]
    asked: int = 0
    answer_s: dict[int, float] = field(default_factory=dict)  # by streams

    @property
    def late(self) -> bool:
        return time.monotonic() - self.begun > self.args.limit

    async def lay(self, variant: str) -> None:
        """All links anew. Nothing is on its way."""
        self.switches.write_text(json.dumps(VARIANTS[variant]), encoding="utf-8")
        for pipeline in self.engine.pipelines:
            links = pipeline.supervisor.links
            links.up.update(dict.fromkeys(links.up, False))
            await links.join()

    async def measure(self) -> None:
        for streams in self.args.levels:
            level = await self.cell(Closed(streams), 2 * streams)  # warm
            self.answer_s[streams] = statistics.median(s.end or 0.0 for s in level.samples)
        self.result["answer_s"] = self.answer_s
        for number, variant in turns(self.args.variants, self.args.rounds):
            if self.late and number:
                break
            await self.lay(variant)
            for streams in self.args.levels:
                if self.late:
                    self.result["left_out"].append([number, variant, streams])
                    continue
                load = Staggered(streams, self.answer_s[streams])
                requests = max(self.args.requests, self.args.per_stream * streams)
                found = cell_of(await self.cell(load, requests), variant, number, streams)
                self.result["cells"].append(found)
                print(line(found), flush=True)
                write(self.args.out, self.result)

    async def cell(self, load: Closed, requests: int) -> Level:
        self.questions.prepare(self.asked, requests)
        self.asked += requests
        level: Level = await self.bench.run(load, Targets(requests=requests))
        return level


def cell_of(level: Level, variant: str, number: int, streams: int) -> dict[str, Any]:
    def taken(sample: Sample) -> dict[str, Any]:
        return {
            "first_audio": sample.first_audio,
            "rtf": sample.rtf,
            "end": sample.end,
            "error": sample.error,
        }

    samples = [taken(s) for s in level.samples]
    return {"variant": variant, "round": number, "streams": streams, "samples": samples}


def line(cell: dict[str, Any]) -> str:
    first, rtf = middle([cell], "first_audio"), middle([cell], "rtf")
    if first is None or rtf is None:
        return f"{cell['variant']} x {cell['streams']}: no answer"
    return (
        f"{cell['variant']} x {cell['streams']}: {len(cell['samples'])} answers, first audio "
        f"{1e3 * first:.1f} ms, RTF {rtf:.3f}"
    )


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Of the processes that are started meanwhile."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


async def run(args: argparse.Namespace, result: dict[str, Any], begun: float) -> None:
    clock = SystemClock()
    with (
        tempfile.TemporaryDirectory(prefix="stretto-links-") as folder,
        checkpoint(args.model) as directory,
    ):
        switches = Path(folder) / "off.json"
        switches.write_text("[]", encoding="utf-8")
        change = (local_host, "start_apart", switchable(local_host.start_apart))
        with swapped([change]), environment(FILE, str(switches)):
            async with PipelineEngine.open(directory, engine_config(args)) as engine:
                result["ready_s"] = time.monotonic() - begun
                print(f"ready after {result['ready_s']:.1f} s", flush=True)
                questions = Questions(WORKLOADS[args.workload], Tokenizer.open(directory))
                bench = Listeners(sender(engine, questions, clock), clock)
                await Run(args, engine, bench, questions, switches, begun, result).measure()


def main(given: Sequence[str]) -> int:
    p = parser("engine --parts links", __doc__)
    p.add_argument("--workload", choices=WORKLOADS, default="audio-10s-5s", metavar="NAME")
    p.add_argument("--levels", type=int, nargs="+", default=[1, 8, 32])
    p.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    p.add_argument("--rounds", type=int, default=6, help="of all variants, at most (default: 6)")
    p.add_argument("--per-stream", type=int, default=3, help="answers of a cell (default: 3)")
    p.add_argument("--requests", type=int, default=48, help="of a cell, at least (default: 48)")
    p.add_argument("--limit", type=float, default=600.0, help="seconds after which no cell begins")
    add_engine_arguments(p)
    p.set_defaults(placement="processes")
    args = p.parse_args(given)
    begun = time.monotonic()
    if not any(item.startswith("max_rows=") for item in args.host):
        args.host.append(f"max_rows={max(args.levels)}")
    result: dict[str, Any] = {
        "env": described(),
        "arguments": arguments(args),
        "config": asdict(engine_config(args)),
        "cells": [],
        "left_out": [],
    }
    asyncio.run(run(args, result, begun))
    write(args.out, result)
    print(ladder_table(result))
    return 0 if result["cells"] else 1
