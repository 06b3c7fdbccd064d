"""A server over HTTP, at full size: starts `stretto serve`, sends it requests, records what every
stream received when.

    python -m bench serve --out bench/results/h200.json  # everything
    # a second run
    python -m bench serve --parts latency --last-first --out bench/results/h200_again.json
    python -m bench serve --parts host --add --out bench/results/h200.json  # one part more
    python -m bench serve --host 'expert_weights="float8"'  # another setting
    # a card with others on it
    python -m bench serve --parts latency --host memory_share=0.9 --beside 2
    python -m bench serve --model tiny --device cpu --quick  # tries the program itself

Parts, in this order (one that fails is reported, and the others go on):

    latency    closed loop at each of --levels: first text, first audio, RTF, what a player would
               hear
    prompts    the same at each of --prompt-levels with a prompt of 2,000 tokens, of 10 s of sound,
               and with a picture
    open       open loop: requests at random moments, --rates a second on average, whether or not
               the server keeps up
    realtime   --streams requests within two seconds, 60 s of speech each, read as fast as it comes
    players    as many as the largest of --streams, at random moments within --arrive seconds, 60 s
               of speech each; each reads as it plays, at most --lead seconds ahead
    timeline   where the time to the first packet goes, stage by stage (one stream, and eight)
    host       what the loop thread does with its time, and the share of time in which the GPU is
               idle; in a process of its own, after the server has ended (`python -m bench host`)

Every run starts its own server, with the released shape and random weights, in one process per host
as in service; the clients are processes of their own (harness/listener.py), whose players are
simulated. Each part in the file carries its commit, whether the tree was clean, and every raw
sample. Start-up is timed by phase as the server reports them, beside the number of kernels that
were compiled before. The GPU's busy share during each part comes from nvidia-smi (its own sampling:
share of time with any kernel running)."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.harness.beside import tiny_servers
from bench.harness.checkpoint import add_model_arguments, checkpoint, device_here, host_fields
from bench.harness.crowd import PREBUFFERS, Crowd, Questions, told
from bench.harness.env import command
from bench.harness.listener import Heard
from bench.harness.parts import add_parts
from bench.harness.results import ROOT, arguments, measured_part, parser, read, write
from bench.harness.serving import GpuWatch, Server, Stopped, environment, serving
from bench.harness.workload import WORKLOADS, Workload
from stretto.loadtest.player import Packet, gaps, play
from stretto.loadtest.report import client, table
from stretto.loadtest.runner import Closed, Level, Open
from stretto.loadtest.workload import poisson
from stretto.preprocess.template import Tokenizer

PROMPTS_S = 8.0
"""At least, for one load of long prompts: 32 answers of 10 s take longer than 3."""
PARTS = ("latency", "prompts", "open", "realtime", "players", "timeline", "host")
PHASES = (
    "admission",
    "thinker prompt",
    "talker first frame",
    "vocoder",
    "to the engine",
    "server and socket",
)
WITHIN_S = 2.0  # all listeners of `realtime` come within so many seconds


# ---- parts


@dataclass(slots=True)
class Stand:
    """What the parts share."""

    args: argparse.Namespace
    crowd: Crowd
    questions: Questions

    def closed(
        self,
        workload: Workload,
        streams: int,
        requests: int,
        seconds: float,
        timeline: bool = False,
    ) -> tuple[dict[str, Any], list[Heard]]:
        bodies = self.questions.bodies(workload, requests + streams, timeline)
        level, extra, heard = self.crowd.listen(
            Closed(streams), bodies, warmup=streams, seconds=seconds
        )
        print(f"{workload.name}, {table(level, PREBUFFERS)}\n  {brief(extra)}\n", flush=True)
        return told(level, extra) | {"workload": workload.name}, heard

    def latency(self) -> Iterator[dict[str, Any]]:
        workload = self.workload("text-100")
        for streams in reversed(self.args.levels) if self.args.last_first else self.args.levels:
            requests = max(self.args.requests, self.args.rounds * streams)
            yield self.closed(workload, streams, requests, self.args.seconds)[0]

    def prompts(self) -> Iterator[dict[str, Any]]:
        """Answers as long as those of the latency table, so that RTF can be compared too."""
        for name in ("text-2000", "audio-10s", "image"):
            for streams in self.args.prompt_levels:
                requests = max(self.args.requests // 2, 2 * streams)
                seconds = max(self.args.seconds / 2, PROMPTS_S)
                yield self.closed(self.workload(name), streams, requests, seconds)[0]

    def open(self) -> Iterator[dict[str, Any]]:
        """The same seed, so the same moments, in every run."""
        workload = self.workload("text-100")
        self.closed(workload, 4, 4, self.args.open_seconds)  # nothing is cold, whatever ran before
        for rate in self.args.rates:
            load = Open(rate)
            arrivals = list(
                itertools.takewhile(
                    lambda at: at < self.args.open_seconds, poisson(rate, load.seed)
                )
            )
            bodies = self.questions.bodies(workload, len(arrivals))
            level, extra, _ = self.crowd.listen(
                load, bodies, seconds=self.args.open_seconds, arrivals=arrivals
            )
            yield self.heard(workload, level, extra)

    def realtime(self) -> Iterator[dict[str, Any]]:
        """Every listener comes once, within the first two seconds. Stops at the first number at
        which answers fail or more than half of them have underruns."""
        workload = self.workload("long-60s")
        for streams in self.args.streams:
            bodies = self.questions.bodies(workload, streams)
            level, extra, _ = self.crowd.listen(
                Closed(streams), bodies, seconds=30.0, timeout=self.args.patience, spread=WITHIN_S
            )
            found = self.heard(workload, level, extra) | {"within_s": WITHIN_S, "lead_s": None}
            yield found
            if len(level.good) < streams or found["stuttered"] > streams // 2:
                break

    def players(self) -> Iterator[dict[str, Any]]:
        """Listeners come at random moments; most of them are still there when the last one
        comes."""
        workload, streams, args = self.workload("long-60s"), max(self.args.streams), self.args
        load = Open(streams / args.arrive)
        arrivals = list(itertools.islice(poisson(load.rate, load.seed), streams))
        level, extra, _ = self.crowd.listen(
            load, self.questions.bodies(workload, streams), seconds=arrivals[-1],
            timeout=args.patience,
            arrivals=arrivals, lead=args.lead,
        )  # fmt: skip
        yield self.heard(workload, level, extra) | {
            "streams": streams,
            "within_s": None,
            "lead_s": args.lead,
        }

    def heard(self, workload: Workload, level: Level, extra: dict[str, Any]) -> dict[str, Any]:
        """A level whose listeners are counted one by one: who had to wait, and for how long."""
        played = [p for s in level.good if (p := play(s.packets)) is not None]
        stuttered, waited = sum(p.underruns > 0 for p in played), sum(p.wait for p in played)
        print(f"{workload.name}, {table(level, PREBUFFERS)}\n  {brief(extra)}", flush=True)
        if "most_at_once" in extra:
            print(
                f"  at most {extra['most_at_once']} at once; sent {1e3 * extra['sent_late_s']:.1f} "
                f"ms late at most"
            )
        print(
            f"  {stuttered} of {len(level.samples)} listeners had to wait, {waited:.3f} s in all\n",
            flush=True,
        )
        return told(level, extra) | {
            "workload": workload.name,
            "stuttered": stuttered,
            "waited_s": waited,
        }

    def timeline(self) -> Iterator[dict[str, Any]]:
        for streams in (1, 8):
            count = max(4, self.args.requests // 4)
            found, heard = self.closed(
                self.workload("text-100"), streams, count, self.args.seconds / 2, timeline=True
            )
            split = [p for h in heard if (p := phases(h)) is not None]
            medians = (
                {name: statistics.median(p[name] for p in split) for name in PHASES}
                if split
                else {}
            )
            shown = ", ".join(f"{name} {1000 * value:.1f}" for name, value in medians.items())
            print(f"  first audio at {streams} streams, median ms: {shown}\n", flush=True)
            one = next((h.report for h in heard if h.report is not None), None)
            yield found | {"phases_s": medians, "phases_raw": split, "one_report": one}

    def workload(self, name: str) -> Workload:
        """The tiny model is for trying the program: short answers will do."""
        given = WORKLOADS[name]
        if self.args.quick:
            given = replace(
                given, text_tokens=min(8, given.text_tokens), frames=min(12, given.frames)
            )
        return given


def thinned(cell: dict[str, Any]) -> dict[str, Any]:
    """Of the packets of an answer only what a player makes of them, so that the file stays
    small."""
    return cell | {"samples": [thin(s) for s in cell["samples"]]}


def thin(sample: dict[str, Any]) -> dict[str, Any]:
    packets = [Packet(*p) for p in sample.get("packets", ())]
    heard = play(packets)
    return sample | {
        "packets": len(packets),
        "longest_gap": max(gaps(packets), default=0.0),
        "wait": heard.wait if heard is not None else None,
    }


def phases(heard: Heard) -> dict[str, float] | None:
    """Where one answer's time to the first packet went, from the server's timeline and the client's
    clock."""
    first = heard.sample.first_audio
    if not heard.report or first is None:
        return None
    spans = heard.report.get("timeline") or []

    def times(lane: str, name: str) -> list[tuple[float, float]]:
        return sorted(
            (s["start"], s["stop"]) for s in spans if s["lane"] == lane and s["name"] == name
        )

    thinker, talker = times("thinker", "prompt"), times("talker", "prompt")
    vocoder, packets = times("code2wav", "first frame"), times("packets", "packet")
    if not (thinker and talker and vocoder and packets):
        return None
    begun, token, frame = thinker[0][0], thinker[-1][1], talker[-1][1]
    sound, arrived = vocoder[-1][1], packets[0][0]
    values = (begun, token - begun, frame - token, sound - frame, arrived - sound, first - arrived)
    return dict(zip(PHASES, values, strict=True))


def brief(extra: dict[str, Any]) -> str:
    gpu = extra["gpu"]
    shown = (
        f"GPU busy {gpu['busy_percent']:.0f} %, {gpu['power.draw']:.0f} W" if gpu else "no GPU seen"
    )
    host = extra["host"]
    busy, asleep = (host.get(f"stretto_host_{k}_seconds_total") for k in ("busy", "idle"))
    if busy is not None and asleep is not None and busy + asleep > 0:
        shown += f"; loop thread busy {100 * busy / (busy + asleep):.0f} %"
    for stage in ("thinker", "talker", "code2wav"):
        own = {name: value for name, value in host.items() if f'stage="{stage}"' in name}
        steps = sum(v for name, v in own.items() if name.startswith("stretto_stage_steps_total"))
        if steps:
            parts = ("stretto_stage_launch_seconds_sum", "stretto_stage_retire_seconds_total")
            spent = sum(v for name, v in own.items() if name.startswith(parts))
            shown += f"; {stage} {steps:.0f} steps, {1e6 * spent / steps:.0f} us of host each"
            held, late = (
                host.get(f'stretto_stage_{k}_total{{stage="{stage}"}}', 0.0)
                for k in ("held", "late")
            )
            if held:
                shown += f", {held:.0f} held back, {late:.0f} too long"
    return shown


def server_flags(given: list[str]) -> list[str]:
    """`max_rows=64` and so on, fields of HostSettings, as `stretto serve` is told: both measure the
    same model."""
    words: list[str] = []
    for name, value in host_fields(given).items():
        flag = name.replace("_", "-")
        words += (
            [f"--{'' if value else 'no-'}{flag}"]
            if isinstance(value, bool)
            else [f"--{flag}", str(value)]
        )
    return words


def profile_host(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    out = folder / "host.json"
    command = [
        sys.executable,
        "-m",
        "bench",
        "host",
        "--model",
        args.model,
        "--device",
        args.device,
    ]
    command += [
        "--out",
        str(out),
        "--streams",
        *map(str, args.host_streams),
        "--max-rows",
        str(args.max_rows),
    ]
    command += ["--frames", "12" if args.quick else "125"] + (["--profile"] if args.profile else [])
    command += [word for field in args.host for word in ("--host", field)]
    subprocess.run(command, cwd=ROOT, env=environment(), timeout=args.host_timeout, check=True)
    yield read(out)


# ---- all of it


def run_part(
    name: str,
    work: Callable[[], Iterator[dict[str, Any]]],
    result: dict[str, Any],
    to: Path | None = None,
) -> None:
    with measured_part(name, result, to) as add:
        for one in work():
            add(one)


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """A new result; with --add, the parts and starts that are in the file already, as they are."""
    before = read(args.out) if args.add and args.out.exists() else {}
    starts = before.get("starts") or ([before["start"]] if before.get("start") else [])
    return {
        "env": described(),
        "arguments": arguments(args),
        "parts": before.get("parts", {}),
        "starts": starts,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    result = begin(args)
    served = [p for p in args.parts if p != "host"]
    with (
        tempfile.TemporaryDirectory(prefix="stretto-serve-") as name,
        checkpoint(args.model) as directory,
    ):
        folder = Path(name)
        if served:
            try:
                cached = kernels_cached()
                with serving(args, directory, folder) as server:
                    over_http(args, server, directory, folder, served, result, cached)
                    result["server_log"] = server.tail(20000)
            except Stopped as e:
                result["error"] = str(e)
                print(f"stopped: {e}", flush=True)
            write(args.out, result)
        if "host" in args.parts:
            run_part("host", lambda: profile_host(args, folder), result, args.out)
    return result


def kernels_cached() -> int:
    """Kernels that Triton has compiled on this machine before: a start without any takes longer."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return sum(1 for entry in folder.iterdir()) if folder.is_dir() else 0


def over_http(
    args: argparse.Namespace, server: Server, directory: Path, folder: Path, parts: list[str],
    result: dict[str, Any],
    cached: int,
) -> None:  # fmt: skip
    server.wait(args.start_timeout)
    told = {
        "ready_s": server.ready_s,
        "kernels_cached": cached,
        "env": result["env"],
        "phases": server.phases,
    }
    result["starts"].append(told)
    print(f"ready after {server.ready_s:.1f} s, {cached} kernels compiled before", flush=True)
    for phase in server.phases:
        print(f"  {phase['at_s']:6.1f} s  {phase['state']}: {phase['stages']}", flush=True)
    result["metrics_at_start"] = server.metrics()
    gpu = GpuWatch()
    try:
        crowd = Crowd(server, folder, gpu, args.processes)
        stand = Stand(args, crowd, Questions(directory.name, Tokenizer.open(directory)))
        with tiny_servers(args, args.beside, folder, gpu) as heard_beside:
            for name in parts:
                if server.process.poll() is not None:
                    raise Stopped(
                        f"the server ended with {server.process.returncode}:\n{server.tail()}"
                    )
                run_part(name, getattr(stand, name), result, args.out)
            result["beside"] = heard_beside()
        result["metrics_at_end"] = server.metrics()
    finally:
        gpu.close()


def described() -> dict[str, Any]:
    """The machine, described by a process of its own: this one must not hold GPU memory."""
    ask = "import json; from bench.harness.env import describe; print(json.dumps(describe()))"
    told = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    env: dict[str, Any] = json.loads(told.stdout.splitlines()[-1])
    return env | {"command": command(), "client": client()}


def summary(result: dict[str, Any]) -> str:
    lines = [
        "",
        f"{'':22}{'first text':>12}{'first audio':>12}{'p99':>9}{'RTF':>8}{'waits':>9}{'answers':>9}",  # noqa: E501
    ]
    for part in result["parts"].values():
        for one in part["found"]:
            if "summary" not in one or not one["summary"].get("first_audio_s"):
                continue
            s = one["summary"]
            first = s.get("first_text_s", {}).get("p50", float("nan"))
            lines.append(
                f"{one['workload'] + ' x ' + str(one['streams'] or one['rate']):22}{1000 * first:>9.1f} ms"  # noqa: E501
                f"{1000 * s['first_audio_s']['p50']:>9.1f} "
                f"ms{1000 * s['first_audio_s']['p99']:>9.1f}"
                f"{s['rtf']['p50']:>8.3f}{s['wait_0ms_s']['max']:>9.3f}{one['answers']:>9}"
            )
    failed = [f"{name}: {part['error']}" for name, part in result["parts"].items() if part["error"]]
    return "\n".join([*lines, *failed])


def main(given: Sequence[str]) -> int:
    p = parser("serve", __doc__)
    add_parts(p, PARTS)
    add_model_arguments(p, "released")
    p.add_argument(
        "--levels", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="of the latency table"
    )
    p.add_argument(
        "--prompt-levels", type=int, nargs="+", default=[1, 8, 32], help="of long prompts"
    )
    p.add_argument(
        "--streams", type=int, nargs="+", default=[64, 96, 128], help="of 60 s of speech each"
    )
    p.add_argument(
        "--rates", type=float, nargs="+", default=[4.0, 10.0], help="open loop: requests a second"
    )
    p.add_argument(
        "--open-seconds",
        type=float,
        default=30.0,
        help="open loop, each rate (default: %(default)s)",
    )
    p.add_argument(
        "--arrive", type=float, default=60.0, help="players come within so many seconds, by chance"
    )
    p.add_argument("--requests", type=int, default=100, help="at each level (default: %(default)s)")
    p.add_argument(
        "--rounds", type=int, default=3, help="of all streams at each level, at least (default: 3)"
    )
    p.add_argument(
        "--seconds", type=float, default=50.0, help="at each level at most (default: %(default)s)"
    )
    p.add_argument(
        "--patience",
        type=float,
        default=100.0,
        help="for one answer of a minute (default: %(default)s)",
    )
    p.add_argument(
        "--lead",
        type=float,
        default=1.0,
        help="players read so many seconds ahead (default: %(default)s)",
    )
    p.add_argument(
        "--last-first", action="store_true", help="the latency levels in reverse, for a second run"
    )
    p.add_argument("--max-rows", type=int, default=128, help="of the server (default: %(default)s)")
    p.add_argument(
        "--beside",
        type=int,
        default=0,
        metavar="N",
        help="servers of the tiny model on the same device",
    )
    p.add_argument(
        "--processes", type=int, default=6, help="of listeners, at most (default: %(default)s)"
    )
    p.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="more flags for `stretto serve`; last"
    )
    p.add_argument("--host-streams", type=int, nargs="+", default=[1, 8, 32, 64])
    p.add_argument("--host-timeout", type=float, default=300.0)
    p.add_argument("--profile", action="store_true", help="host: also a profile by function")
    p.add_argument("--start-timeout", type=float, default=240.0)
    p.add_argument("--quick", action="store_true", help="a few short requests: does it run at all?")
    p.add_argument(
        "--add", action="store_true", help="keep the other parts that are in --out already"
    )
    args = p.parse_args(given)
    args.device = args.device or device_here()
    args.serve = [*server_flags(args.host), *args.serve]
    if args.add and args.out is None:
        p.error("--add needs --out")
    if args.quick:
        args.requests, args.seconds, args.rates, args.open_seconds, args.arrive = (
            4,
            20.0,
            [1.0],
            4.0,
            2.0,
        )
        args.levels, args.streams, args.host_streams = args.levels[:2], [4], [1, 4]
        args.prompt_levels = args.prompt_levels[:1]
    result = measure(args)
    print(summary(result), flush=True)
    write(args.out, result)
    if args.out is not None:
        print(f"wrote {args.out}")
    return (
        1 if result.get("error") or any(part["error"] for part in result["parts"].values()) else 0
    )
