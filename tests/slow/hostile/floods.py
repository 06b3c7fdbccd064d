"""Floods beside listeners: attacks without end, alone and all together, and what players notice.

    python -m tests.slow hostile --parts floods --out bench/results/hostile.json

Starts `stretto serve` on the tiny model. Eight listeners ask for speech and read it as a player
would, while a probe asks /live all the time: first alone (quiet), then beside attackers, each kind
of attack alone and in the end all together for 60 s, then alone again. Printed and kept: the waits
of a player that starts at the first packet, the time to the first packet, the latency of /live,
what the attackers were answered, and what the server still held at the end. Fails if a listener
waited longer than in the quiet runs beyond their noise, if /live took 50 ms more at worst, if
anything was held, or if anybody was answered with a 5xx.

Attackers stand for other machines, but share this one's cores. So they are a process of the lowest
priority, in a session of its own of the lowest weight; how much of each attack was sent is kept,
and the CPU time that it took them. `--attacks control` is work of their own that no server should
mind, and tells how much of a delay is theirs."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.crowd import Crowd
from bench.harness.env import describe
from bench.harness.listener import Heard
from bench.harness.results import ROOT, parser, quantile, write
from bench.harness.serving import GpuWatch, Server, environment, serving
from stretto.loadtest.player import play
from stretto.loadtest.runner import Closed
from stretto.testing.qwen3_omni import write_tiny
from tests.slow.hostile.flooders import ATTACKS, BODIES, attack, step_back

LISTENERS = 8
PROBE_S = 0.02
LIVE_BUDGET_S = 0.05


# ---- the probe


async def probe(port: int, seconds: float) -> list[float]:
    """Latencies of /live, each on a connection of its own that is there already."""
    found, until = [], time.monotonic() + seconds
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.monotonic() < until:
        start = time.monotonic()
        writer.write(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        found.append(time.monotonic() - start)
        await asyncio.sleep(PROBE_S)
    writer.close()
    return found


# ---- phases


class Phase:
    """Listeners and the probe for so many seconds, beside attackers."""

    def __init__(
        self, server: Server, folder: Path, bodies: list[bytes], seconds: float, lead: float
    ) -> None:
        self.crowd, self.bodies = Crowd(server, folder, GpuWatch(), processes=1), bodies
        self.port, self.folder, self.seconds, self.lead = server.port, folder, seconds, lead

    def run(self, name: str, attacks: list[str], seconds: float | None = None) -> dict[str, Any]:
        seconds = seconds or self.seconds
        roles = [self._role("probe", seconds)] + (
            [self._role("attack", seconds, *attacks)] if attacks else []
        )
        _, _, heard = self.crowd.listen(
            Closed(LISTENERS),
            self.bodies,
            seconds=seconds,
            timeout=seconds + 60,
            spread=1.0,
            lead=self.lead,
            beside=roles,
        )
        told = [json.loads(p.communicate()[0]) for p in roles]
        return self._summary(name, heard, told[0], told[1] if attacks else {})

    def _role(self, role: str, seconds: float, *attacks: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "tests.slow.hostile.floods",
            "--role",
            role,
            "--port",
            str(self.port),
            "--seconds",
        ]
        command += [str(seconds), "--folder", str(self.folder / "attacks"), "--attacks", *attacks]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
            start_new_session=role == "attack",
        )  # fmt: skip

    def _summary(
        self, name: str, heard: list[Heard], live: list[float], told: dict[str, Any]
    ) -> dict[str, Any]:
        answers = [h.sample for h in heard]
        played = [play(a.packets) for a in answers if a.error is None]
        waits = [p.wait for p in played if p is not None]
        first = [a.packets[0].at for a in answers if a.packets]
        found: dict[str, Any] = {
            "phase": name,
            "answers": len(answers),
            "errors": dict(Counter(a.error for a in answers if a.error is not None)),
            "attackers": told,
            "samples": {"first_audio_s": first, "wait_s": waits, "live_s": live},
        }
        for measure, values in found["samples"].items():
            found[measure] = {
                "p50": statistics.median(values),
                "p99": quantile(values, 0.99),
                "max": max(values),
            }
        f, w, v = found["first_audio_s"], found["wait_s"], found["live_s"]
        print(
            f"{name:<18} {len(answers):>3} answers, first audio {1e3 * f['p50']:5.0f} (max "
            f"{1e3 * f['max']:5.0f}) ms, "
            f"wait max {1e3 * w['max']:5.0f} ms, /live p99 {1e3 * v['p99']:5.1f} max "
            f"{1e3 * v['max']:6.1f} ms, "
            f"{told.get('answers', '')}",
            flush=True,
        )
        return found


HELD = ("stretto_num_requests_running", "stretto_prompts_running", "stretto_prompts_waiting",
        "stretto_engine_running", "stretto_body_bytes")  # fmt: skip


def wait_until_idle(server: Server, limit: float = 60.0) -> dict[str, float]:
    """What the server's metrics say it still holds, when all clients have gone."""
    until = time.monotonic() + limit
    while True:
        now = server.metrics()
        left = {name: now[name] for name in HELD}
        if not any(left.values()) or time.monotonic() > until:
            return left
        time.sleep(0.1)


def judge(
    quiet: list[dict[str, Any]], attacked: list[dict[str, Any]], left: dict[str, float]
) -> list[str]:
    """What went wrong. Noise is what quiet runs differ by."""
    problems = []
    calm_wait = max(q["wait_s"]["max"] for q in quiet)
    noise = max(
        0.05, max(q["wait_s"]["max"] for q in quiet) - min(q["wait_s"]["max"] for q in quiet)
    )
    calm_live = max(q["live_s"]["max"] for q in quiet)
    for a in attacked:
        if a["wait_s"]["max"] > calm_wait + noise:
            problems.append(
                f"{a['phase']}: a listener waited {a['wait_s']['max']:.3f} s (quiet: "
                f"{calm_wait:.3f})"
            )
        if a["live_s"]["max"] > calm_live + LIVE_BUDGET_S:
            problems.append(
                f"{a['phase']}: /live took {a['live_s']['max']:.3f} s (quiet: {calm_live:.3f})"
            )
        if a["errors"]:
            problems.append(f"{a['phase']}: listeners got {a['errors']}")
        fives = [s for s in a["attackers"]["answers"] if s.startswith("5")]
        if fives:
            problems.append(f"{a['phase']}: attackers were answered {fives}")
    if any(left.values()):
        problems.append(f"the server still holds {left}")
    return problems


def main(given: Sequence[str]) -> int:
    p = parser("hostile --parts floods", __doc__, package="tests.slow")
    p.add_argument("--alone", type=float, default=4.0, metavar="S", help="of each attack by itself")
    p.add_argument(
        "--together",
        type=float,
        default=60.0,
        metavar="S",
        help="of all together, and of quiet runs",
    )
    p.add_argument("--frames", type=int, default=50, help="of each answer, 80 ms each")
    p.add_argument(
        "--lead",
        type=float,
        default=0.5,
        help="seconds that listeners read ahead of what they play",
    )
    p.add_argument("--attacks", nargs="*", choices=[*ATTACKS, "control"], default=list(ATTACKS))
    p.add_argument(
        "--role", choices=("main", "probe", "attack"), default="main", help=argparse.SUPPRESS
    )
    p.add_argument("--port", type=int, help=argparse.SUPPRESS)
    p.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args(given)
    return run(args) if args.role == "main" else play_role(args)


def play_role(args: argparse.Namespace) -> int:
    """Say that it has loaded what it needs, begin when it is told to, and print what came of it."""
    bodies = {name: (args.folder / name).read_bytes() for name in BODIES if args.role == "attack"}
    print("ready", flush=True)
    time.sleep(max(0.0, float(sys.stdin.readline()) - time.monotonic()))
    if args.role == "probe":
        print(json.dumps(asyncio.run(probe(args.port, args.seconds))))
    else:
        step_back()
        print(json.dumps(asyncio.run(attack(args.port, args.attacks, args.seconds, bodies))))
    return 0


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        bodies = [
            json.dumps({
                "messages": [{"role": "user", "content": f"Question {i}"}], "modalities": ["text",
                "audio"],
                "stream": True, "seed": i, "max_tokens": 12, "ignore_eos": True,
                "min_audio_frames": args.frames, "max_audio_frames": args.frames,
            }).encode()
            for i in range(4000)
        ]  # fmt: skip
        (Path(folder) / "attacks").mkdir()
        for name, made in BODIES.items():
            (Path(folder) / "attacks" / name).write_bytes(made())
        write_tiny(Path(folder) / "tiny")
        settings = argparse.Namespace(
            device="cpu", model="tiny", max_rows=32, serve=["--min-pace", "0"]
        )
        with serving(settings, Path(folder) / "tiny", Path(folder)) as server:
            server.wait(300)
            phase = Phase(server, Path(folder), bodies, args.alone, args.lead)
            phase.run("warm-up", [], 5.0)
            quiet = [phase.run("quiet", [], args.together / 2)]
            attacked = [phase.run(name, [name]) for name in args.attacks]
            attacked.append(phase.run("together", args.attacks, args.together))
            left = wait_until_idle(server)
            quiet.append(phase.run("quiet again", [], args.together / 2))
            problems = judge(quiet, attacked, left)
            result = {
                "env": describe(),
                "quiet": quiet,
                "attacked": attacked,
                "held": left,
                "problems": problems,
            }
            write(args.out, result)
    print("\n".join(problems) if problems else "nobody waited, nothing is held")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
