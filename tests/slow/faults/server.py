"""The soak of a server: thousands of visits of all kinds over HTTP and WebSockets, and nothing is
held in the end.

    python -m tests.slow faults --parts server --requests 20000 --sessions 2000 --out
    bench/results/soak_server.json

`stretto serve` on the tiny model, in processes of its own, is asked for everything that it does
(`visitors.py`): text, speech, structure, tools, media, transcriptions, what is refused; realtime
sessions with answers that are cancelled and interrupted, live speech; and clients that leave while
connecting, in headers, in bodies, before and in an answer. On the way the descriptors, threads,
memory files and segments of every process are noted, and its memory. Problems are: an answer that
failed and was not its client's doing; a process that has more descriptors than after the warm-up,
or has been replaced; more than `SLACK` threads more, as pools grow to their size by need; memory
files and segments; and memory that is not flat: a line through the second half of its samples rises
by more than 0.1 KiB for a request, and not by chance (as in the part `soak`). That is judged from
10,000 visits on, so a run in pieces judges only the rest. `--tree` runs the server of another
checkout."""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.harness.env import describe, sources
from bench.harness.proctree import PROMPT_JOB, Tree
from bench.harness.results import ROOT, judged, parser
from bench.harness.serving import Server, serving
from stretto.testing.qwen3_omni import write_tiny
from tests.slow.faults.visitors import KINDS, LEAVING, SESSIONS, Visitor, visits
from tests.slow.harness.leaks import LEAST_SAMPLES, trend

FLAT = 0.1  # KiB for each request
FILLED = 10_000
"""Visits below which memory is printed and not judged: links remember the last 4,096 requests that
are over, and a library keeps something for each shape of a step that it meets first."""
SAMPLES = 200
SLACK = 8  # threads of pools that grow by need
LEAVE_SHARE = 0.35  # of requests, by clients that do not wait for the end
COSTLY = {
    "large_sound": 0.2,
    "video_in": 0.3,
    "spoken": 0.5,
    "recalled": 0.5,
}  # how often, of the others
SETTLE_S = 60.0


def plan(num_requests: int, num_sessions: int, seed: int) -> list[str]:
    """What visitors do, in order."""
    rng = random.Random(seed)
    whole = [name for name in KINDS if name not in SESSIONS and name not in LEAVING]
    num_leaving = int(LEAVE_SHARE * num_requests)
    names = rng.choices(
        whole, [COSTLY.get(name, 1.0) for name in whole], k=num_requests - num_leaving
    )
    names += rng.choices(LEAVING, k=num_leaving) + rng.choices(SESSIONS, k=num_sessions)
    rng.shuffle(names)
    return names


def numbered(tree: Tree) -> dict[str, int]:
    """Memory that is a process's own, by name and number; jobs live too short."""
    found: dict[str, int] = {}
    for p in tree.processes.values():
        if p.name != PROMPT_JOB:
            same = sum(name.split(" #")[0] == p.name for name in found)
            found[f"{p.name} #{same + 1}" if same else p.name] = p.anonymous
    return found


async def settle(pid: int, before: Tree | None) -> Tree:
    """The processes when nobody is served: nothing is more than before, or (at first) nothing
    changes any more."""
    until, last = time.monotonic() + SETTLE_S, Tree.of(pid)
    while time.monotonic() < until:
        await asyncio.sleep(0.5)
        now = Tree.of(pid)
        if not (before or last).growth(now) and (
            before is not None or now.counts() == last.counts()
        ):
            return now
        last = now
    return last


async def soak(server: Server, args: argparse.Namespace, key: str) -> dict[str, Any]:
    def visitor(index: int) -> Visitor:
        return Visitor(server.port, key, random.Random(f"{args.seed}, {index}"))

    pid = server.process.pid
    failures: list[str] = []
    for _ in range(2):
        warm = await visits(
            visitor, plan(args.warmup, args.warmup // 5, args.seed - 1) + list(KINDS), args.at_once
        )
        failures += [f"warm-up: {failure}" for v in warm for failure in v.failures]
    before = await settle(pid, None)
    todo = plan(args.requests, args.sessions, args.seed)
    every, samples = max(1, len(todo) // SAMPLES), [(0, before)]
    began, bar = time.monotonic(), tqdm(total=len(todo), desc="visits", mininterval=1.0)

    def counted() -> Any:
        for number, name in enumerate(todo, start=1):
            if time.monotonic() - began > args.limit_s:
                return
            yield name
            bar.update()
            if number % every == 0:
                samples.append((number, Tree.of(pid)))

    came = await visits(visitor, counted(), args.at_once)
    bar.close()
    seconds = time.monotonic() - began
    after = await settle(pid, before)
    ended: Counter[str] = sum((v.ended for v in came), Counter())
    failures += [failure for v in came for failure in v.failures]
    return report(todo, ended, failures, samples, before, after) | {"seconds": round(seconds, 1)}


def report(
    todo: list[str],
    ended: Counter[str],
    failures: list[str],
    samples: list[tuple[int, Tree]],
    before: Tree,
    after: Tree,
) -> dict[str, Any]:
    at = np.array([number for number, _ in samples], np.int64)
    sizes = [numbered(tree) for _, tree in samples]
    names = [name for name in sizes[0] if all(name in size for size in sizes)]
    trends = {name: trend(at, np.array([size[name] for size in sizes], np.int64)) for name in names}
    counts = Counter(name in SESSIONS for name in todo)
    problems = [*failures[:100]]
    problems += [f"{len(failures)} visits failed"] if failures else []
    problems += (
        [f"{len(todo) - ended.total()} visits were not made: the time was up"]
        if ended.total() < len(todo)
        else []
    )
    problems += before.growth(after)
    old, new = before.by_name("threads"), after.by_name("threads")
    problems += [
        f"{name}: {old.get(name, 0)} threads, then {n}"
        for name, n in new.items()
        if n > old.get(name, 0) + SLACK
    ]
    if len(todo) >= FILLED:
        problems += [f"{name} is not flat: {t}" for name, t in trends.items() if not t.flat(FLAT)]
    return {
        "requests": counts[False],
        "sessions": counts[True],
        "outcomes": dict(sorted(ended.items())),
        "failures": len(failures),
        "flat_below_kib_per_request": FLAT,
        "kib_per_1000_requests": {name: round(1000 * t.slope, 1) for name, t in trends.items()},
        "memory_mib": {name: asdict(t) | {"flat": t.flat(FLAT)} for name, t in trends.items()},
        "before": before.told(),
        "after": after.told(),
        "problems": problems,
        "raw": [
            {"visits": number, "at_s": tree.at - samples[0][1].at, **tree.told()}
            for number, tree in samples
        ],
    }


def main(given: Sequence[str]) -> int:
    p = parser("faults --parts server", __doc__, package="tests.slow")
    p.add_argument("--requests", type=int, default=20_000)
    p.add_argument("--sessions", type=int, default=2_000)
    p.add_argument("--at-once", type=int, default=8)
    p.add_argument(
        "--warmup",
        type=int,
        default=600,
        metavar="N",
        help="requests, and a fifth as many sessions; twice",
    )
    p.add_argument("--seed", type=int, default=1, help="for runs in pieces, a different one each")
    p.add_argument(
        "--placement", default="two", help="of the server's stages (default: %(default)s)"
    )
    p.add_argument(
        "--limit-s", type=float, default=14400.0, help="stop asking after so many seconds"
    )
    p.add_argument("--tree", type=Path, default=ROOT, metavar="CHECKOUT", help="whose server it is")
    p.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="more flags for `stretto serve`; last"
    )
    args = p.parse_args(given)
    if args.requests + args.sessions < LEAST_SAMPLES:
        p.error(f"at least {LEAST_SAMPLES} visits: fewer do not tell whether memory grows")
    key, tree = secrets.token_hex(8), args.tree.resolve()
    flags = [
        "--api-key",
        key,
        "--placement",
        args.placement,
        "--tune",
        "audio_kept=64",
        *args.serve,
    ]
    with tempfile.TemporaryDirectory(prefix="stretto-soak-") as folder:
        write_tiny(Path(folder) / "tiny")
        settings = argparse.Namespace(device="cpu", model="tiny", max_rows=32, serve=flags)
        with serving(settings, Path(folder) / "tiny", Path(folder), tree=tree) as server:
            server.wait(300)
            found = asyncio.run(soak(server, args, key))
    more = {
        "env": describe(),
        "tree": sources(tree),
        "placement": args.placement,
        "at_once": args.at_once,
    }
    return judged(args.out, more | found)
