"""The engine without HTTP, in its processes: closed loop (-c) or open loop (-r), any workload, placement and size.

    python -m bench engine --model released -c 1 4 8 16 32 --workload text-100 --host max_rows=64 --out engine.json
    python -m bench engine --model DIR -r 1 4 16 -d 30 --workload text-20 audio-2s --max-requests 128
    python -m bench engine --model tts-0.6b --read --workload text-20 -c 1        # a model that reads aloud
    python -m bench engine --workload small -c 1 2                                # the tiny model, on any machine

Closed: each of N streams sends its next request when it has its answer. Open: R requests a second on average, at random
moments (Poisson, seeded), whether or not the engine keeps up; those that it refuses are counted. Hosts run as in
service; this is the process that would be the server. Times are taken when an event leaves the engine. A server is
measured by `python -m bench serve`, and from outside by `stretto bench`."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import soundfile

from bench.harness.checkpoint import add_model_arguments, checkpoint, device_here, host_fields, load_format
from bench.harness.env import describe
from bench.harness.results import arguments, parser, write
from bench.harness.workload import WORKLOADS, Workload
from stretto.client.bench import Bench, Closed, Level, Load, Open, Send, SystemClock, Targets
from stretto.client.report import record, table
from stretto.client.wire import Piece, RequestFailed, Sound, StreamEnd, Used, Words
from stretto.control.request import Manner
from stretto.control.settings import EngineConfig, HostSettings, parse_placement
from stretto.errors import StrettoError
from stretto.models.qwen3_omni.config import SAMPLE_RATE_OUT
from stretto.orchestrator.api import AudioChunk, Event, Finished, TextDelta
from stretto.orchestrator.engine import PipelineEngine
from stretto.prompt.jobs import Conversation
from stretto.prompt.template import Tokenizer

PREBUFFERS = (0.0, 0.2)


def add_engine_arguments(p: argparse.ArgumentParser) -> None:
    add_model_arguments(p)
    p.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on a GPU")
    p.add_argument("--placement", default="one", help="one, two, processes, or such as thinker,talker+code2wav")
    p.add_argument("--connector", default="shm", help="between processes: shm, tcp, mooncake (default: %(default)s)")
    p.add_argument("--replicas", type=int, default=1)
    p.add_argument("--max-requests", type=int, default=64, help="running at once; more are refused")
    p.add_argument("--min-pace", type=float, default=0.0, help="refuse while a stream is slower than this x real time")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    host = HostSettings(device=args.device or device_here(), dtype=args.dtype, load_format=load_format(args.model))  # type: ignore[arg-type]
    return EngineConfig(
        parse_placement(args.placement),
        args.connector,
        replicas=args.replicas,
        max_requests=args.max_requests,
        min_pace=args.min_pace,
        host=replace(host, **host_fields(args.host)),
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


async def stream(events: AsyncIterator[Event], clock: SystemClock) -> AsyncIterator[tuple[float, Piece]]:
    try:
        async for event in events:
            now = clock.now()
            for piece in pieces(event):
                yield now, piece
    except StrettoError as e:
        raise RequestFailed(type(e).__name__, str(e)) from None


@dataclass(slots=True)
class Questions:
    """A workload's messages, made before they are sent: making a sound takes longer than a token."""

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


def sender(engine: PipelineEngine, questions: Questions, clock: SystemClock, manner: Manner | None = None) -> Send:
    """With a `manner`, questions are read aloud instead of being answered."""

    def send(index: int) -> AsyncIterator[tuple[float, Piece]]:
        params, messages = questions.workload.params(index), questions.take(index)
        if manner is None:
            return stream(engine.generate(messages, params=params), clock)
        return stream(engine.speak(words(messages), manner=manner, params=params), clock)

    return send


def words(messages: list[dict[str, Any]]) -> str:
    content = messages[-1]["content"]
    return content if isinstance(content, str) else "".join(p.get("text", "") for p in content)


async def reader(engine: PipelineEngine) -> Manner:
    """A voice of a second of noise, where the model has none of its own."""
    if not engine.info.cloning:
        return Manner()
    rate = engine.info.sample_rate
    out = io.BytesIO()
    soundfile.write(out, 0.1 * np.random.default_rng(0).standard_normal(rate), rate, format="WAV")
    sound = {"data": base64.b64encode(out.getvalue()).decode(), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": "hello there"}]
    clip = Conversation.of(json.dumps([{"role": "user", "content": content}]).encode())
    return Manner(voice=await engine.enrol(clip))


async def run_levels(
    args: argparse.Namespace, workloads: list[Workload], loads: list[tuple[Load, Targets]]
) -> dict[str, Any]:
    """Every workload at every load on one engine; prints a table for each and returns the whole record."""
    config, clock, runs = engine_config(args), SystemClock(), []
    with checkpoint(args.model) as directory:
        tokenizer = Tokenizer.open(directory)
        start = clock.now()
        async with PipelineEngine.open(directory, config) as engine:
            ready = clock.now() - start
            manner = await reader(engine) if args.read else None
            for workload in workloads:
                questions = Questions(workload, tokenizer)
                bench = Bench(sender(engine, questions, clock, manner), clock)
                begun = 0
                for load, limits in loads:
                    num = limits.warmup + (limits.requests or 0)
                    questions.prepare(begun, num)
                    begun += num
                    level = await bench.run(load, limits)
                    print(f"{workload.name}, {table(level, PREBUFFERS)}\n", flush=True)
                    runs.append((workload, level))
            settled = await idle(engine)
    return result(args, config, runs) | {"ready_s": ready, "running_after": settled}


async def idle(engine: PipelineEngine) -> float:
    await engine.drain(5.0)
    return engine.metrics()["stretto_engine_running"]


def result(args: argparse.Namespace, config: EngineConfig, runs: list[tuple[Workload, Level]]) -> dict[str, Any]:
    env = describe()
    levels = record([level for _, level in runs], PREBUFFERS, {}, {}, env["date"])["levels"]
    for (workload, _), level in zip(runs, levels, strict=True):
        level["workload"] = workload.name
        level["refused"] = level["errors"].get("Busy", 0)
    used = {w.name: asdict(w) for w, _ in runs}
    return {"env": env, "arguments": arguments(args), "config": asdict(config), "workloads": used, "levels": levels}


def failures(found: dict[str, Any]) -> int:
    """The exit status: 1 if a level brought no whole answer."""
    return 0 if all(any(s["error"] is None for s in level["samples"]) for level in found["levels"]) else 1


def levels(args: argparse.Namespace) -> list[tuple[Load, Targets]]:
    if args.rate is None:
        given = [
            (n, args.requests or max(16, 4 * n), n if args.warmup is None else args.warmup) for n in args.concurrency
        ]
        return [(Closed(n), Targets(requests=requests, warmup=warmup)) for n, requests, warmup in given]
    warmup = 4 if args.warmup is None else args.warmup
    counts = [(rate, args.requests or max(1, round(rate * args.duration))) for rate in args.rate]
    return [(Open(rate, args.seed), Targets(requests=requests, warmup=warmup)) for rate, requests in counts]


def main(given: Sequence[str]) -> int:
    p = parser("engine", __doc__)
    known = ", ".join(WORKLOADS)
    p.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["text-100"], metavar="NAME", help=known)
    p.add_argument("-c", "--concurrency", type=int, nargs="+", default=[1, 4], metavar="N", help="closed loop: streams")
    p.add_argument("-r", "--rate", type=float, nargs="+", metavar="R", help="open loop: requests a second")
    p.add_argument("-n", "--requests", type=int, metavar="N", help="per level (default: 4 per stream, at least 16)")
    p.add_argument("-d", "--duration", type=float, default=20.0, metavar="S", help="open loop: so long (default: 20)")
    p.add_argument("--warmup", type=int, metavar="N", help="before each level (default: one per stream, or 4)")
    p.add_argument("--seed", type=int, default=0, help="of the arrivals")
    p.add_argument("--read", action="store_true", help="read the workload's words aloud, instead of answering them")
    add_engine_arguments(p)
    args = p.parse_args(given)
    found = asyncio.run(run_levels(args, [WORKLOADS[name] for name in args.workload], levels(args)))
    write(args.out, found)
    return failures(found)
