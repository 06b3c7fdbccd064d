"""Attacks beside listeners: one client must not hurt another.

    python bench/hostile.py --out bench/results/hostile.json

Starts `stretto serve` on the tiny model. Eight listeners ask for speech and read it as a player would, while a probe
asks /live all the time: first alone (quiet), then beside attackers, each kind of attack alone and in the end all
together for 60 s, then alone again. Printed and kept: the waits of a player that starts at the first packet, the time
to the first packet, the latency of /live, what the attackers were answered, and what the server still held at the end.
Fails if a listener waited longer than in the quiet runs beyond their noise, if /live took 50 ms more at worst, if
anything was held, or if anybody was answered with a 5xx.

Attackers are processes of low priority (they stand for other machines), but they do share this one's cores:
`--attacks control` is work of their own that no server should mind, and tells how much of a delay is theirs."""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.env import describe, quantile
from bench.listener import Heard
from bench.serving import Server, serving
from stretto.client.player import play
from stretto.models.qwen3_omni.tiny import write_tiny

LISTENERS = 8
PROBE_S = 0.02
LIVE_BUDGET_S = 0.05
CHAT = "/v1/chat/completions"
Attack = Callable[["Enemy"], Awaitable[None]]


# ---- attacks


class Enemy:
    """One process of attackers: what it sends, and what it was answered."""

    def __init__(self, port: int, seconds: float, bodies: dict[str, bytes]) -> None:
        self.port, self.until, self.bodies = port, time.monotonic() + seconds, bodies
        self.statuses: Counter[str] = Counter()

    @property
    def going(self) -> bool:
        return time.monotonic() < self.until

    async def send(self, data: bytes, *, leave_after: float | None = None, pause: float = 0.0) -> None:
        """Bare bytes on a connection of its own; what the server answers is counted."""
        try:
            async with asyncio.timeout(min(30.0, max(0.1, self.until - time.monotonic()) + 5.0)):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(data)
                    if pause:
                        await asyncio.sleep(pause)
                    if leave_after is not None:
                        await asyncio.sleep(leave_after)
                        self.statuses["left"] += 1
                        return
                    with suppress(ConnectionError):
                        await writer.drain()
                    line = await reader.readline()
                    self.statuses[line.split(b" ")[1].decode() if line else "closed"] += 1
                finally:
                    writer.close()
        except (TimeoutError, OSError, IndexError) as e:
            self.statuses[type(e).__name__] += 1

    def post(self, body: bytes | str, extra: str = "") -> bytes:
        """A request with this body, or with the one of this name."""
        if isinstance(body, str):
            body = self.bodies[body]
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{extra}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def ask(content: Any, **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}).encode()


def letters(count: int) -> str:
    return "".join(random.choices("etaoin shrdlu", k=count))


def described(size: int) -> bytes:
    tool = {"type": "function", "function": {"name": "f", "description": letters(size), "parameters": {}}}
    return ask("hi", tools=[tool])


async def nested(e: Enemy) -> None:
    """16 MiB of `[{}],`."""
    await e.send(e.post("nested"))


async def nested_elsewhere(e: Enemy) -> None:
    """The same in a field that nobody reads."""
    await e.send(e.post(ask("hi")[:-1] + b',"metadata":[' + b"[{}]," * (100_000) + b"0]}"))


async def tools(e: Enemy) -> None:
    """Descriptions of 1 and 8 MiB."""
    for name in ("tool of 1 MiB", "tool of 8 MiB"):
        await e.send(e.post(name))


def sound() -> bytes:
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, np.zeros(15 << 20, np.int16), 16_000, format="WAV", subtype="PCM_16")
    data = base64.b64encode(out.getvalue()).decode()
    return ask([{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}])


async def upload(e: Enemy) -> None:
    """An honest sound of 40 MiB."""
    await e.send(e.post("sound"))


async def text(e: Enemy) -> None:
    """900,000 characters."""
    await e.send(e.post("text"))


def video() -> bytes:
    """30 kB that are 1,000 frames of 2048 x 2048."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width = stream.height = 2048
        stream.pix_fmt = "yuv420p"
        stream.gop_size = 1000
        frame = av.VideoFrame.from_ndarray(np.zeros((2048, 2048, 3), np.uint8), format="rgb24")
        for i in range(1000):
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    url = "data:video/mp4;base64," + base64.b64encode(out.getvalue()).decode()
    return ask([{"type": "video_url", "video_url": {"url": url}}])


def pictures(side: int, count: int) -> bytes:
    """White pixels, in a few kB each."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("L", (side, side), 255).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return ask([{"type": "image_url", "image_url": {"url": url}}] * count)


BODIES: dict[str, Callable[[], bytes]] = {
    "nested": lambda: b'{"messages":[' + b"[{}]," * ((16 << 20) // 5) + b"0]}",
    "tool of 1 MiB": lambda: described(1 << 20),
    "tool of 8 MiB": lambda: described(8 << 20),
    "text": lambda: ask(letters(900_000)),
    "sound": sound,
    "video": video,
    "pictures": lambda: pictures(7000, 4),  # as many pixels as are taken
    "a large picture": lambda: pictures(2700, 1),  # as large as the model takes
}
"""Made once, before the listeners come: attackers stand for other machines, so that making them must cost this one
nothing while it is measured."""


async def videos(e: Enemy) -> None:
    await asyncio.gather(*(e.send(e.post("video")) for _ in range(4)))


async def media(e: Enemy) -> None:
    await asyncio.gather(*(e.send(e.post("pictures")) for _ in range(4)))


async def large_pictures(e: Enemy) -> None:
    """One that is answered, if they wait for it, and three that leave when it is on its way to the encoder."""
    large = e.post("a large picture")
    await asyncio.gather(e.send(large), *(e.send(large, leave_after=3.0) for _ in range(3)))


async def leavers(e: Enemy) -> None:
    """Ten that send a video or pictures and leave."""
    bodies = ("video", "pictures")
    await asyncio.gather(*(e.send(e.post(bodies[i % 2]), leave_after=0.3) for i in range(10)))


async def slow_bodies(e: Enemy) -> None:
    """64 that begin to send and do not go on."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    await asyncio.gather(*(e.send(f"{head}Content-Length: 60000\r\n\r\n{{".encode()) for _ in range(64)))


async def headers(e: Enemy) -> None:
    """64 MiB of headers."""
    line = b"X-A: " + b"a" * 8000 + b"\r\n"
    await e.send(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n" + line * ((64 << 20) // len(line)))


async def silent(e: Enemy) -> None:
    """300 connections that say nothing."""
    await asyncio.gather(*(e.send(b"", leave_after=2.0) for _ in range(300)))


async def strangers(e: Enemy) -> None:
    """What a page of another origin can send, bad hosts, and a handshake for a WebSocket."""
    await e.send(e.post(ask("hi"), "Origin: https://evil.example\r\n"))
    await e.send(e.post(ask("hi")).replace(b"application/json", b"text/plain"))
    await e.send(e.post(ask("hi")).replace(b"Host: 127.0.0.1", b"Host: evil.example"))
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    await e.send(f"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\n{upgrade}{key}\r\n".encode())
    await e.send(os.urandom(4096))


ATTACKS: dict[str, Attack] = {
    f.__name__: f
    for f in (nested, nested_elsewhere, tools, upload, text, videos, media, large_pictures,
              leavers, slow_bodies, headers, silent,
              strangers)
}  # fmt: skip


async def control(e: Enemy) -> None:
    """Load of the same kind that no server should mind: large answers are read from another process's socket."""
    data = os.urandom(1 << 20)
    for _ in range(20):
        base64.b64encode(data)
        await asyncio.sleep(0)
    await e.send(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")


async def attack(port: int, names: list[str], seconds: float, folder: Path) -> dict[str, Any]:
    enemy = Enemy(port, seconds, {name: (folder / name).read_bytes() for name in BODIES})
    rounds: Counter[str] = Counter()

    async def keep_on(name: str) -> None:
        while enemy.going:
            await (control if name == "control" else ATTACKS[name])(enemy)
            rounds[name] += 1
            await asyncio.sleep(0.05)

    await asyncio.gather(*(keep_on(n) for n in names))
    return {"answers": dict(enemy.statuses), "rounds": dict(rounds)}


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

    def __init__(self, port: int, folder: Path, seconds: float, lead: float) -> None:
        self.port, self.folder, self.seconds, self.lead = port, folder, seconds, lead

    def run(self, name: str, attacks: list[str], seconds: float | None = None) -> dict[str, Any]:
        seconds = seconds or self.seconds
        out = self.folder / f"{name}.json"
        job = {
            "port": self.port, "bodies": str(self.folder / "bodies"), "out": str(out), "streams": LISTENERS,
            "seconds": seconds, "timeout": seconds + 60, "spread": 1.0, "lead": self.lead,
        }  # fmt: skip
        listeners = subprocess.Popen(
            [sys.executable, "-m", "bench.listener"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert listeners.stdin is not None
        assert listeners.stdout is not None
        listeners.stdin.write(json.dumps(job) + "\n")
        listeners.stdin.flush()
        listeners.stdout.readline()
        listeners.stdin.write(f"{time.monotonic() + 0.2}\n")
        listeners.stdin.flush()
        roles = [self._role("probe", seconds)] + ([self._role("attack", seconds, *attacks)] if attacks else [])
        told = [json.loads(p.communicate()[0]) for p in roles]
        listeners.communicate()
        heard = msgspec.json.decode(out.read_bytes(), type=list[Heard])
        return self._summary(name, heard, told[0], told[1] if attacks else {})

    def _role(self, role: str, seconds: float, *attacks: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bench.hostile", "--role", role, "--port", str(self.port), "--seconds"]
        command += [str(seconds), "--folder", str(self.folder / "attacks"), "--attacks", *attacks]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def _summary(self, name: str, heard: list[Heard], live: list[float], told: dict[str, Any]) -> dict[str, Any]:
        answers = [h.sample for h in heard]
        played = [play(a.packets) for a in answers if a.error is None]
        waits = [p.wait for p in played if p is not None]
        first = [a.packets[0].at for a in answers if a.packets]
        found = {
            "phase": name,
            "answers": len(answers),
            "errors": dict(Counter(a.error for a in answers if a.error is not None)),
            "first_audio_s": {"p50": statistics.median(first), "p99": quantile(first, 0.99), "max": max(first)},
            "wait_s": {"p50": statistics.median(waits), "p99": quantile(waits, 0.99), "max": max(waits)},
            "live_s": {"p50": statistics.median(live), "p99": quantile(live, 0.99), "max": max(live)},
            "attackers": told,
            "samples": {"first_audio_s": first, "wait_s": waits, "live_s": live},
        }
        f, w, v = found["first_audio_s"], found["wait_s"], found["live_s"]
        print(
            f"{name:<18} {len(answers):>3} answers, first audio {1e3 * f['p50']:5.0f} (max {1e3 * f['max']:5.0f}) ms, "
            f"wait max {1e3 * w['max']:5.0f} ms, /live p99 {1e3 * v['p99']:5.1f} max {1e3 * v['max']:6.1f} ms, "
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


def judge(quiet: list[dict[str, Any]], attacked: list[dict[str, Any]], left: dict[str, float]) -> list[str]:
    """What went wrong. Noise is what quiet runs differ by."""
    problems = []
    calm_wait = max(q["wait_s"]["max"] for q in quiet)
    noise = max(0.05, max(q["wait_s"]["max"] for q in quiet) - min(q["wait_s"]["max"] for q in quiet))
    calm_live = max(q["live_s"]["max"] for q in quiet)
    for a in attacked:
        if a["wait_s"]["max"] > calm_wait + noise:
            problems.append(f"{a['phase']}: a listener waited {a['wait_s']['max']:.3f} s (quiet: {calm_wait:.3f})")
        if a["live_s"]["max"] > calm_live + LIVE_BUDGET_S:
            problems.append(f"{a['phase']}: /live took {a['live_s']['max']:.3f} s (quiet: {calm_live:.3f})")
        if a["errors"]:
            problems.append(f"{a['phase']}: listeners got {a['errors']}")
        fives = [s for s in a["attackers"]["answers"] if s.startswith("5")]
        if fives:
            problems.append(f"{a['phase']}: attackers were answered {fives}")
    if any(left.values()):
        problems.append(f"the server still holds {left}")
    return problems


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path)
    p.add_argument("--alone", type=float, default=4.0, metavar="S", help="of each attack by itself")
    p.add_argument("--together", type=float, default=60.0, metavar="S", help="of all together, and of quiet runs")
    p.add_argument("--frames", type=int, default=50, help="of each answer, 80 ms each")
    p.add_argument("--lead", type=float, default=0.5, help="seconds that listeners read ahead of what they play")
    p.add_argument("--attacks", nargs="*", choices=[*ATTACKS, "control"], default=list(ATTACKS))
    p.add_argument("--role", choices=("main", "probe", "attack"), default="main", help=argparse.SUPPRESS)
    p.add_argument("--port", type=int, help=argparse.SUPPRESS)
    p.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.role == "probe":
        print(json.dumps(asyncio.run(probe(args.port, args.seconds))))
        return 0
    if args.role == "attack":
        os.nice(19)
        print(json.dumps(asyncio.run(attack(args.port, args.attacks, args.seconds, args.folder))))
        return 0
    return run(args)


def run(args: argparse.Namespace) -> int:
    os.chdir(Path(__file__).resolve().parent.parent)
    with tempfile.TemporaryDirectory() as folder:
        bodies = [
            json.dumps({
                "messages": [{"role": "user", "content": f"Question {i}"}], "modalities": ["text", "audio"],
                "stream": True, "seed": i, "max_tokens": 12, "ignore_eos": True,
                "min_audio_frames": args.frames, "max_audio_frames": args.frames,
            })
            for i in range(4000)
        ]  # fmt: skip
        (Path(folder) / "bodies").write_text("\n".join(bodies))
        (Path(folder) / "attacks").mkdir()
        for name, made in BODIES.items():
            (Path(folder) / "attacks" / name).write_bytes(made())
        write_tiny(Path(folder) / "tiny")
        settings = argparse.Namespace(device="cpu", model="tiny", max_rows=32, serve=[])
        with serving(settings, Path(folder) / "tiny", Path(folder)) as server:
            server.wait(300)
            phase = Phase(server.port, Path(folder), args.alone, args.lead)
            phase.run("warm-up", [], 5.0)
            quiet = [phase.run("quiet", [], args.together / 2)]
            attacked = [phase.run(name, [name]) for name in args.attacks]
            attacked.append(phase.run("together", args.attacks, args.together))
            left = wait_until_idle(server)
            quiet.append(phase.run("quiet again", [], args.together / 2))
            problems = judge(quiet, attacked, left)
            result = {"env": describe(), "quiet": quiet, "attacked": attacked, "held": left, "problems": problems}
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(problems) if problems else "nobody waited, nothing is held")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
