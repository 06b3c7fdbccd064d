"""The soak: thousands of mixed requests on the tiny model, a dozen at a time, and not one wrong sample.

    python bench/soak.py --requests 2000 --out bench/results/soak.json

Requests come from a small pool whose answers the plain driver has given beforehand: text-only, spoken, with sound and
pictures. Some are cancelled at a seeded event (by closing the iterator, or by cancelling the task that reads it), some
have a listener that rests between events until the engine throttles them. The memory of the orchestrator and its hosts
is sampled on the way; at the end nothing may be held."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from env import describe
from pool import Answer, Case, Census, cases, resident, settle
from tqdm import tqdm

from stretto.models.qwen3_omni.tiny import write_tiny
from stretto.orchestrator.api import AudioChunk, ChunkSizes, Params
from stretto.orchestrator.engine import PipelineEngine
from stretto.orchestrator.settings import EngineConfig, HostSettings, parse_placement

LENGTHS = [(4, 6), (6, 4), (2, 5), (5, 6), (3, 3), (6, 6), (4, 2), (2, 6), (6, 5), (4, 4), (6, 2), (3, 2)]
SILENT = 3
KINDS = {"whole": 55, "closed": 12, "cancelled": 13, "slow": 20}  # of a hundred
BUFFERED_S = 0.1  # sound that may wait for a slow listener: little more than a frame
REST_S = 0.1


@dataclass(slots=True)
class Tally:
    kinds: Counter[str] = field(default_factory=Counter)
    exact: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    throttled: int = 0
    memory: list[dict[str, int]] = field(default_factory=list)  # bytes, by process; "requests": done by then


async def one(engine: PipelineEngine, case: Case, kind: str, rng: random.Random, tally: Tally) -> None:
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
                tally.throttled += any(t.throttled for t in engine._tickets.values())

    reader = asyncio.create_task(read())
    if kind == "cancelled" and rng.randrange(3) == 0:
        await asyncio.sleep(0)
        reader.cancel()  # before its first event, or before it is admitted
    result = (await asyncio.gather(reader, return_exceptions=True))[0]
    if isinstance(result, asyncio.CancelledError):
        return
    if isinstance(result, BaseException):
        tally.errors[f"{type(result).__name__}: {result}"] += 1
    elif answer.end is None:
        if kind != "closed":
            tally.wrong.append(f"{case.name}: ended without its last event")
    elif problem := case.problem(answer):
        tally.wrong.append(problem)
    else:
        tally.exact += 1


def sample(engine: PipelineEngine, done: int) -> dict[str, int]:
    hosts = {f"host {i}": resident(pid) for i, pid in enumerate(engine.pids) if pid is not None}
    return {"requests": done, "orchestrator": resident(), **hosts}


def growth(samples: list[dict[str, int]]) -> dict[str, dict[str, float]]:
    """MiB at the start, in the middle and at the end, and the slope over the second half in KiB per request."""
    half = samples[len(samples) // 2 :]
    assert half[0]["requests"] < half[-1]["requests"], "too few requests to tell"
    found = {}
    for name in samples[0]:
        if name != "requests":
            slope = np.polyfit([s["requests"] for s in half], [s[name] for s in half], 1)[0]
            at = {"start": samples[0], "middle": half[0], "end": samples[-1]}
            found[name] = {k: round(s[name] / 2**20, 2) for k, s in at.items()} | {
                "second_half_kib_per_request": round(float(slope) / 1024, 3)
            }
    return found


async def soak(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    params = Params(want_codes=True, packets=ChunkSizes(1, 2, 2))
    pool = cases(model, params, LENGTHS, SILENT)
    config = EngineConfig(
        placement=parse_placement(args.placement), max_buffered_s=BUFFERED_S, host=HostSettings(max_rows=16)
    )
    tally = Tally()
    before = Census.take()
    async with PipelineEngine.open(model, config) as engine:
        await asyncio.gather(*(one(engine, case, "whole", random.Random(0), tally) for case in pool))
        assert tally.exact == len(pool), (tally.wrong, tally.errors)  # and the caches are warm
        await settle(engine)
        tally, start = Tally(), Census.take(engine)
        tally.memory.append(sample(engine, 0))
        began = time.monotonic()
        bar = tqdm(total=args.requests, desc="requests")
        numbers = iter(range(args.requests))

        async def worker() -> None:
            for i in due(numbers, began + args.limit_s):
                rng = random.Random(i)
                kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
                await one(engine, rng.choice(pool), kind, rng, tally)
                bar.update()
                if bar.n % 50 == 0:
                    tally.memory.append(sample(engine, bar.n))

        await asyncio.gather(*(worker() for _ in range(args.at_once)))
        bar.close()
        seconds = time.monotonic() - began
        held, end = await settle(engine), Census.take(engine)
        tally.memory.append(sample(engine, bar.n))
    await asyncio.sleep(0.05)  # transports close in the loop's next turns
    after = Census.take()
    return {
        "env": describe(),
        "placement": args.placement,
        "at_once": args.at_once,
        "asked": args.requests,
        "requests": sum(tally.kinds.values()),
        "seconds": round(seconds, 1),
        "kinds": dict(tally.kinds),
        "exact": tally.exact,
        "wrong": tally.wrong,
        "errors": dict(tally.errors),
        "looks_that_found_a_throttled_request": tally.throttled,
        "held_at_the_end": held,
        "memory_mib": growth(tally.memory),
        "census": {k: asdict(c) for k, c in zip(("before", "start", "end", "after"), (before, start, end, after))},
        "memory_bytes": tally.memory,
    }


def due(numbers: Iterator[int], end: float) -> Iterator[int]:
    """Shared by the workers, until the time is up."""
    for i in numbers:
        if time.monotonic() > end:
            return
        yield i


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--requests", type=int, default=2000)
    p.add_argument("--at-once", type=int, default=12)
    p.add_argument("--placement", default="processes")
    p.add_argument("--limit-s", type=float, default=1800.0, help="stop asking after so many seconds")
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_tiny(model)
        result = asyncio.run(soak(model, args))
    print(json.dumps({k: v for k, v in result.items() if k != "memory_bytes"}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(result["wrong"] or result["errors"] or result["held_at_the_end"]))


if __name__ == "__main__":
    main()
