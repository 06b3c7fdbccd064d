"""The fault matrix: kill -9 of hosts at seeded moments with eight requests in flight, on the tiny model.

    python bench/faults.py --kills 50 --out bench/results/faults.json

A moment is counted in events: the victim dies when the n-th event of the batch has been seen by its caller. Some kills
are followed by that of another host while the first is coming back. After each, every caller must have an error of
ours or its exact answer within the deadline, a new request must be exact, and nothing may be held: requests, blocks,
vocoder slots, boxes and ring slots in the hosts, descriptors, tasks and children here, names in /dev/shm."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from env import describe, quantile
from pool import POLL_S, Answer, Case, Census, cases, settle
from tqdm import tqdm

from stretto.errors import StrettoError
from stretto.models.qwen3_omni.tiny import write_tiny
from stretto.orchestrator.api import Params
from stretto.orchestrator.engine import PipelineEngine
from stretto.orchestrator.settings import PROCESSES, EngineConfig, HostSettings

IN_FLIGHT = 8
LENGTHS = [(12, 16), (10, 14), (12, 12), (16, 16), (8, 20), (14, 10), (16, 16), (16, 16), (12, 12)]
SECOND_EVERY = 6  # one kill in so many is followed by another


@dataclass(slots=True)
class Kill:
    victim: str
    moment: int  # events seen before it
    second: str | None = None
    outcomes: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seconds_to_last_error: float | None = None
    seconds_to_ready: float = 0.0
    probe_exact: bool = False
    held: list[str] = field(default_factory=list)


class Counted:
    """Counts the events of a batch and acts when the n-th is seen."""

    def __init__(self, engine: PipelineEngine) -> None:
        self.engine, self.seen, self.at, self.act = engine, 0, -1, lambda: None

    def reached(self) -> None:
        if self.seen == self.at:
            self.act()
        self.seen += 1

    async def one(self, case: Case) -> tuple[str, float]:
        answer = Answer()
        try:
            async for event in self.engine.generate(case.messages, modalities=case.modalities, params=case.params):
                answer.take(event)
                self.reached()
        except StrettoError as e:
            return type(e).__name__, time.monotonic()
        return case.problem(answer) or "exact", time.monotonic()


async def kill_once(engine: PipelineEngine, pool: list[Case], index: int, total: int, deadline: float) -> Kill:
    rng = random.Random(index)
    stages = [host[0] for host in PROCESSES]
    victim = index % 3
    kill = Kill(stages[victim], rng.randrange(total))
    killed_at = 0.0
    pid = engine.pids[victim]
    assert pid is not None

    def strike() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    batch = Counted(engine)
    batch.at, batch.act = kill.moment, strike
    tasks = [asyncio.create_task(batch.one(case)) for case in pool[:IN_FLIGHT]]
    _, late = await asyncio.wait(tasks, timeout=deadline)
    outcomes: Counter[str] = Counter(late=len(late)) if late else Counter()
    for task in late:
        task.cancel()
    if not killed_at:  # fewer events than in the dry run: an idle engine loses its host
        strike()
    last = killed_at
    for task in tasks:
        if task in late:
            continue
        what, when = task.result()
        outcomes[what if what == "exact" or what.isidentifier() else "wrong"] += 1
        if what.isidentifier() and what != "exact":
            last = max(last, when)
            kill.seconds_to_last_error = last - killed_at
        elif what != "exact":
            kill.wrong.append(what)
    kill.outcomes = dict(outcomes)
    if index % SECOND_EVERY == SECOND_EVERY - 1:
        await second(engine, kill, rng)
    while not engine._pipelines[0].ready(speak=True) or engine.pids[victim] in (pid, None):
        await asyncio.sleep(POLL_S)
    kill.seconds_to_ready = time.monotonic() - killed_at
    kill.probe_exact = (await Counted(engine).one(pool[-1]))[0] == "exact"
    kill.held = await settle(engine)
    return kill


async def second(engine: PipelineEngine, kill: Kill, rng: random.Random) -> None:
    """Another host dies while the first is coming back, or the same one again."""
    other = rng.randrange(3)
    for _ in range(rng.randrange(120)):
        await asyncio.sleep(POLL_S)
    pid = engine.pids[other]
    if pid is not None:
        kill.second = PROCESSES[other][0]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # the first kill's own, not replaced yet
        while engine.pids[other] == pid:
            await asyncio.sleep(POLL_S)


async def matrix(model: Path, kills: int, deadline: float) -> dict[str, Any]:
    params = Params(want_codes=True)
    pool = cases(model, params, LENGTHS, silent=3)
    before = Census.take()
    config = EngineConfig(placement=PROCESSES, connector="shm", host=HostSettings(max_rows=16))
    records: list[Kill] = []
    async with PipelineEngine.open(model, config) as engine:
        dry = Counted(engine)
        results = await asyncio.gather(*(dry.one(case) for case in pool[:IN_FLIGHT]))
        assert all(what == "exact" for what, _ in results), results
        assert not (held := await settle(engine)), held
        start = Census.take(engine)
        for i in tqdm(range(kills), desc="kills"):
            records.append(await kill_once(engine, pool, i, dry.seen, deadline))
            if bad := problems(records[-1]):
                print(i, bad, file=sys.stderr)
        end = Census.take(engine)
    await asyncio.sleep(POLL_S)  # transports close in the loop's next turn
    after = Census.take()
    return report(records, dry.seen, {"before": before, "start": start, "end": end, "after": after})


def problems(kill: Kill) -> list[str]:
    found = kill.wrong + kill.held
    found += [] if kill.probe_exact else ["the request after the restart was not exact"]
    return found + (["callers past the deadline"] if "late" in kill.outcomes else [])


def report(records: list[Kill], events: int, census: dict[str, Census]) -> dict[str, Any]:
    total: Counter[str] = sum((Counter(k.outcomes) for k in records), Counter())
    errors = [k.seconds_to_last_error for k in records if k.seconds_to_last_error is not None]
    ready = [k.seconds_to_ready for k in records]
    return {
        "env": describe(),
        "placement": [list(host) for host in PROCESSES],
        "requests_in_flight": IN_FLIGHT,
        "events_of_a_whole_batch": events,
        "kills": len(records),
        "followed_by_a_second": sum(k.second is not None for k in records),
        "outcomes": dict(total),
        "problems": sum(bool(problems(k)) for k in records),
        "seconds_to_last_error": {"median": quantile(errors, 0.5), "most": max(errors)} if errors else None,
        "seconds_to_ready": {"median": quantile(ready, 0.5), "most": max(ready)},
        "census": {name: asdict(c) for name, c in census.items()},
        "each": [asdict(k) for k in records],
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kills", type=int, default=50)
    p.add_argument("--deadline", type=float, default=30.0, help="seconds within which every caller must be answered")
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_tiny(model)
        result = asyncio.run(matrix(model, args.kills, args.deadline))
    print(json.dumps({k: v for k, v in result.items() if k != "each"}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(result["problems"] > 0)


if __name__ == "__main__":
    main()
