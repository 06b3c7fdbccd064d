"""The engine without HTTP, in its processes: closed loop (-c) or open loop (-r), any workload,
placement and size.

    python -m bench engine --model released -c 1 4 8 16 32 --workload text-100 --host max_rows=64
    --out engine.json
    python -m bench engine --model DIR -r 1 4 16 -d 30 --workload text-20 audio-2s --max-requests
    128
    python -m bench engine --model tts-0.6b --read --out tts.json  # a model that reads aloud
    python -m bench engine --workload small -c 1 2  # the tiny model, on any machine

Closed: each of N streams sends its next request when it has its answer. Open: R requests a second
on average, at random moments (Poisson, seeded), whether or not the engine keeps up; those that it
refuses are counted. Search: how many listeners, each of whom hears an answer before asking again,
have no underrun. With `--read` and none of these given, all three: 1, 8, 32, 128 streams, 1, 10, 20
requests a second, and a search from what the closed loops made. Each part is bounded in time, and
the result is written behind each. Before all that a few requests go one by one, so that one can see
whether the first after a start waits longer (`first_requests`, and `first_request_s` for its first
audio). Hosts run as in service; this is the process that would be the server. Times are taken when
an event leaves the engine. A server is measured by `python -m bench serve`, and from outside by
`stretto bench`."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import soundfile

from bench.harness.checkpoint import add_model_arguments, checkpoint, host_settings
from bench.harness.env import describe
from bench.harness.listening import Listeners, Listening, highest, smooth
from bench.harness.results import arguments, parser, write
from bench.harness.workload import WORKLOADS, Workload
from stretto.config.engine import EngineConfig
from stretto.config.placement import parse_placement
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk, Event, Finished, TextDelta
from stretto.errors import StrettoError
from stretto.loadtest.player import Packet, play
from stretto.loadtest.report import rates, record, table
from stretto.loadtest.runner import Bench, Closed, Level, Load, Open, Send, SystemClock, Targets
from stretto.loadtest.sse import Piece, RequestFailed, Sound, StreamEnd, Used, Words
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT
from stretto.params import SpeechStyle
from stretto.preprocess.pool.jobs import Conversation
from stretto.preprocess.template import Tokenizer

PREBUFFERS = (0.0, 0.2)
FRAME_S = 0.08
READ_STREAMS, READ_RATES, READ_S = [1, 8, 32, 128], [1.0, 10.0, 20.0], 4.0
FIRST, UNSEEN = 4, 1 << 20
"""Requests that are sent one by one as soon as the engine is ready, and their numbers: no other has
these words."""
LEAST = 16
"""Requests of an open loop that reads aloud, however slowly they come."""


def add_engine_arguments(p: argparse.ArgumentParser, requests: int | None = 64) -> None:
    add_model_arguments(p)
    p.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on a GPU"
    )
    p.add_argument(
        "--placement", default="one", help="one, two, processes, or such as thinker,talker+code2wav"
    )
    p.add_argument(
        "--connector",
        default="shm",
        help="between processes: shm, tcp, mooncake (default: %(default)s)",
    )
    p.add_argument("--replicas", type=int, default=1)
    p.add_argument(
        "--max-requests", type=int, default=requests, help="running at once; more are refused"
    )
    p.add_argument(
        "--min-pace",
        type=float,
        default=0.0,
        help="refuse while a stream is slower than this x real time",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        parse_placement(args.placement),
        args.connector,
        replicas=args.replicas,
        max_requests=args.max_requests,
        min_pace=args.min_pace,
        host=host_settings(args, dtype=args.dtype),
    )


@dataclass(frozen=True, slots=True)
class Heard(Sound):
    """A packet whose length is known without decoding it."""

    length_s: float = 0.0

    def seconds(self) -> float:
        return self.length_s


def pieces(event: Event) -> list[Piece]:
    """An event as the client's measurements know it."""
    match event:
        case TextDelta(ids=ids, text=text) if ids:
            return [Words(text)]
        case AudioChunk(samples=samples):
            return [Heard("", len(samples) / SAMPLE_RATE_OUT)]
        case Finished(usage=usage, text=text, audio=audio):
            used = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.text_tokens}
            return [Used(used), StreamEnd(audio or text)]
    return []


async def stream(
    events: AsyncIterator[Event], clock: SystemClock
) -> AsyncIterator[tuple[float, Piece]]:
    try:
        async for event in events:
            now = clock.now()
            for piece in pieces(event):
                yield now, piece
    except StrettoError as e:
        raise RequestFailed(type(e).__name__, str(e)) from None


@dataclass(slots=True)
class Questions:
    """A workload's messages, made before they are sent: making a sound takes longer than making a
    token."""

    workload: Workload
    tokenizer: Tokenizer
    made: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text)) if text else 0

    def prepare(self, start: int, num: int) -> None:
        for i in range(start, start + num):
            self.made[i] = self.workload.messages(i, self.count)

    def take(self, index: int) -> list[dict[str, Any]]:
        made = self.made.pop(index, None)
        return made if made is not None else self.workload.messages(index, self.count)


def sender(
    engine: PipelineEngine,
    questions: Questions,
    clock: SystemClock,
    style: SpeechStyle | None = None,
) -> Send:
    """With a `style`, questions are read aloud instead of being answered."""

    def send(index: int) -> AsyncIterator[tuple[float, Piece]]:
        params, messages = questions.workload.params(index), questions.take(index)
        if style is None:
            return stream(engine.generate(messages, params=params), clock)
        return stream(engine.speak(words(messages), style=style, params=params), clock)

    return send


async def first_times(
    pieces: AsyncIterator[tuple[float, Piece]], clock: SystemClock
) -> dict[str, float]:
    """Seconds from now to a request's first words, first audio and end, as far as it has them."""
    start, took = clock.now(), dict[str, float]()
    async for at, piece in pieces:
        kind = (
            "text" if isinstance(piece, Words) else "audio" if isinstance(piece, Sound) else "end"
        )
        took[kind] = at - start if kind == "end" else took.get(kind, at - start)
    return took


def words(messages: list[dict[str, Any]]) -> str:
    content = messages[-1]["content"]
    return content if isinstance(content, str) else "".join(p.get("text", "") for p in content)


async def reader(engine: PipelineEngine) -> SpeechStyle:
    """A voice of a second of noise, where the model has none of its own."""
    if not engine.info.cloning:
        return SpeechStyle()
    rate = engine.info.sample_rate
    out = io.BytesIO()
    soundfile.write(out, 0.1 * np.random.default_rng(0).standard_normal(rate), rate, format="WAV")
    sound = {"data": base64.b64encode(out.getvalue()).decode(), "format": "wav"}
    content = [
        {"type": "input_audio", "input_audio": sound},
        {"type": "text", "text": "hello there"},
    ]
    clip = Conversation.of(json.dumps([{"role": "user", "content": content}]).encode())
    return SpeechStyle(voice=await engine.enrol(clip))


@dataclass(slots=True, eq=False)
class Run:
    """One run: what was measured so far, and the file that has it."""

    args: argparse.Namespace
    config: EngineConfig
    engine: PipelineEngine
    tokenizer: Tokenizer
    style: SpeechStyle | None
    clock: SystemClock
    found: dict[str, Any] = field(default_factory=dict)  # beside the levels
    levels: list[tuple[Workload, Level]] = field(default_factory=list)

    async def begin(self, workload: Workload) -> None:
        """The very first requests, by themselves: what do they pay for, if a host that says it is
        ready is not?"""
        questions = Questions(workload, self.tokenizer)
        questions.prepare(UNSEEN, FIRST)
        send = sender(self.engine, questions, self.clock, self.style)
        took = [await first_times(send(UNSEEN + i), self.clock) for i in range(FIRST)]
        heard = [t["audio"] if "audio" in t else t["end"] for t in took]
        self.found["first_requests"], self.found["first_request_s"] = took, heard[0]
        first, *later = (f"{1e3 * s:.1f}" for s in heard)
        print(
            f"{workload.name}: the first request's audio begins after {first} ms, then "
            f"{', '.join(later)}\n",
            flush=True,
        )
        self.write()

    async def measure(self, workload: Workload, loads: list[tuple[Load, Targets]]) -> None:
        questions = Questions(workload, self.tokenizer)
        bench = Listeners(sender(self.engine, questions, self.clock, self.style), self.clock)
        begun = 0
        for load, limits in loads:
            num = limits.warmup + (limits.requests or 0)
            questions.prepare(begun, num)
            begun += num
            await self.level(bench, workload, load, limits)
        if self.args.search:
            await self.search(bench, workload)

    async def level(self, bench: Bench, workload: Workload, load: Load, limits: Targets) -> Level:
        """One level; when reading aloud, it is cancelled after `--most-s` seconds."""
        task = asyncio.create_task(bench.run(load, limits))
        done, _ = await asyncio.wait({task}, timeout=self.args.most_s if self.args.read else None)
        if not done:
            task.cancel()
        level = await task
        print(f"{workload.name}, {table(level, PREBUFFERS)}\n", flush=True)
        self.levels.append((workload, level))
        self.write()
        return level

    async def search(self, bench: Bench, workload: Workload) -> None:
        """Search for the most listeners. The closed loops' seconds of audio per second are the
        upper limit."""
        closed = [level for w, level in self.levels if w is workload and type(level.load) is Closed]
        closed = [level for level in closed if len(level.samples) > 1]
        made = max((rates(level)["audio_s_per_s"] for level in closed), default=8.0)
        answer_s = workload.frames * FRAME_S

        async def probe(listeners: int) -> bool:
            limits = Targets(seconds=answer_s + self.args.search_s)
            return smooth(await self.level(bench, workload, Listening(listeners, answer_s), limits))

        most = self.args.max_requests
        known = max((level.load.streams for level in closed if smooth(level)), default=0)  # type: ignore[union-attr]
        limit = await highest(probe, known, round(0.8 * made), self.args.probes, most)
        self.found.setdefault("listeners", {})[workload.name] = {
            "most": limit,
            "asked_at_most": most,
        }
        print(f"{workload.name}: {limit} listeners without an underrun\n", flush=True)
        self.write()

    def write(self) -> None:
        write(self.args.out, self.result())

    def result(self) -> dict[str, Any]:
        return result(self.args, self.config, self.levels) | self.found


async def run_levels(
    args: argparse.Namespace, workloads: list[Workload], loads: list[tuple[Load, Targets]]
) -> dict[str, Any]:
    """Every workload at every load on one engine; prints a table for each and returns the whole
    record."""
    config, clock = engine_config(args), SystemClock()
    with checkpoint(args.model) as directory:
        start = clock.now()
        async with PipelineEngine.open(directory, config) as engine:
            ready = clock.now() - start
            print(f"ready after {ready:.1f} s\n", flush=True)
            style = await reader(engine) if args.read else None
            run = Run(
                args, config, engine, Tokenizer.open(directory), style, clock, {"ready_s": ready}
            )
            await run.begin(workloads[0])
            for workload in workloads:
                await run.measure(workload, loads)
            run.found["running_after"] = await idle(engine)
    run.write()
    return run.result()


async def idle(engine: PipelineEngine) -> float:
    await engine.drain(5.0)
    return engine.metrics()["stretto_engine_running"]


def result(
    args: argparse.Namespace, config: EngineConfig, runs: list[tuple[Workload, Level]]
) -> dict[str, Any]:
    env = describe()
    levels = record([level for _, level in runs], PREBUFFERS, {}, {}, env["date"])["levels"]
    for (workload, ran), level in zip(runs, levels, strict=True):
        level["workload"] = workload.name
        if "answer_s" in level["load"]:
            level["load"]["kind"] = "listening"
            for told, sample in zip(level["samples"], ran.samples, strict=True):
                told |= {"packets": len(sample.packets), "played": played(sample.packets)}
        level["refused"] = level["errors"].get("Busy", 0)
    used = {w.name: asdict(w) for w, _ in runs}
    return {
        "env": env,
        "arguments": arguments(args),
        "config": asdict(config),
        "workloads": used,
        "levels": levels,
    }


def played(packets: Sequence[Packet]) -> dict[str, float] | None:
    """What a player would have heard of an answer. Kept instead of its packets: a search has a
    thousand answers."""
    heard = play(packets)
    return (
        None
        if heard is None
        else {"first": heard.start, "underruns": heard.underruns, "waits": heard.wait}
    )


def failures(found: dict[str, Any]) -> int:
    """The exit status: 1 if a level brought no whole answer."""
    return (
        0
        if all(any(s["error"] is None for s in level["samples"]) for level in found["levels"])
        else 1
    )


def levels(args: argparse.Namespace) -> list[tuple[Load, Targets]]:
    """Closed loops, then open ones. Reading aloud, they are bounded in time, and warming up once is
    enough: a host that is ready has nothing left to compile."""
    chosen: list[tuple[Load, Targets]] = []
    for n in args.concurrency or ():
        requests, warmup = (
            args.requests or max(16, 4 * n),
            n if args.warmup is None else args.warmup,
        )
        if args.read and args.requests is None:
            chosen.append(
                (
                    Closed(n),
                    Targets(requests=16 * n, seconds=args.duration, warmup=args.warmup or 0),
                )
            )
        else:
            chosen.append((Closed(n), Targets(requests=requests, warmup=warmup)))
    least, warmup = (LEAST, 0) if args.read else (1, 4)
    for rate in args.rate or ():
        requests = args.requests or max(least, round(rate * args.duration))
        chosen.append(
            (
                Open(rate, args.seed),
                Targets(requests=requests, warmup=warmup if args.warmup is None else args.warmup),
            )
        )
    return chosen


def settle(args: argparse.Namespace) -> None:
    """Fill in defaults, which differ for reading aloud and for answering."""
    if args.read and args.concurrency is None and args.rate is None and not args.search:
        args.concurrency, args.rate, args.search = READ_STREAMS, READ_RATES, True
    elif args.concurrency is None and args.rate is None and not args.search:
        args.concurrency = [1, 4]
    args.workload = args.workload or ["read" if args.read else "text-100"]
    args.duration = args.duration or (READ_S if args.read else 20.0)
    args.max_requests = args.max_requests or (1024 if args.read else 64)
    if args.read and not any(item.startswith("max_rows=") for item in args.host):
        args.host.append("max_rows=128")
    if args.read and not any(item.startswith("max_waiting=") for item in args.host):
        args.host.append("max_waiting=1024")


def main(given: Sequence[str]) -> int:
    p = parser("engine --parts load", __doc__)
    known = ", ".join(WORKLOADS)
    p.add_argument(
        "--workload",
        nargs="+",
        choices=WORKLOADS,
        metavar="NAME",
        help=f"(default: text-100, or read) {known}",
    )
    p.add_argument(
        "-c",
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="closed loop: streams (default: 1 4)",
    )
    p.add_argument(
        "-r", "--rate", type=float, nargs="+", metavar="R", help="open loop: requests a second"
    )
    p.add_argument(
        "-n",
        "--requests",
        type=int,
        metavar="N",
        help="per level (default: 4 per stream, at least 16)",
    )
    p.add_argument(
        "-d", "--duration", type=float, metavar="S",
        help=f"open loop: so long (default: 20); reading aloud, closed loops too ({READ_S:g}, and "
             f"{LEAST} requests)",
    )  # fmt: skip
    p.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="before each level (default: one per stream, or 4; reading: 0)",
    )
    p.add_argument("--seed", type=int, default=0, help="of the arrivals")
    p.add_argument(
        "--read",
        action="store_true",
        help="read the workload's words aloud, instead of answering them",
    )
    p.add_argument(
        "--search", action="store_true", help="search for the most listeners without underrun"
    )
    p.add_argument(
        "--probes", type=int, default=4, help="of the search, at most (default: %(default)s)"
    )
    p.add_argument(
        "--search-s",
        type=float,
        default=4.0,
        metavar="S",
        help="of each, all listeners being there",
    )
    p.add_argument(
        "--most-s",
        type=float,
        default=30.0,
        metavar="S",
        help="reading aloud, a part that takes longer is interrupted",
    )
    add_engine_arguments(p, requests=None)
    args = p.parse_args(given)
    settle(args)
    found = asyncio.run(run_levels(args, [WORKLOADS[name] for name in args.workload], levels(args)))
    return failures(found)
