"""Servers of several checkouts by turns on one machine, measured by one client: this one's.

    python -m bench trees --tree before=../old --out trees.json              # 5 minutes, GPU
    python -m bench trees --tree before=../old --model tiny --levels 1 2 --servers 1

Each round starts the server of each `--tree NAME=CHECKOUT` and of this checkout (`head`), one after
the other, and each round begins with the next one. A server is measured at each of `--levels` by a
closed loop: first audio, RTF, the longest wait of a simulated player and the speech made in a
second. All servers get the same flags; one that a checkout's `serve --help` does not list is left
out there, and the file says so. One client may use all rows.

`--also prompts,live` measures more on the first server of this checkout: prompts of 2,000 tokens,
of 10 s of sound and with a picture, at `--prompt-levels` (answers of 10 s); and conversations over
WebSockets in real time (as `bench realtime --parts http`), with their RTF.

The file is written after each cell. No server is started after `--limit` seconds, and none that
would not be ready in time, by the starts before it."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.checkpoint import add_model_arguments, checkpoint, device_here
from bench.harness.crowd import Crowd, Questions
from bench.harness.env import sources
from bench.harness.parts import one_of
from bench.harness.results import ROOT, arguments, parser, write
from bench.harness.rounds import turns
from bench.harness.serving import GpuWatch, Server, environment, serving
from bench.report.proofs import tree_table
from bench.serve import Stand, described, server_flags, thinned
from stretto.preprocess.template import Tokenizer

HEAD = "head"
ALSO = ("prompts", "live")


@dataclass(slots=True)
class Tree:
    """A checkout, and which flags its `stretto serve` knows."""

    name: str
    path: Path
    known: str = ""

    def knows(self, flag: str) -> bool:
        self.known = self.known or subprocess.run(
            [sys.executable, "-m", "stretto", "serve", "--help"],
            cwd=self.path, env=environment(self.path), capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        return f"{flag} " in f"{self.known} "


def tree(given: str) -> Tree:
    name, _, path = given.rpartition("=")
    if not (Path(path) / "stretto").is_dir():
        raise argparse.ArgumentTypeError(f"{path}: no checkout")
    return Tree(name or Path(path).name, Path(path).resolve())


@dataclass(slots=True)
class Run:
    args: argparse.Namespace
    trees: list[Tree]
    directory: Path
    begun: float
    result: dict[str, Any]
    # how long a server of each checkout took, from its start to its end
    took: dict[str, float] = field(default_factory=dict)
    also: list[str] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return float(self.args.limit) - (time.monotonic() - self.begun)

    def measure(self) -> None:
        for number, one in turns(self.trees, self.args.servers):
            if self.left_s < self.took.get(one.name, 0.0):
                self.result["left_out"].append([number, one.name])
                continue
            run: dict[str, Any] = {"tree": one.name, "round": number, "cells": [], "error": None}
            self.result["runs"].append(run)
            try:
                self.server(one, run)
            except Exception as e:  # noqa: BLE001  the other servers are still worth their time
                run["error"] = f"{type(e).__name__}: {e}"
                print(f"{one.name}: {run['error']}", flush=True)
            write(self.args.out, self.result)

    def server(self, one: Tree, run: dict[str, Any]) -> None:
        before = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="stretto-trees-") as name,
            serving(
                self.args, self.directory, Path(name), tree=one.path, knows=one.knows
            ) as server,
        ):
            run["flags"] = server.flags
            server.wait(min(self.args.start_timeout, max(10.0, self.left_s)))
            run["ready_s"] = server.ready_s
            print(
                f"== {one.name}, round {run['round']}: ready in {server.ready_s:.1f} s", flush=True
            )
            gpu = GpuWatch()
            try:
                crowd = Crowd(server, Path(name), gpu, self.args.processes)
                tokenizer = Tokenizer.open(self.directory)
                stand = Stand(self.args, crowd, Questions(self.directory.name, tokenizer))
                self.cells(stand, run)
                self.took[one.name] = time.monotonic() - before
                if one.name == HEAD:
                    self.more(stand, server)
            finally:
                gpu.close()

    def cells(self, stand: Stand, run: dict[str, Any]) -> None:
        for cell in stand.latency():
            self.add(run["cells"], cell)
            if self.left_s < 0:
                return

    def more(self, stand: Stand, server: Server) -> None:
        """What is measured of this checkout alone, once."""
        while self.also and self.left_s > 0:
            what = self.also.pop(0)
            found = self.result.setdefault(what, [])
            for cell in stand.prompts() if what == "prompts" else self.live(server):
                self.add(found, cell)
                if self.left_s < 0:
                    return

    def add(self, to: list[Any], cell: dict[str, Any]) -> None:
        to.append(thinned(cell))
        write(self.args.out, self.result)

    def live(self, server: Server) -> Iterator[dict[str, Any]]:
        from bench.realtime.sockets import Sockets

        yield asyncio.run(Sockets(self.args, server, time.perf_counter() + 60.0).live())


def main(given: Sequence[str]) -> int:
    p = parser("trees", __doc__)
    add_model_arguments(p, "released")
    p.add_argument(
        "--tree", type=tree, action="append", default=[], metavar="NAME=CHECKOUT",
        help="another checkout; may be repeated",
    )  # fmt: skip
    p.add_argument("--levels", type=int, nargs="+", default=[1, 8, 32, 128])
    p.add_argument("--prompt-levels", type=int, nargs="+", default=[1, 8, 32])
    p.add_argument("--also", type=one_of(ALSO), default=[], metavar="A,B", help="prompts, live")
    p.add_argument("--requests", type=int, default=16, help="of a cell, at least (default: 16)")
    p.add_argument("--rounds", type=int, default=2, help="of all streams of a cell, at least")
    p.add_argument("--seconds", type=float, default=5.0, help="of a cell at most (default: 5)")
    p.add_argument("--servers", type=int, default=2, help="of each checkout (default: 2)")
    p.add_argument("--max-rows", type=int, default=128)
    p.add_argument("--http-live", type=int, default=32, help="conversations (default: 32)")
    p.add_argument("--live-seconds", type=float, default=12.0, help="no turn begins later")
    p.add_argument("--live-turn", type=float, default=5.0, help="seconds of a turn")
    p.add_argument("--live-frames", type=int, default=62, help="of an answer")
    p.add_argument("--processes", type=int, default=6, help="of listeners, at most")
    p.add_argument("--start-timeout", type=float, default=240.0)
    p.add_argument("--limit", type=float, default=900.0, help="seconds after which none starts")
    p.add_argument("--quick", action="store_true", help="short answers: does it run at all?")
    p.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="more flags for `stretto serve`; last"
    )
    args = p.parse_args(given)
    args.device = args.device or device_here()
    args.serve = [*server_flags(args.host), *args.serve]
    args.last_first, args.frames = False, args.live_frames
    begun = time.monotonic()
    trees = [*args.tree, Tree(HEAD, ROOT)]
    result: dict[str, Any] = {
        "env": described(),
        "arguments": arguments(args) | {"tree": [t.name for t in trees]},
        "trees": {t.name: sources(t.path) for t in trees},
        "runs": [],
        "left_out": [],
    }
    with checkpoint(args.model) as directory:
        Run(args, trees, directory, begun, result, also=list(args.also)).measure()
    write(args.out, result)
    print(tree_table(result))
    return 1 if any(run["error"] or not run["cells"] for run in result["runs"]) else 0
