"""What each overlap brings: one workload with each of them off in turn, and stage by stage as the
baseline.

    # on a GPU, about two minutes
    python -m bench ablation --model released --out bench/results/ablation_h200.json
    # whole engines, on a CPU
    python -m bench ablation --workload small --rounds 8 --out ablation.json

Every variant is measured against its base within the same run, as a ratio of medians (in brackets
the middle half of the ratios of single requests): above 1 means that switching it off costs time.
There are two ways:

- `--load once` (the default on a GPU): one host in this process, loaded and captured once, whose
overlaps are switched while it runs (rows.py); at each of `--streams`, limited to `--seconds`,
written after every row. - `--load each` (the default on a CPU): whole engines, with their
processes. On a CPU base and variant stay open and take turns, so that a noisy machine disturbs both
alike; on a GPU each is opened by itself (a minute or two each), and the base is measured again at
the end to show the drift.

`stage by stage` lets the thinker finish, then the talker, then the vocoder. With whole engines it
is measured twice: through the engine (a silent answer, then a text of that length read aloud in one
packet) and in the plain driver (the same models in one thread, plain.py), each against its own
streaming form. Switches of links are compared with a host for each stage, since stages of one host
hand their payloads over: `--load each`."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.ablation.plain import Plain
from bench.ablation.rows import ROWS, measure_row
from bench.engine.load import Questions, add_engine_arguments, engine_config, sender, stream
from bench.harness.checkpoint import checkpoint
from bench.harness.env import describe
from bench.harness.host import Asker, OneHost
from bench.harness.results import arguments, parser, write
from bench.harness.rounds import turns
from bench.harness.workload import WORKLOADS, Workload, words
from stretto.config.engine import EngineConfig
from stretto.engine.engine import PipelineEngine
from stretto.loadtest.runner import Bench, Closed, Level, Sample, Send, SystemClock, Targets
from stretto.loadtest.sse import Piece, RequestFailed
from stretto.loadtest.stats import percentile
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import ChunkSizes
from stretto.preprocess.template import Tokenizer
from stretto.stage.host.process import settle_down

DEFAULT, SPLIT = "default", "processes"
How = Callable[[PipelineEngine, Questions, SystemClock], Send]


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    base: str  # what it is compared with: DEFAULT or SPLIT
    config: EngineConfig
    packets: ChunkSizes | None = None  # None: the workload's
    how: How = sender
    needs_cuda: bool = False  # without a GPU it changes nothing
    # differs from its base in nothing: an engine of its own shows what chance does
    control: bool = False


@dataclass(slots=True)
class Found:
    """A variant's samples, and its base's taken beside them."""

    variant: str
    base: str
    samples: list[Sample] = field(default_factory=list)
    base_samples: list[Sample] = field(default_factory=list)


def variants(config: EngineConfig, frames: int) -> list[Variant]:
    """Base variants first. Links exist only between processes, so switches of links are compared
    there."""
    one, split = replace(config, placement="one"), replace(config, placement="processes")
    host = config.host

    def off(switch: str, base: EngineConfig = split) -> EngineConfig:
        return replace(base, host=replace(host, switches=replace(host.switches, **{switch: False})))

    return [
        Variant("the same again", DEFAULT, one, control=True),
        Variant("depth 1", DEFAULT, replace(one, host=replace(host, overlap_depth=1))),
        Variant("no just_in_time", DEFAULT, off("just_in_time", one), needs_cuda=True),
        Variant("no prefill_priority", DEFAULT, off("prefill_priority", one), needs_cuda=True),
        Variant("no prefix cache", DEFAULT, replace(one, host=replace(host, prefix_cache=False))),
        Variant(
            "no graphs", DEFAULT, replace(one, host=replace(host, graphs=False)), needs_cuda=True
        ),
        Variant("one packet", DEFAULT, one, ChunkSizes(frames, frames, None)),
        Variant(
            "stage by stage", DEFAULT, one, ChunkSizes(frames, frames, None), one_after_the_other
        ),
        Variant("two hosts", DEFAULT, replace(config, placement="two")),
        Variant("three processes", DEFAULT, split),
        Variant("three processes, tcp", SPLIT, replace(split, connector="tcp")),
        Variant("no zero_copy_encode", SPLIT, off("zero_copy_encode")),
        Variant("no async_d2h", SPLIT, off("async_d2h"), needs_cuda=True),
        Variant("no async_h2d", SPLIT, off("async_h2d"), needs_cuda=True),
        Variant("no payload_stream", SPLIT, off("payload_stream"), needs_cuda=True),
    ]


def bases(config: EngineConfig) -> dict[str, EngineConfig]:
    return {
        DEFAULT: replace(config, placement="one"),
        SPLIT: replace(config, placement="processes"),
    }


def one_after_the_other(engine: PipelineEngine, questions: Questions, clock: SystemClock) -> Send:
    """The whole text, then the whole speech, through the same engine. What is read aloud is as long
    as the answer."""
    spoken = words(questions.workload.text_tokens, "", 0, questions.count)

    async def send(index: int) -> AsyncIterator[tuple[float, Piece]]:
        params = questions.workload.params(index)
        silent = engine.generate(questions.take(index), modalities=["text"], params=params)
        async for at, piece in stream(silent, clock):
            yield at, piece
        async for at, piece in stream(engine.speak(spoken, params=params), clock):
            yield at, piece

    return send


@dataclass(slots=True)
class Stand:
    """What all variants share in one run."""

    directory: Path
    workload: Workload
    tokenizer: Tokenizer
    streams: int
    rounds: int
    clock: SystemClock = field(default_factory=SystemClock)

    async def open(self, stack: AsyncExitStack, config: EngineConfig) -> PipelineEngine:
        return await stack.enter_async_context(PipelineEngine.open(self.directory, config))

    def bench(
        self, engine: PipelineEngine, packets: ChunkSizes | None = None, how: How = sender
    ) -> Bench:
        workload = self.workload if packets is None else replace(self.workload, packets=packets)
        return Bench(how(engine, Questions(workload, self.tokenizer), self.clock), self.clock)

    async def round(self, bench: Bench) -> list[Sample]:
        level = Level(Closed(self.streams))
        await bench.closed(level, self.streams, Targets(requests=self.streams))
        bad = next((s for s in level.samples if s.error is not None), None)
        if bad is not None:
            raise RequestFailed(bad.error or "", bad.message or "")
        return level.samples


async def in_turns(stand: Stand, all: list[Variant], config: EngineConfig) -> list[Found]:
    """Base and variant are open at once and take turns, a round each; the one that begins
    alternates too."""
    found = []
    for name, base_config in bases(config).items():
        mine = [v for v in all if v.base == name]
        if not mine:
            continue
        async with AsyncExitStack() as outer:
            base_engine = await stand.open(outer, base_config)
            base = stand.bench(base_engine)
            await stand.round(base)  # warm
            for v in mine:
                async with AsyncExitStack() as inner:
                    alone = v.control or v.config != base_config
                    engine = await stand.open(inner, v.config) if alone else base_engine
                    bench, result = stand.bench(engine, v.packets, v.how), Found(v.name, v.base)
                    await stand.round(bench)  # warm
                    sides = ((base, result.base_samples), (bench, result.samples))
                    for _, (one, samples) in turns(sides, stand.rounds):
                        samples.extend(await stand.round(one))
                    found.append(result)
                    print(line(result), flush=True)
    return found


async def one_by_one(stand: Stand, all: list[Variant], config: EngineConfig) -> list[Found]:
    """One engine at a time; each base before its variants and once more after them."""
    found = []
    for name, base_config in bases(config).items():
        mine = [v for v in all if v.base == name]
        if not mine:
            continue
        plan = [
            Variant(name, name, base_config),
            *mine,
            Variant(f"{name}, again", name, base_config),
        ]
        before: list[Sample] = []
        for v in plan:
            async with AsyncExitStack() as stack:
                engine = await stand.open(stack, v.config)
                bench, result = stand.bench(engine, v.packets, v.how), Found(v.name, v.base)
                await stand.round(bench)  # warm
                for _ in range(stand.rounds):
                    result.samples += await stand.round(bench)
            before = before or result.samples
            result.base_samples = before
            found.append(result)
            print(line(result), flush=True)
    return found


def in_plain_driver(stand: Stand, config: EngineConfig) -> Found:
    """Streamed against stage by stage, without scheduler, processes and links."""
    driver = Plain.open(stand.directory, config.host)
    questions = Questions(stand.workload, stand.tokenizer)
    result = Found("plain driver, stage by stage", "plain driver")
    for i, streamed in turns((True, False), 1 + stand.rounds):
        messages, params = (
            questions.workload.messages(i, questions.count),
            questions.workload.params(i),
        )
        sample = driver.run(messages, params, streamed)
        if i > 0:  # the first is to warm up
            (result.base_samples if streamed else result.samples).append(sample)
    print(line(result), flush=True)
    return result


MEASURES: dict[str, Callable[[Sample], float | None]] = {
    "first_text": lambda s: s.first_text,
    "first_audio": lambda s: s.first_audio,
    "total": lambda s: s.end,
}


def middle(samples: list[Sample], measure: str) -> float:
    values = sorted(v for s in samples if (v := MEASURES[measure](s)) is not None)
    return percentile(values, 0.5)


def ratios(found: Found) -> dict[str, float]:
    """Variant over base, medians."""
    return {m: middle(found.samples, m) / middle(found.base_samples, m) for m in MEASURES}


def spread(found: Found) -> dict[str, tuple[float, float]]:
    """The middle half of the ratios of samples that were taken side by side: how reliable the ratio
    is."""
    out = {}
    for name, measure in MEASURES.items():
        pairs = [
            (measure(a), measure(b))
            for a, b in zip(found.samples, found.base_samples, strict=False)
        ]
        each = sorted(a / b for a, b in pairs if a is not None and b is not None)
        out[name] = (percentile(each, 0.25), percentile(each, 0.75))
    return out


def line(found: Found) -> str:
    middles, halves = ratios(found), spread(found)
    cells = "".join(
        f"{middles[m]:>8.2f} ({halves[m][0]:5.2f} -{halves[m][1]:5.2f})" for m in MEASURES
    )
    return f"{found.variant:<30}{found.base:<14}{cells}"


def head() -> str:
    names = "".join(f"{m.replace('_', ' '):>23}" for m in MEASURES)
    return f"{'':<30}{'times':<14}{names}"


def told(found: Found, absolute: bool) -> dict[str, Any]:
    """Ratios always; medians in seconds only where they say something about the machine
    (`absolute`)."""
    out: dict[str, Any] = {
        "variant": found.variant,
        "base": found.base,
        "ratios": ratios(found),
        "spread": spread(found),
    }
    if absolute:
        out["seconds"] = {m: middle(found.samples, m) for m in MEASURES}
        out["base_seconds"] = {m: middle(found.base_samples, m) for m in MEASURES}
    for name, samples in (("raw", found.samples), ("base_raw", found.base_samples)):
        out[name] = {m: [MEASURES[m](s) for s in samples] for m in MEASURES}
    return out


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    config, workload = engine_config(args), WORKLOADS[args.workload]
    cuda = config.host.device != "cpu"
    every = variants(config, workload.frames)
    # One by one, the base is measured again anyway.
    possible = [v for v in every if (not v.control if cuda else not v.needs_cuda)]
    chosen = [v for v in possible if not args.only or v.name in args.only]
    with checkpoint(args.model) as directory:
        stand = Stand(directory, workload, Tokenizer.open(directory), args.concurrency, args.rounds)
        print(head())
        found = await (one_by_one if cuda else in_turns)(stand, chosen, config)
        if not args.only:
            found.append(in_plain_driver(stand, config))
    return {
        "env": describe(),
        "arguments": arguments(args),
        "config": asdict(config),
        "workload": asdict(workload),
        "skipped": [v.name for v in every if v.needs_cuda and not cuda],
        "runs": [told(f, absolute=cuda) for f in found],
    }


def once(args: argparse.Namespace) -> dict[str, Any]:
    """Every row on one host, at each number of streams; what was found so far is written after
    every row."""
    config, workload = engine_config(args), WORKLOADS[args.workload]
    cuda = config.host.device != "cpu"
    most = max(args.streams)
    # No more rows than are asked for: fewer sizes to capture. Pools that hold a few rounds leave
    # room for a second set of graphs.
    settings = replace(
        config.host, max_rows=most, blocks={"thinker": 256 * most, "talker": 256 * most}
    )
    rows = [
        r
        for r in ROWS
        if (cuda or not r.needs_cuda) and (not args.only or r.name in {*args.only, r.base})
    ]
    result: dict[str, Any] = {
        "env": describe(),
        "arguments": arguments(args),
        "config": asdict(replace(config, host=settings)),
        "workload": asdict(workload),
        "skipped": [r.name for r in ROWS if r.needs_cuda and not cuda],
        "runs": [],
    }
    with checkpoint(args.model) as directory:
        start = time.perf_counter()
        host = OneHost(directory, settings)
        settle_down()  # as a host's process does
        result["load_s"] = time.perf_counter() - start
        print(f"loaded in {result['load_s']:.1f} s\n{head()}", flush=True)
        asker = Asker(PromptBuilder.open(directory, OmniConfig.read(directory)))
        base: dict[tuple[str, int], list[Sample]] = {}
        for row in rows:
            begun = time.perf_counter()
            with row.change(host):
                for streams in args.streams:
                    samples = measure_row(
                        host, asker, workload, row, streams, args.rounds, args.seconds
                    )
                    found = Found(
                        row.name, row.base, samples, base.setdefault((row.base, streams), samples)
                    )
                    rtf = percentile(sorted(s.rtf for s in samples if s.rtf is not None), 0.5)
                    result["runs"].append(
                        told(found, absolute=True) | {"streams": streams, "rtf": rtf}
                    )
                    print(f"{line(found)}  x {streams}", flush=True)
            result["runs"][-1]["row_s"] = time.perf_counter() - begun
            write(args.out, result)
        host.close()
    return result


def main(given: Sequence[str]) -> int:
    p = parser("ablation", __doc__)
    p.add_argument(
        "--workload",
        choices=WORKLOADS,
        default="text-100",
        metavar="NAME",
        help=", ".join(WORKLOADS),
    )
    p.add_argument(
        "-c",
        "--concurrency",
        type=int,
        default=1,
        metavar="N",
        help="--load each: requests at once",
    )
    p.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="of N requests at once, per variant"
    )
    p.add_argument("--load", choices=["once", "each"], help="default: once on a GPU, each on a CPU")
    p.add_argument(
        "--streams", type=int, nargs="+", default=[1, 8], help="--load once: at each of these"
    )
    p.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="--load once: per row and number of streams, about",
    )
    p.add_argument("--only", nargs="+", metavar="NAME", help="these variants alone")
    add_engine_arguments(p)
    args = p.parse_args(given)
    if (args.load or ("once" if engine_config(args).host.device != "cpu" else "each")) == "once":
        once(args)
    else:
        write(args.out, asyncio.run(measure(args)))
    return 0
