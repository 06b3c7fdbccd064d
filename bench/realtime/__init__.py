"""Conversations: commit → first audio, the cost of listening, barge-in and live sessions, against
whole-audio requests.

    # all, on a GPU
    python -m bench realtime --model released --out bench/results/realtime_h200.json
    # one part more
    python -m bench realtime --model released --parts http --add \\
        --out bench/results/realtime_h200.json
    python -m bench realtime --quick --max-rows 16  # the tiny model: does it run at all?

Parts, in this order (one that fails is reported, and the others go on; the file is written after
each measurement):

    first    commit → first audio of turns of --lengths seconds. One session: all of a turn is
             appended and read before the commit (--pace 1: in real time). --sessions at once:
             lengths mixed, the last 2 s of each turn in real time, commits spread over --spread
             seconds. The same turns as chat requests that carry the whole sound. Parts of the
             latency: commit, admission, encode and prefill, talker, vocoder; encoding by itself
    append   what an append of 2 s costs, by how much was said before: the call, until it is read,
             time of steps on the device; and 16 sessions that append without a pause, by
             nvidia-smi's share of time with a kernel running
    barge    an answer is closed at a random packet: until that is done, until the stages have
             nothing of it, and the next turn's first audio; alone and beside 31 others
    live     --live sessions that speak 5 s and listen to 5 s in real time, for --live-seconds:
             underruns of a listener who plays each packet as it comes
    http     a `stretto serve` of its own, over WebSockets: first audio for all lengths, the same as
             whole-audio chat requests, response.cancel to the last packet and to its confirmation,
             turns and barge-in found by voice activity detection, and --http-live sessions as in
             `live`

The first four run on the engine's sessions, in the process that would be the server, with hosts as
in service. What is said is synthetic. Every part has a limit of time (--limits): what does not fit
is left out, and the file says so."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness.checkpoint import add_model_arguments, checkpoint, device_here, host_settings
from bench.harness.parts import add_parts
from bench.harness.results import arguments, measured_part, parser, read, write

PARTS = ("first", "append", "barge", "live", "http")
LIMITS = {"first": 95.0, "append": 25.0, "barge": 12.0, "live": 40.0, "http": 60.0}
"""Seconds after which a part begins nothing new."""


async def run_part(
    name: str,
    work: Callable[[], AsyncIterator[dict[str, Any]]],
    result: dict[str, Any],
    to: Path | None,
) -> None:
    with measured_part(name, result, to) as add:
        async for one in work():
            add(one)
    print(f"   {result['parts'][name]['seconds']:.1f} s", flush=True)


async def on_engine(
    args: argparse.Namespace, directory: Path, parts: list[str], result: dict[str, Any]
) -> None:
    from bench.harness.serving import GpuWatch
    from bench.realtime.engine import Stand
    from bench.realtime.turns import clock
    from stretto.commands.serve import SWITCH_S
    from stretto.config.engine import EngineConfig
    from stretto.config.placement import parse_placement
    from stretto.engine.engine import PipelineEngine

    sys.setswitchinterval(SWITCH_S)  # as a server does
    config = EngineConfig(
        parse_placement(args.placement), max_requests=4 * max(args.max_rows, *args.sessions,
        *args.live),
        host=host_settings(args, max_rows=args.max_rows),
    )  # fmt: skip
    gpu, start = GpuWatch(), time.monotonic()
    try:
        async with PipelineEngine.open(directory, config) as engine:
            result["ready_s"] = time.monotonic() - start
            print(f"ready after {result['ready_s']:.1f} s", flush=True)
            stand = Stand(args, engine, gpu)
            for name in parts:
                stand.until = clock() + args.limits[name]
                await run_part(name, getattr(stand, name), result, args.out)
            await engine.drain(5.0)
            result["running_after"] = engine.metrics()["stretto_engine_running"]
    finally:
        gpu.close()


def over_http(args: argparse.Namespace, directory: Path, result: dict[str, Any]) -> None:
    from bench.harness.serving import serving
    from bench.realtime.sockets import Sockets

    with (
        tempfile.TemporaryDirectory(prefix="stretto-realtime-") as folder,
        serving(args, directory, Path(folder)) as server,
    ):
        server.wait(args.start_timeout)
        result["server_ready_s"] = server.ready_s
        print(f"server ready after {server.ready_s:.1f} s", flush=True)
        sockets = Sockets(args, server, time.perf_counter() + args.limits["http"])
        asyncio.run(run_part("http", sockets.run, result, args.out))
        result["server_log"] = server.tail(8000)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from bench.realtime.sounds import ABOUT
    from bench.serve import described

    before = read(args.out).get("parts", {}) if args.add and args.out.exists() else {}
    result = {"env": described(), "arguments": arguments(args), "sound": ABOUT, "parts": before}
    with checkpoint(args.model) as directory:
        if parts := [p for p in args.parts if p != "http"]:
            asyncio.run(on_engine(args, directory, parts, result))
        if "http" in args.parts:
            over_http(args, directory, result)
    write(args.out, result)
    return result


def add_arguments(p: argparse.ArgumentParser) -> None:
    add_model_arguments(p)
    add_parts(p, PARTS)
    p.add_argument(
        "--lengths", type=float, nargs="+", default=[5, 20, 60, 197, 200],
        help="of turns, in seconds (default: %(default)s; windows are 8 s, so 5 and 197 have the "
             "same rest)",
    )  # fmt: skip
    p.add_argument(
        "--sessions",
        type=int,
        nargs="+",
        default=[1, 8, 32, 128],
        help="at once (default: %(default)s)",
    )
    p.add_argument(
        "--pace",
        type=float,
        default=0.0,
        help="of one session: times real time; 0: as fast as it goes",
    )
    p.add_argument(
        "--turns", type=int, default=8, help="of each length, of one session (default: %(default)s)"
    )
    p.add_argument(
        "--spread", type=float, default=8.0, help="seconds within which all sessions commit"
    )
    p.add_argument(
        "--most-sound",
        type=float,
        default=3000.0,
        help="seconds that all sessions say; else no long turns",
    )
    p.add_argument("--frames", type=int, default=12, help="of answers of one session (80 ms each)")
    p.add_argument("--answer-frames", type=int, default=38, help="of answers where several talk")
    p.add_argument("--appends", type=int, default=24, help="at each context (default: %(default)s)")
    p.add_argument("--saturate", type=float, default=3.0, help="seconds of appends without a pause")
    p.add_argument("--others", type=int, default=31, help="answers beside one that is interrupted")
    p.add_argument(
        "--live", type=int, nargs="+", default=[128], help="live sessions (default: %(default)s)"
    )
    p.add_argument(
        "--live-seconds",
        type=float,
        default=25.0,
        help="no turn begins later (default: %(default)s)",
    )
    p.add_argument("--live-turn", type=float, default=5.0, help="seconds of a turn")
    p.add_argument("--live-frames", type=int, default=62, help="of an answer")
    p.add_argument(
        "--http-live",
        type=int,
        default=32,
        help="live sessions over WebSockets (default: %(default)s)",
    )
    p.add_argument("--limits", default="", help="seconds for parts, such as first=60,live=30")
    p.add_argument("--placement", default="one", help="as of `bench engine`")
    p.add_argument("--max-rows", type=int, default=128)
    p.add_argument("--start-timeout", type=float, default=240.0)
    p.add_argument("--quick", action="store_true", help="a few short turns: does it run at all?")
    p.add_argument(
        "--add", action="store_true", help="keep the other parts that are in --out already"
    )
    p.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="more flags for `stretto serve`; last"
    )


def main(given: Sequence[str]) -> int:
    from bench.serve import server_flags

    p = parser("realtime", __doc__)
    add_arguments(p)
    args = p.parse_args(given)
    args.device = args.device or device_here()
    if args.add and args.out is None:
        p.error("--add needs --out")
    args.limits = LIMITS | {
        k: float(v) for k, _, v in (x.partition("=") for x in args.limits.split(",") if x)
    }
    args.serve = [
        *server_flags(args.host),
        "--realtime-sessions",
        str(2 * args.max_rows),
        *args.serve,
    ]
    if args.quick:
        args.lengths, args.sessions, args.turns, args.spread = [5.0, 20.0], [1, 4], 2, 1.0
        args.appends, args.saturate, args.live, args.live_seconds, args.http_live = (
            5,
            1.0,
            [4],
            3.0,
            3,
        )
        args.others = 2
        args.live_turn, args.live_frames, args.answer_frames, args.frames = 1.0, 12, 6, 4
    result = measure(args)
    failed = {name: part["error"] for name, part in result["parts"].items() if part["error"]}
    for name, error in failed.items():
        print(f"{name}: {error}")
    return int(bool(failed))
