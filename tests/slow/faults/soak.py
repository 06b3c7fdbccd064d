"""The soak: thousands of mixed requests on the tiny model, a dozen at a time, and not one wrong
sample.

    python -m tests.slow faults --parts soak --requests 20000 --out bench/results/soak.json

Requests come from a small pool whose answers the plain driver has given beforehand: text-only,
spoken, with sound and pictures. Some are cancelled at a seeded event (by closing the iterator, or
by cancelling the task that reads it). Some have a slow listener, who pauses between events until
the engine throttles the request. At the end nothing may be held, every answer must have been exact
and in time, and no process may have grown. **Flat** means: a line through the second half of a
process's memory samples has a slope that is not above 0 with 95 % confidence, or is below 0.05 KiB
per request (1 MiB in 20,000)."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.harness.results import judged, parser, progress
from stretto.config.engine import EngineConfig, HostSettings
from stretto.config.placement import parse_placement, places
from stretto.engine.engine import PipelineEngine
from stretto.engine.events import AudioChunk
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.params import ChunkSizes, Params
from tests.slow.harness.leaks import (
    LEAST_SAMPLES,
    Answer,
    Case,
    Census,
    Memory,
    on_tiny,
    prepared,
    settle,
    trend,
)

STAGES = PIPELINE.names
LENGTHS = [
    (4, 6),
    (6, 4),
    (2, 5),
    (5, 6),
    (3, 3),
    (6, 6),
    (4, 2),
    (2, 6),
    (6, 5),
    (4, 4),
    (6, 2),
    (3, 2),
]
SILENT = 3
KINDS = {"whole": 55, "closed": 12, "cancelled": 13, "slow": 20}  # of a hundred
BUFFERED_S = 0.1  # sound that may wait for a slow listener: little more than a frame
REST_S = 0.1
SAMPLES = 400  # of memory
FLAT = 0.05  # KiB per request
ROWS = 16
OVER = 4200  # requests that are over, of which each end of a link remembers the last 4,096


@dataclass(slots=True)
class Tally:
    kinds: Counter[str] = field(default_factory=Counter)
    exact: int = 0
    cut: int = 0  # ended by their caller before the end
    throttled: int = 0
    wrong: list[str] = field(default_factory=list)


async def one(
    engine: PipelineEngine, case: Case, kind: str, rng: random.Random, tally: Tally, deadline: float
) -> None:
    tally.kinds[kind] += 1
    answer = Answer()
    stop = rng.randrange(6) if kind in ("closed", "cancelled") else None

    async def read() -> None:
        events = engine.generate(case.messages, modalities=case.modalities, params=case.params)
        seen = 0
        async for event in events:
            answer.take(event)
            if seen == stop and kind == "closed":
                await events.aclose()  # type: ignore[attr-defined]
                return
            if seen == stop:
                reader.cancel()
            seen += 1
            if kind == "slow" and isinstance(event, AudioChunk):
                await asyncio.sleep(REST_S)
                tally.throttled += any(t.throttled for t in engine.requests.running.values())

    reader = asyncio.create_task(read())
    if kind == "cancelled" and rng.randrange(3) == 0:
        await asyncio.sleep(0)
        reader.cancel()  # before its first event, or before it is admitted
    _, late = await asyncio.wait([reader], timeout=deadline)
    if late:
        reader.cancel()
    [result] = await asyncio.gather(reader, return_exceptions=True)
    ended = answer.finish is not None
    if late:
        tally.wrong.append(f"{case.name}: not answered in {deadline:g} s")
    elif isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
        tally.wrong.append(f"{case.name}: {type(result).__name__}: {result}")
    elif not ended and stop is not None:
        tally.cut += 1
    elif problem := case.problem(answer):
        tally.wrong.append(problem)
    else:
        tally.exact += 1


async def warm(engine: PipelineEngine, pool: list[Case], deadline: float) -> None:
    """Fill what is filled once. Each case, alone; then groups of requests whose frames come in
    groups, so that the vocoder meets (almost) all shapes of its steps: the first of each makes the
    library keep 1 to 3 MiB of its own. Then requests that are left at their first word, since links
    remember those that are over."""
    tally, rng = Tally(), random.Random(0)
    for case in pool:
        await one(engine, case, "whole", rng, tally, deadline)
    spoken = [case for case in pool if "audio" in case.modalities]
    asked = len(pool)
    for together in (2, 4, 8, 16):
        for frames in (1, 2, 4, 8):
            packets = ChunkSizes(frames, frames, None)
            batch = [spoken[i % len(spoken)] for i in range(together)]
            batch = [replace(case, params=replace(case.params, packets=packets)) for case in batch]
            await asyncio.gather(
                *(one(engine, case, "whole", rng, tally, deadline) for case in batch)
            )
            asked += together
    assert tally.exact == asked, tally.wrong
    numbers = iter(progress(range(OVER), "warming up"))
    first = spoken[0]
    long = replace(first.params, max_text_tokens=500, max_frames=500)

    async def leave() -> None:
        for _ in numbers:
            events = engine.generate(first.messages, modalities=first.modalities, params=long)
            await anext(events)
            await events.aclose()  # type: ignore[attr-defined]

    await asyncio.gather(*(leave() for _ in range(ROWS)))


async def soak(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    params = Params(want_codes=True, packets=ChunkSizes(1, 2, 2))
    pool, env = prepared(model, params, LENGTHS, SILENT)
    placement = parse_placement(args.placement)
    config = EngineConfig(
        placement=placement, max_buffered_s=BUFFERED_S, host=HostSettings(max_rows=ROWS)
    )
    tally, every = Tally(), max(1, args.requests // SAMPLES)
    names = ["orchestrator", *(place.name for place in places(placement, STAGES))]
    memory = Memory.of(names, 2 + args.requests // every)
    before = Census.take()
    async with PipelineEngine.open(model, config) as engine:
        await warm(engine, pool, args.deadline)
        held, start = await settle(engine), Census.take(engine)
        memory.sample(0, [None, *engine.pids])
        began = time.monotonic()
        bar = tqdm(total=args.requests, desc="requests", mininterval=1.0)
        numbers = iter(range(args.requests))

        async def worker() -> None:
            for i in due(numbers, began + args.limit_s):
                rng = random.Random(i)
                kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
                await one(engine, rng.choice(pool), kind, rng, tally, args.deadline)
                bar.update()
                if bar.n % every == 0:
                    memory.sample(bar.n, [None, *engine.pids])

        await asyncio.gather(*(worker() for _ in range(args.at_once)))
        bar.close()
        seconds = time.monotonic() - began
        held += await settle(engine)
        end = Census.take(engine)
    await asyncio.sleep(0.05)  # transports close in the loop's next turns
    census = {"before": before, "start": start, "end": end, "after": Census.take()}
    return {
        "env": env,
        "placement": args.placement,
        "at_once": args.at_once,
        "asked": args.requests,
    } | report(tally, memory, census, held, seconds, args.requests)


def report(
    tally: Tally,
    memory: Memory,
    census: dict[str, Census],
    held: list[str],
    seconds: float,
    asked: int,
) -> dict[str, Any]:
    done = sum(tally.kinds.values())
    at = memory.taken[:, 0]
    trends = {name: trend(at, memory.taken[:, i]) for i, name in enumerate(memory.names, start=1)}
    lost = done - tally.exact - tally.cut - len(tally.wrong)
    problems = tally.wrong + held
    problems += [f"{asked - done} were not asked: the time was up"] if done < asked else []
    problems += [f"{lost} answers are not accounted for"] if lost else []
    problems += [f"{name} is not flat: {t}" for name, t in trends.items() if not t.flat(FLAT)]
    problems += census["start"].changes(census["end"]) + census["before"].changes(census["after"])
    return {
        "requests": done,
        "seconds": round(seconds, 1),
        "kinds": dict(tally.kinds),
        "exact": tally.exact,
        "cut_by_the_caller": tally.cut,
        "looks_that_found_a_throttled_request": tally.throttled,
        "flat_below_kib_per_request": FLAT,
        "memory_mib": {name: asdict(t) | {"flat": t.flat(FLAT)} for name, t in trends.items()},
        "problems": problems,
        "census": {name: asdict(c) for name, c in census.items()},
        "raw": {"columns": ["requests", *memory.names], "bytes": memory.taken.tolist()},
    }


def due(numbers: Iterator[int], end: float) -> Iterator[int]:
    """Shared by the workers, until the time is up."""
    for i in numbers:
        if time.monotonic() > end:
            return
        yield i


def main(given: Sequence[str]) -> int:
    p = parser("faults --parts soak", __doc__, package="tests.slow")
    p.add_argument("--requests", type=int, default=20_000)
    p.add_argument("--at-once", type=int, default=12)
    p.add_argument("--placement", default="processes")
    p.add_argument(
        "--deadline",
        type=float,
        default=120.0,
        help="seconds within which a request must be answered",
    )
    p.add_argument(
        "--limit-s", type=float, default=14400.0, help="stop asking after so many seconds"
    )
    args = p.parse_args(given)
    if args.requests < LEAST_SAMPLES:
        p.error(f"at least {LEAST_SAMPLES} requests: fewer do not tell whether memory grows")
    return judged(args.out, on_tiny(lambda model: soak(model, args)))
