"""Attacks by name, one server each: what another client notices, and whether all is given back.

    python -m tests.slow hostile --out bench/results/attacks.json
    python -m tests.slow hostile --only descriptors,idle_sessions --tree OTHER_CHECKOUT \\
        --out bench/results/attacks_before.json --more --summaries

For each attack `stretto serve` is started on the tiny model with two API keys. The client of one
key listens to two streamed answers and sends ordinary requests of six kinds (text, structured text,
speech, a transcription, a realtime session, live speech); a probe asks /live all the time. First
alone (`quiet`), then beside the attack, which one or more processes make with the other key; they
are watched for some seconds at least, and until the attack has been answered. Then everybody
leaves, and what the server's processes hold is compared with what they held before.

Printed and kept for each: the worst latency of /live; the longest gap in a stream, and how many
times the longest quiet one it is; ordinary requests that were refused, failed or had no answer; how
the attack was answered, and after how long; memory, memory files and descriptors of all processes
before, at most, and after. Problems are: /live took more than 50 ms; a gap above 1.5 times the
quiet one; a refusal, or an ordinary request that took 2 s longer than any quiet one; descriptors,
processes or memory files that did not come back; more than 64 MiB of memory that did not. The exit
status is 1 if there are any. A server that takes more than `--memory-limit-mb` is killed, since
some attacks would take all of the machine.

`--tree` runs the server of another checkout (the clients are this one's), to compare two versions.
With `--more`, attacks that the file has and this run does not make stay in it.
The lowest priority of attackers, who stand for other machines, is the default; on a machine that is
busy they would come too late: `--attackers normal`."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.env import describe, sources
from bench.harness.proctree import Peak, Tree, settled, watched
from bench.harness.results import ROOT, parser, quantile, read, write
from bench.harness.serving import Server, environment, serving
from stretto.testing.qwen3_omni import write_tiny
from tests.slow.hostile.cases import CASES, Case

LIVE_MOST_S = 0.05
GAP_MOST = 1.5  # times the quiet one
WAIT_MOST_S = 2.0  # by which an ordinary request may take longer than the slowest quiet one
MEMORY_MOST = 64 << 20
START_S = 0.3  # from the last word to the common beginning
LEAD_S = 2.0  # by which the others come before attackers
Notes = dict[str, Any]


# ---- processes


def started(module: str, job: dict[str, Any]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", module], cwd=ROOT, env=environment(), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True, start_new_session=bool(job.get("idle")),
    )  # fmt: skip
    tell(process, json.dumps(job))
    return process


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(line + "\n")
        process.stdin.flush()


def wait_ready(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if line != "ready":
            raise RuntimeError(f"a client did not start: {line!r}")


def begin(
    processes: Sequence[subprocess.Popen[str]], attackers: Sequence[subprocess.Popen[str]]
) -> float:
    """Tell all when; attackers come when the streams of the others flow."""
    at = time.monotonic() + START_S
    for process in processes:
        tell(process, repr(at))
    at += LEAD_S if attackers else 0.0
    for process in attackers:
        tell(process, repr(at))
    return at


def result_of(process: subprocess.Popen[str], seconds: float) -> Notes:
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise RuntimeError("a client did not end") from None
    found: Notes = json.loads(out.splitlines()[-1])
    return found


@dataclass(slots=True)
class Watch:
    """The other key's client and the probe, while the block lasts."""

    port: int
    key: str
    found: Notes = field(default_factory=dict)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @contextmanager
    def watching(self, attackers: Sequence[subprocess.Popen[str]] = ()) -> Iterator[float]:
        """Yields the moment at which the last of them begin."""
        try:
            for role in ("probe", "client"):
                self._processes.append(started("tests.slow.hostile.victim", self._job(role)))
            wait_ready((*self._processes, *attackers))
            yield begin(self._processes, attackers)
            for process in self._processes:
                tell(process, "stop")
            probe, client = (result_of(p, 30) for p in self._processes)
            self.found = {**client, "live": probe["live"]}
        finally:
            for process in self._processes:
                process.kill()
                process.wait()

    def _job(self, role: str) -> dict[str, Any]:
        return {"role": role, "port": self.port, "key": self.key}


# ---- one attack


def watch_quiet(port: int, key: str, seconds: float) -> Notes:
    watch = Watch(port, key)
    with watch.watching() as at:
        time.sleep(max(0.0, at + seconds - time.monotonic()))
    return watch.found


def watch_attack(
    case: Case, port: int, keys: dict[str, str], args: argparse.Namespace
) -> tuple[Notes, list[Notes]]:
    attackers = [
        started(
            "tests.slow.hostile.attacker",
            {"attack": case.name, "port": port, "key": keys["attacker"], "index": i,
            "limit": case.limit_s,
             "idle": args.attackers == "idle"},
        )
        for i in range(case.processes)
    ]  # fmt: skip
    watch = Watch(port, keys["victim"])
    try:
        with watch.watching(attackers) as at:
            told = [result_of(p, case.limit_s + 60) for p in attackers]
            time.sleep(max(0.0, at + case.watch_s - time.monotonic(), args.linger))
    finally:
        for process in attackers:
            process.kill()
            process.wait()
    return watch.found, told


def summary(found: Notes) -> Notes:
    """Of what the others noticed."""

    def spread(pairs: list[list[float]]) -> Notes:
        values = [v for _, v in pairs]
        if not values:
            return {"count": 0, "p50": None, "p99": None, "max": None}
        of = {"p50": statistics.median(values), "p99": quantile(values, 0.99), "max": max(values)}
        return {"count": len(values), **of}

    asked: Counter[str] = Counter(kind for _, kind, _, _ in found["asked"])
    refused = Counter(
        f"{kind}: {outcome}" for _, kind, outcome, _ in found["asked"] if outcome != "ok"
    )
    slowest = {
        kind: max(s for _, k, _, s in found["asked"] if k == kind)
        for kind in asked
        if kind != "stream"
    }
    return {
        "seconds": found["seconds"],
        **{f"{name}_s": spread(found[name]) for name in ("live", "gaps", "first")},
        "asked": dict(asked),
        "refused": dict(refused),
        "refusals": sum(refused.values()),
        "slowest_s": slowest,
    }


def answered(told: list[Notes]) -> Notes:
    """How an attack was answered."""
    answers = [a for t in told for a in t["answers"]]
    times: dict[str, list[float]] = {}
    for status, seconds in answers:
        times.setdefault(status, []).append(seconds)
    return {
        "answers": {status: len(values) for status, values in times.items()},
        "seconds": {s: {"p50": statistics.median(v), "max": max(v)} for s, v in times.items()},
        "messages": {s: words for t in reversed(told) for s, words in t["messages"].items()},
        "errors": [t["error"] for t in told if t["error"]],
        "lasted_s": max(t["seconds"] for t in told),
        "cpu_s": sum(t["cpu_s"] for t in told),
    }


def judged(quiet: Notes, attacked: Notes, before: Tree, after: Tree, peak: Peak) -> list[str]:
    problems = []
    if peak.stopped:
        problems.append(f"the server was killed at {peak.anonymous + peak.file_bytes >> 20} MiB")
    live, gap, calm = attacked["live_s"]["max"], attacked["gaps_s"]["max"], quiet["gaps_s"]["max"]
    if live is None or live > LIVE_MOST_S:
        problems.append(
            f"/live took {1e3 * (live or 0):.0f} ms (quiet: {1e3 * quiet['live_s']['max']:.0f} ms)"
        )
    if gap is None:
        problems.append("no stream had two pieces")
    elif gap > GAP_MOST * calm:
        problems.append(
            f"a stream had a gap of {1e3 * gap:.0f} ms, {gap / calm:.1f} times the quiet "
            f"{1e3 * calm:.0f}"
        )
    slow, calm = (max(of["slowest_s"].values(), default=0.0) for of in (attacked, quiet))
    if slow > calm + WAIT_MOST_S:
        kind = max(attacked["slowest_s"], key=attacked["slowest_s"].get)
        problems.append(f"an ordinary request ({kind}) took {slow:.1f} s (quiet: {calm:.1f} s)")
    if attacked["refusals"]:
        problems.append(f"{attacked['refusals']} ordinary requests failed: {attacked['refused']}")
    problems += before.growth(after)
    for what in ("anonymous", "file_bytes"):
        more = getattr(after, what) - getattr(before, what)
        if more > MEMORY_MOST:
            problems.append(f"{more >> 20} MiB more of {what.replace('_', ' ')} than before")
    return problems


def one(case: Case, directory: Path, folder: Path, args: argparse.Namespace) -> Notes:
    keys = {who: secrets.token_hex(8) for who in ("attacker", "victim")}
    (folder / "keys").write_text("\n".join(keys.values()) + "\n")
    flags = ["--api-key-file", str(folder / "keys"), "--each-frames", "2", *case.flags, *args.serve]
    settings = argparse.Namespace(device="cpu", model="tiny", max_rows=32, serve=flags)
    with serving(settings, directory, folder, tree=args.tree, unread_log=case.unread_log) as server:
        server.wait(300)
        return observed(case, server, keys, args)


def observed(case: Case, server: Server, keys: dict[str, str], args: argparse.Namespace) -> Notes:
    pid = server.process.pid

    def stop() -> None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    watch_quiet(server.port, keys["victim"], args.warmup)
    quiet = watch_quiet(server.port, keys["victim"], args.quiet)
    time.sleep(1.0)  # the last client's connections end
    before = Tree.of(pid)
    with watched(pid, args.memory_limit_mb << 20, stop) as peak:
        attacked, told = watch_attack(case, server.port, keys, args)
    after = settled(pid, before, args.settle)
    of = {"quiet": summary(quiet), "attacked": summary(attacked)}
    problems = judged(of["quiet"], of["attacked"], before, after, peak)
    gap, calm = of["attacked"]["gaps_s"]["max"], of["quiet"]["gaps_s"]["max"]
    return {
        "attack": case.name,
        "about": case.about,
        **of,
        "gap_ratio": gap / calm if gap is not None and calm else None,
        "attackers": answered(told),
        "held": {
            "before": before.told(),
            "peak": {
                k: getattr(peak, k) for k in ("resident", "anonymous", "file_bytes", "descriptors")
            },
            "after": after.told(),
        },
        "server_ended": server.process.poll(),
        "problems": problems,
        "samples": {
            "quiet": quiet,
            "attacked": attacked,
            "attackers": [t["answers"][:5000] for t in told],
            "held": {
                "columns": ["s", "resident", "anonymous", "file_bytes", "descriptors"],
                "rows": peak.samples,
            },
        },
    }


def line(found: Notes) -> str:
    quiet, attacked, held = found["quiet"], found["attacked"], found["held"]

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{1e3 * value:.0f}"

    answers = ", ".join(f"{n} x {s} ({found['attackers']['seconds'][s]['max']:.1f} s)" for s, n in
                        found["attackers"]["answers"].items())  # fmt: skip
    mib = [
        held["before"]["anonymous"] >> 20,
        held["peak"]["anonymous"] >> 20,
        held["after"]["anonymous"] >> 20,
    ]
    fds = [held["before"]["descriptors"], held["after"]["descriptors"]]
    return (
        f"{found['attack']:<22} /live {ms(attacked['live_s']['max'])} (quiet "
        f"{ms(quiet['live_s']['max'])}) ms, "
        f"gap {ms(attacked['gaps_s']['max'])} (quiet {ms(quiet['gaps_s']['max'])}) ms, "
        f"refused {attacked['refusals']} of {sum(attacked['asked'].values())}, slowest "
        f"{max(attacked['slowest_s'].values(), default=0.0):.1f} s, "
        f"memory {mib[0]}, {mib[1]}, {mib[2]} MiB, files {held['peak']['file_bytes'] >> 20} MiB at "
        f"most, "
        f"descriptors {fds[0]}, {fds[1]}; answered: {answers}"
    )


def names(given: str) -> list[str]:
    wanted = [name for name in given.split(",") if name]
    if unknown := sorted(set(wanted) - set(CASES)):
        raise argparse.ArgumentTypeError(f"no such attack: {', '.join(unknown)}")
    return wanted


def main(given: Sequence[str]) -> int:
    p = parser("hostile --parts attacks", __doc__, package="tests.slow")
    p.add_argument(
        "--only",
        type=names,
        default=list(CASES),
        metavar="NAME,...",
        help="default: all, see --list",
    )
    p.add_argument("--list", action="store_true", help="the attacks and what they are")
    p.add_argument(
        "--tree", type=Path, default=ROOT, metavar="CHECKOUT", help="whose server is attacked"
    )
    p.add_argument(
        "--warmup",
        type=float,
        default=4.0,
        metavar="S",
        help="of each server (default: %(default)s)",
    )
    p.add_argument(
        "--quiet",
        type=float,
        default=10.0,
        metavar="S",
        help="without an attack (default: %(default)s)",
    )
    p.add_argument(
        "--linger", type=float, default=2.0, metavar="S", help="watched after an attack, at least"
    )
    p.add_argument(
        "--settle", type=float, default=20.0, metavar="S", help="until all is given back, at most"
    )
    p.add_argument(
        "--memory-limit-mb",
        type=int,
        default=4096,
        metavar="MIB",
        help="of a server (default: 4096)",
    )
    p.add_argument("--attackers", choices=("idle", "normal"), default="idle", help="their priority")
    p.add_argument("--more", action="store_true", help="add to the file of --out")
    p.add_argument("--summaries", action="store_true", help="leave the raw samples out of --out")
    p.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="more flags for `stretto serve`; last"
    )
    args = p.parse_args(given)
    if args.list:
        for case in CASES.values():
            print(f"{case.name:<22} {case.about}")
        return 0
    args.tree = args.tree.resolve()
    tree = sources(args.tree)
    result: Notes = {"env": describe(), "tree": tree, "attacks": [], "problems": []}
    if args.more and args.out and args.out.exists():
        earlier = read(args.out)["attacks"]
        result["attacks"] = [a for a in earlier if a["attack"] not in args.only]
    for name in args.only:
        with tempfile.TemporaryDirectory(prefix="stretto-hostile-") as place:
            write_tiny(Path(place) / "tiny")
            began = time.monotonic()
            found = one(CASES[name], Path(place) / "tiny", Path(place), args)
        found["took_s"] = time.monotonic() - began
        found["tree"] = tree
        if args.summaries:
            del found["samples"]
        result["attacks"].append(found)
        result["problems"] = [
            f"{a['attack']}: {problem}" for a in result["attacks"] for problem in a["problems"]
        ]
        words = [
            f"answered {s}: {text}"
            for s, text in found["attackers"]["messages"].items()
            if text and s != "200"
        ]
        print(
            line(found),
            *(f"\n    {text}" for text in (*found["problems"], *words)),
            flush=True,
            sep="",
        )
        write(args.out, result)
    print(
        "nobody noticed, nothing is held"
        if not result["problems"]
        else f"{len(result['problems'])} problems"
    )
    return 1 if result["problems"] else 0
