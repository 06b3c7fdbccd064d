"""The measurements behind the claims of docs/performance.md, one after another, within a limit.

    python -m bench proofs --out-dir bench/results --suffix _h200 --tree before=../old
    python -m bench proofs --out-dir /tmp/proofs --limit 200 --model tiny --quick  # tries it

Parts, the most important first; `--only A,B` chooses, in the order given:

    gaps    launch gaps of every stage, overlap on and off (`bench gaps`)
    trees   this checkout and each `--tree` by turns over HTTP; on this one's server also long
            prompts and conversations (`bench trees`)
    links   three processes on one card, each overlap of the links off in turn (`engine --parts
            links`)

Each part runs in a process of its own and writes its own file as it goes (`PART.json`, and its
output to `PART.log`). A part is told how long it may take: its share of the time that is left. It
is ended, with what it started, if it takes longer. One that fails does not keep the others from
running; `proofs.json` says how each ended."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.checkpoint import add_model_arguments
from bench.harness.parts import one_of
from bench.harness.results import ROOT, parser, write
from bench.harness.serving import environment
from bench.serve import described

GRACE_S = 15.0
"""A part ends by itself when its limit is over, after what it has begun; then it is ended."""
LEAST_S = 20.0
"""No part begins with less."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    share: float  # of the time, beside the parts that have not run yet
    words: tuple[str, ...]
    quick: tuple[str, ...]  # for trying it


PARTS = {
    p.name: p
    for p in (
        Part(
            "gaps", 1.25, ("gaps",),
            ("--rows", "1", "2", "--rounds", "1", "--text", "8", "--frames", "12"),
        ),
        Part(
            "trees", 3.2, ("trees", "--also", "prompts,live"),
            (
                "--quick", "--levels", "1", "--prompt-levels", "1", "--servers", "1",
                "--requests", "1", "--rounds", "1", "--seconds", "4", "--max-rows", "2",
                "--http-live", "2", "--live-seconds", "1", "--live-turn", "1",
                "--live-frames", "8",
            ),
        ),
        Part(
            "links", 1.1, ("engine", "--parts", "links"),
            ("--levels", "1", "--workload", "small-audio", "--rounds", "1"),
        ),
    )
}  # fmt: skip


def shares(left_s: float, parts: Sequence[Part]) -> float:
    """How long the first of these may take. What it does not use goes to the others."""
    return left_s * parts[0].share / sum(p.share for p in parts)


def command(part: Part, args: argparse.Namespace, limit: float) -> list[str]:
    words = [
        *part.words,
        "--model",
        args.model,
        "--out",
        str(args.out_dir / f"{part.name}{args.suffix}.json"),
    ]
    words += ["--device", args.device] if args.device else []
    words += [w for field in args.host for w in ("--host", field)]
    words += ["--limit", f"{limit:.0f}", *(part.quick if args.quick else ())]
    if part.name == "trees":
        words += [w for tree in args.tree for w in ("--tree", tree)]
    return [sys.executable, "-m", "bench", *words]


def run(words: Sequence[str], log: Path, limit: float) -> str:
    """How it ended: `complete`, `cut`, or its exit status."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return "cut"
        finally:
            stop(process)
    return "complete" if status == 0 else f"ended with {status}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """It and what it started; a server in a session of its own is ended by it at SIGTERM."""
    for sign, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return


def measure(args: argparse.Namespace) -> dict[str, Any]:
    end = time.monotonic() + args.limit
    result: dict[str, Any] = {"env": described(), "limit_s": args.limit, "parts": {}}
    args.out_dir.mkdir(parents=True, exist_ok=True)
    todo = [PARTS[name] for name in args.only]
    while todo:
        left = end - time.monotonic()
        limit = shares(left - GRACE_S, todo)
        part = todo.pop(0)
        told = result["parts"][part.name] = {"state": "left out", "limit_s": limit, "seconds": 0.0}
        if limit > LEAST_S:
            begun = time.monotonic()
            log = args.out_dir / f"{part.name}.log"
            told["state"] = run(command(part, args, limit), log, limit + GRACE_S)
            told["seconds"] = time.monotonic() - begun
            print(f"{part.name}: {told['state']} in {told['seconds']:.0f} s", flush=True)
            print(log.read_text(errors="replace")[-args.tail :], flush=True)
        write(args.out_dir / "proofs.json", result)
    return result


def main(given: Sequence[str]) -> int:
    p = parser("proofs", __doc__, out=False)
    add_model_arguments(p, "released")
    p.add_argument("--out-dir", type=Path, required=True, help="for the files of all parts")
    p.add_argument("--only", type=one_of(list(PARTS)), default=list(PARTS), metavar="A,B")
    p.add_argument("--limit", type=float, default=580.0, help="seconds for all (default: 580)")
    p.add_argument(
        "--tree", action="append", default=[], metavar="NAME=CHECKOUT", help="as of `bench trees`"
    )
    p.add_argument("--tail", type=int, default=3000, help="characters of a log that are printed")
    p.add_argument(
        "--suffix", default="", help="of the files' names, such as _h200, as the tables want them"
    )
    p.add_argument("--quick", action="store_true", help="a few short requests: does it run at all?")
    args = p.parse_args(given)
    args.out_dir = args.out_dir.resolve()
    args.tree = [resolved(tree) for tree in args.tree]
    result = measure(args)
    return int(any(part["state"] != "complete" for part in result["parts"].values()))


def resolved(tree: str) -> str:
    """Parts run in the root of this checkout."""
    name, _, path = tree.rpartition("=")
    return f"{name or Path(path).name}={Path(path).resolve()}"
