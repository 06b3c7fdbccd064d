"""The fault matrix: kill -9 of hosts at seeded moments with eight requests in flight, on the tiny
model.

    python -m tests.slow faults --parts kills --kills 300 --out bench/results/faults.json

A moment is counted in events: the host is killed when the callers have seen the n-th event of the
batch. Some kills are followed by the kill of another host while the first comes back. After each
kill, every caller must have one of our errors or its exact answer within the deadline, a new
request must be exact, and nothing may be held: requests, blocks, vocoder slots, inboxes, outboxes
and link slots in the hosts; descriptors, tasks, children and host objects here; names in /dev/shm.
The orchestrator's memory must be flat over the second half of the kills, as in the part `soak`, or
grow by less than 4 KiB a kill (1.2 MiB in 300)."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.harness.results import judged, parser, progress, quantile
from stretto.config.engine import EngineConfig, HostSettings
from stretto.engine.engine import PipelineEngine
from stretto.engine.local_host import HostProcess
from stretto.errors import StrettoError
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.params import Params
from tests.slow.harness.leaks import (
    LEAST_SAMPLES,
    POLL_S,
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
IN_FLIGHT = 8
LENGTHS = [(12, 16), (10, 14), (12, 12), (16, 16), (8, 20), (14, 10), (16, 16), (16, 16), (12, 12)]
SECOND_EVERY = 6  # one kill in so many is followed by another
FLAT = 4.0  # KiB per kill


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

    def problems(self) -> list[str]:
        found = self.wrong + self.held
        found += [] if self.probe_exact else ["the request after the restart was not exact"]
        found += ["callers past the deadline"] if "late" in self.outcomes else []
        answered = sum(self.outcomes.values())
        return found + (
            [f"{answered} of {IN_FLIGHT} callers were answered"] if answered != IN_FLIGHT else []
        )


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
            async for event in self.engine.generate(
                case.messages, modalities=case.modalities, params=case.params
            ):
                answer.take(event)
                self.reached()
        except StrettoError as e:
            return type(e).__name__, time.monotonic()
        return case.problem(answer) or "exact", time.monotonic()


async def kill_once(
    engine: PipelineEngine, pool: list[Case], index: int, total: int, deadline: float
) -> Kill:
    rng = random.Random(index)
    victim = index % 3
    kill = Kill(STAGES[victim], rng.randrange(total))
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
    try:
        async with asyncio.timeout(deadline):
            while not engine.pipelines[0].ready(STAGES) or engine.pids[victim] in (pid, None):
                await asyncio.sleep(POLL_S)
            kill.seconds_to_ready = time.monotonic() - killed_at
            kill.probe_exact = (await Counted(engine).one(pool[-1]))[0] == "exact"
            kill.held = await settle(engine)
    except TimeoutError:
        kill.held.append(f"not ready and idle again in {deadline:g} s")
    hosts = sum(isinstance(o, HostProcess) for o in gc.get_objects())
    if hosts != len(STAGES):
        gc.collect()  # a cycle may wait for its collection; what is left then is kept
        hosts = sum(isinstance(o, HostProcess) for o in gc.get_objects())
    kill.held += [f"{hosts} host objects"] if hosts != len(STAGES) else []
    return kill


async def second(engine: PipelineEngine, kill: Kill, rng: random.Random) -> None:
    """Another host dies while the first is coming back, or the same one again."""
    other = rng.randrange(3)
    for _ in range(rng.randrange(120)):
        await asyncio.sleep(POLL_S)
    pid = engine.pids[other]
    if pid is not None:
        kill.second = STAGES[other]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # the first kill's own, not replaced yet
        while engine.pids[other] == pid:
            await asyncio.sleep(POLL_S)


async def matrix(model: Path, kills: int, deadline: float) -> dict[str, Any]:
    pool, env = prepared(model, Params(want_codes=True), LENGTHS, silent=3)
    before = Census.take()
    config = EngineConfig(placement="processes", connector="shm", host=HostSettings(max_rows=16))
    records: list[Kill] = []
    memory = Memory.of(["orchestrator"], kills + 1)
    async with PipelineEngine.open(model, config) as engine:
        dry = Counted(engine)
        results = await asyncio.gather(*(dry.one(case) for case in pool[:IN_FLIGHT]))
        assert all(what == "exact" for what, _ in results), results
        assert not (held := await settle(engine)), held
        start = Census.take(engine)
        memory.sample(0, [None])
        for i in progress(range(kills), "kills"):
            records.append(await kill_once(engine, pool, i, dry.seen, deadline))
            memory.sample(i + 1, [None])
            if bad := records[-1].problems():
                tqdm.write(f"kill {i}: {bad}")
        end = Census.take(engine)
    await asyncio.sleep(POLL_S)  # transports close in the loop's next turn
    census = {"before": before, "start": start, "end": end, "after": Census.take()}
    return {"env": env} | report(records, dry.seen, census, memory)


def report(
    records: list[Kill], events: int, census: dict[str, Census], memory: Memory
) -> dict[str, Any]:
    total: Counter[str] = sum((Counter(k.outcomes) for k in records), Counter())
    errors = [k.seconds_to_last_error for k in records if k.seconds_to_last_error is not None]
    ready = [k.seconds_to_ready for k in records]
    grown = trend(memory.taken[:, 0], memory.taken[:, 1])
    problems = [f"kill {i}: {bad}" for i, k in enumerate(records) if (bad := k.problems())]
    problems += [f"the orchestrator is not flat: {grown}"] if not grown.flat(FLAT) else []
    problems += census["start"].changes(census["end"]) + census["before"].changes(census["after"])
    return {
        "placement": [[stage] for stage in STAGES],
        "requests_in_flight": IN_FLIGHT,
        "events_of_a_whole_batch": events,
        "kills": len(records),
        "followed_by_a_second": sum(k.second is not None for k in records),
        "outcomes": dict(total),
        "seconds_to_last_error": spread(errors) if errors else None,
        "seconds_to_ready": spread(ready),
        "flat_below_kib_per_kill": FLAT,
        "orchestrator_mib": asdict(grown) | {"flat": grown.flat(FLAT)},
        "problems": problems,
        "census": {name: asdict(c) for name, c in census.items()},
        "raw": {
            "kills": [asdict(k) for k in records],
            "orchestrator_bytes": memory.taken[:, 1].tolist(),
        },
    }


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median": quantile(seconds, 0.5), "p99": quantile(seconds, 0.99), "most": max(seconds)}


def main(given: Sequence[str]) -> int:
    p = parser("faults --parts kills", __doc__, package="tests.slow")
    p.add_argument("--kills", type=int, default=300)
    p.add_argument(
        "--deadline",
        type=float,
        default=60.0,
        help="seconds within which every caller must be answered",
    )
    args = p.parse_args(given)
    if args.kills < LEAST_SAMPLES:
        p.error(f"at least {LEAST_SAMPLES} kills: fewer do not tell whether memory grows")
    return judged(args.out, on_tiny(lambda model: matrix(model, args.kills, args.deadline)))
