"""What Ray Serve's ingress adds to 32 streams of packets: through HAProxy and Serve, and from plain
uvicorn.

    python -m bench ingress --rounds 24 --out bench/results/cluster_ingress.json

Both ways are heard by turns, each once before anything counts, and who is first changes from round
to round. Pauses are seeded: in a round they are the same for both. Every answer has a connection of
its own. What the ingress adds is the difference of two medians of one round; one round decides
nothing, so their median over all rounds is told, and how far they are apart.
Needs the extra `stretto[ray]`."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.harness.cluster import serve_cluster
from bench.harness.env import describe
from bench.harness.results import ROOT, arguments, parser, quantile, write

STREAMS, ANSWERS, PACKETS, EVERY_S, BYTES = 32, 4, 12, 1 / 12, 4096
START_S = 1.0  # within which streams begin
PLAIN, INGRESS = "uvicorn", "haproxy"
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0, "min": 0.0}


@dataclass(slots=True)
class Heard:
    """Milliseconds from the question to the first packet, and of each packet from when it was
    sent."""

    first_byte_ms: list[float] = field(default_factory=list)
    packet_ms: list[float] = field(default_factory=list)

    def add(self, other: Heard) -> None:
        self.first_byte_ms += other.first_byte_ms
        self.packet_ms += other.packet_ms


WHATS = ("first_byte_ms", "packet_ms")


def stream_app() -> Any:
    """Packets that carry the time at which each was sent."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def packets() -> AsyncIterator[bytes]:
        for _ in range(PACKETS):
            line = json.dumps({"at": time.monotonic()})
            yield f"data: {line}{' ' * (BYTES - len(line))}\n\n".encode()
            await asyncio.sleep(EVERY_S)

    async def answer(request: Request) -> StreamingResponse:
        return StreamingResponse(packets(), media_type="text/event-stream")

    return Starlette(routes=[Route("/stream", answer)])


async def hear(base: str, seed: int) -> Heard:
    """One turn: each stream hears several answers, one after the other."""
    heard = Heard()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        pauses = random.Random(f"{seed}/{number}")
        await asyncio.sleep(START_S * pauses.random())
        for _ in range(ANSWERS):
            asked = time.monotonic()
            first = True
            async with client.stream("GET", f"{base}/stream") as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        now = time.monotonic()
                        if first:
                            heard.first_byte_ms.append(1e3 * (now - asked))
                            first = False
                        heard.packet_ms.append(1e3 * (now - json.loads(line[6:])["at"]))
            # So that what the server does after an answer is not in the next one's first byte.
            await asyncio.sleep(EVERY_S * pauses.random())

    limits = httpx.Limits(max_connections=STREAMS, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        await asyncio.gather(*(one(client, i) for i in range(STREAMS)))
    return heard


def until_answered(base: str) -> None:
    while True:
        try:
            if httpx.get(f"{base}/stream", timeout=60).status_code == 200:
                return
        except httpx.ConnectError:
            pass
        time.sleep(0.2)


def compare(rounds: Sequence[dict[str, Heard]]) -> dict[str, Any]:
    """All samples of each way, the medians of each round, and what the ingress adds to them."""
    found: dict[str, Any] = {}
    for name in (PLAIN, INGRESS):
        whole = Heard()
        for heard in rounds:
            whole.add(heard[name])
        found[name] = {what: quantiles(getattr(whole, what)) for what in WHATS}
        found[name] |= {"answers": len(whole.first_byte_ms), "packets": len(whole.packet_ms)}
    found["added"] = {}
    for what in WHATS:
        p50 = {
            name: [statistics.median(getattr(r[name], what)) for r in rounds]
            for name in (PLAIN, INGRESS)
        }
        each = [through - plain for plain, through in zip(p50[PLAIN], p50[INGRESS], strict=True)]
        found["added"][what] = {
            "median": statistics.median(each),
            "min": min(each),
            "max": max(each),
            "each": each,
        }
    return found


def quantiles(values: Sequence[float]) -> dict[str, float]:
    return {name: quantile(values, q) for name, q in QUANTILES.items()}


def ingress(port: int, rounds: int) -> dict[str, Any]:
    from ray import serve

    from stretto.ray.app import ACTOR

    @serve.deployment(max_ongoing_requests=200, ray_actor_options=ACTOR)
    @serve.ingress(lambda: stream_app())
    class Stream:
        pass

    serve.run(Stream.bind(), name="stream", route_prefix="/")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        plain = s.getsockname()[1]
    # In a process of its own, as a replica is: in this one it would wait for its clients'
    # interpreter.
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "--factory",
        "bench.ingress:stream_app",
        "--port",
        str(plain),
    ]
    # The loop and the parser that a replica has.
    command += [
        "--loop",
        "uvloop",
        "--http",
        "httptools",
        "--log-level",
        "warning",
        "--no-access-log",
    ]
    server = subprocess.Popen(command, cwd=ROOT)
    ways = {PLAIN: f"http://127.0.0.1:{plain}", INGRESS: f"http://127.0.0.1:{port}"}
    heard: list[dict[str, Heard]] = []
    try:
        for base in ways.values():
            until_answered(base)
        for number in range(rounds + 1):
            order = (PLAIN, INGRESS) if number % 2 else (INGRESS, PLAIN)
            heard.append({name: asyncio.run(hear(ways[name], number)) for name in order})
    finally:
        server.terminate()
        server.wait()
    serve.delete("stream")
    found = compare(heard[1:])
    print(json.dumps(found), flush=True)
    return found


def main(given: Sequence[str]) -> int:
    p = parser("ingress", __doc__)
    p.add_argument("--rounds", type=int, default=3, help="both ways in each")
    args = p.parse_args(given)
    from stretto.ray.dependency import require_ray

    require_ray()
    env = describe()
    with serve_cluster() as (_, port):
        found = ingress(port, args.rounds)
    write(args.out, {"arguments": arguments(args), "env": env, "ingress": found})
    return 0
