"""The measurements behind the claims of docs/performance.md, one after another, within a limit.

    python -m bench proofs --out-dir bench/results --suffix _h200 --tree before=../old
    python -m bench proofs --out-dir /tmp/proofs --only links:170,trees --more "links:--levels 8"
    python -m bench proofs --out-dir /tmp/proofs --limit 300 --model tiny --quick  # tries it

Parts, the most important first; `--only A:SECONDS,B` chooses, in the order given:

    tests    the GPU's own tests and some of the parity suite (`python -m tests.gpu --selection`)
    gaps     launch gaps of every stage, overlap on and off (`bench gaps`)
    prompts  32 streams of long prompts on a server of this checkout (`bench trees`)
    links    three processes on one card, each overlap of the links off in turn (`engine --parts
             links`)
    trees    this checkout and each `--tree` by turns over HTTP; on this one's server also
             conversations (`bench trees`)

Each part runs in a process of its own and writes its own file as it goes; what all of them print
is in `proofs.log`. A part is told how long it may take: its SECONDS, at most what is left, else its
share of the time that is left. It is ended, with what it started, if it takes longer. One that
fails does not keep the others from running; `proofs.json` says how each ended."""

from __future__ import annotations

import argparse
import os
import shlex
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
    file: str = ""  # without the suffix; default: its name
    host: bool = True  # takes the model's arguments


PARTS = {
    p.name: p
    for p in (
        Part(
            "tests", 2.1, ("tests.gpu", "--selection"),
            ("--device", "cpu", "-k", "test_solo and text", "--workers", "1"),
            file="gpu_selection{}.txt", host=False,
        ),
        Part(
            "gaps", 1.25, ("bench", "gaps"),
            ("--rows", "1", "2", "--rounds", "1", "--text", "8", "--frames", "12"),
            file="gaps{}.json",
        ),
        Part(
            "prompts", 1.2,
            (
                "bench", "trees", "--also", "prompts", "--levels", "32", "--prompt-levels", "32",
                "--servers", "1", "--max-rows", "32",
            ),
            (
                "--quick", "--levels", "1", "--prompt-levels", "2", "--requests", "1", "--rounds",
                "1", "--seconds", "4", "--max-rows", "2",
            ),
            file="prompts{}.json",
        ),
        Part(
            "links", 1.6, ("bench", "engine", "--parts", "links", "--levels", "8", "32"),
            ("--levels", "2", "--workload", "small-audio", "--rounds", "1", "--requests", "2"),
            file="links{}.json",
        ),
        Part(
            "trees", 2.0, ("bench", "trees", "--also", "live"),
            (
                "--quick", "--levels", "1", "--servers", "1", "--requests", "1", "--rounds", "1",
                "--seconds", "4", "--max-rows", "2", "--http-live", "2", "--live-seconds", "1",
                "--live-turn", "1", "--live-frames", "8",
            ),
            file="trees{}.json",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chosen:
    part: Part
    seconds: float | None = None  # at most


def chosen(given: str) -> list[Chosen]:
    """The type of `--only`: names of parts, by commas, each with its seconds behind a colon."""
    pairs = [item.partition(":") for item in given.split(",") if item]
    names = one_of(list(PARTS))(",".join(name for name, _, _ in pairs))
    try:
        limits = [float(seconds) if seconds else None for _, _, seconds in pairs]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given}: NAME:SECONDS, seconds a number") from None
    return [Chosen(PARTS[name], limit) for name, limit in zip(names, limits, strict=True)]


def shares(left_s: float, parts: Sequence[Part]) -> float:
    """How long the first of these may take. What it does not use goes to the others."""
    return left_s * parts[0].share / sum(p.share for p in parts)


def allowed(left_s: float, todo: Sequence[Chosen]) -> float:
    """How long the first of these may take."""
    if (most := todo[0].seconds) is not None:
        return min(most, left_s)
    kept = sum(c.seconds or 0.0 for c in todo)
    return shares(left_s - kept, [c.part for c in todo if c.seconds is None])


def command(part: Part, args: argparse.Namespace, limit: float) -> list[str]:
    package, *words = part.words
    words += ["--out", str(args.out_dir / part.file.format(args.suffix))]
    if part.host:
        words += ["--model", args.model]
        words += ["--device", args.device] if args.device else []
        words += [w for field in args.host for w in ("--host", field)]
    words += ["--limit", f"{limit:.0f}", *(part.quick if args.quick else ())]
    if part.name == "trees":
        words += [w for tree in args.tree for w in ("--tree", tree)]
    words += [w for name, more in args.more if name == part.name for w in more]
    return [sys.executable, "-m", package, *words]


def run(words: Sequence[str], log: Path, limit: float) -> str:
    """How it ended: `complete`, `cut`, or its exit status. What it prints goes behind what `log`
    holds."""
    with log.open("ab") as out:
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
    log = args.out_dir / "proofs.log"
    log.write_text("", encoding="utf-8")
    todo = list(args.only)
    while todo:
        left = end - time.monotonic()
        limit = allowed(left - GRACE_S, todo)
        part = todo.pop(0).part
        outcome = {"state": "left out", "limit_s": limit, "seconds": 0.0}
        result["parts"][part.name] = outcome
        if limit > LEAST_S:
            begun = time.monotonic()
            words = command(part, args, limit)
            before = log.stat().st_size
            outcome["state"] = run(words, log, limit + GRACE_S)
            outcome["seconds"] = time.monotonic() - begun
            print(f"{part.name}: {outcome['state']} in {outcome['seconds']:.0f} s", flush=True)
            printed = log.read_bytes()[before:].decode(errors="replace")
            print(printed[-args.tail :], flush=True)
        write(args.out_dir / "proofs.json", result)
    return result


def more(given: str) -> tuple[str, list[str]]:
    """The type of `--more`: a part and further words of its command, which come last."""
    name, _, words = given.partition(":")
    [part] = one_of(list(PARTS))(name) or [""]
    return part, shlex.split(words)


def main(given: Sequence[str]) -> int:
    p = parser("proofs", __doc__, out=False)
    add_model_arguments(p, "released")
    p.add_argument("--out-dir", type=Path, required=True, help="for the files of all parts")
    p.add_argument(
        "--only", type=chosen, default=[Chosen(part) for part in PARTS.values()],
        metavar="A:SECONDS,B", help="parts, in this order (default: all)",
    )  # fmt: skip
    p.add_argument(
        "--more", type=more, action="append", default=[], metavar="PART:WORDS",
        help="further arguments of a part; may be repeated",
    )  # fmt: skip
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
