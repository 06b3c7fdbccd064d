"""On a Ray cluster of this machine: what dies, what callers see and when it is up again; what the ingress adds.

    python -m bench cluster --out bench/results/cluster.json

Needs the extra `stretto[ray]`. Parts:
    kills      hosts, workers, raylets and the replica are killed at seeded moments; nothing may be left
    replicas   one of two Serve replicas is killed while others ask
    ingress    32 streams of packets through Serve's HAProxy and from plain uvicorn, by turns in one run
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.cluster.kills import MARK, NODE_CPUS, NODES, kills, left_of, segments
from bench.harness.env import describe
from bench.harness.parts import add_parts
from bench.harness.results import ROOT, arguments, parser, quantile, write
from tests.cluster import environment

ENVIRONMENT = {
    **environment.ENVIRONMENT,
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
}
END_S = 5.0  # for what was told to end
STREAMS, PACKETS, EVERY_S, BYTES = 32, 48, 1 / 12, 4096


@contextmanager
def cluster() -> Iterator[Any]:
    os.environ.update(ENVIRONMENT)
    import ray
    from ray.cluster_utils import Cluster

    it = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"head": 1}})
    try:
        it.named = {name: it.add_node(num_cpus=NODE_CPUS, resources={name: 1}) for name in NODES}
        it.wait_for_nodes()
        ray.init(address=it.address, namespace="stretto", log_to_driver=False)
        yield it
    finally:
        ray.shutdown()
        it.shutdown()


def quantiles(values: Sequence[float]) -> dict[str, float]:
    return {name: quantile(values, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0), ("min", 0.0))}


# ---- replicas


def replicas(model: Path, port: int) -> dict[str, Any]:
    """Kill one of two replicas while it speaks and others ask."""
    from ray import serve
    from ray.util.state import list_actors

    from stretto.cluster.app import build

    secret = model.parent / "secret"
    secret.write_text(secrets.token_hex(32))
    args = {"model": str(model), "cluster-secret-file": str(secret), "host-gpus": 0.0, "min-pace": 0.0, "replicas": 2}
    begun = time.monotonic()
    serve.run(build(args), name="stretto", route_prefix="/")
    base, found = f"http://127.0.0.1:{port}", {"start_s": time.monotonic() - begun}
    while httpx.get(f"{base}/health", timeout=60).status_code != 200:
        time.sleep(0.2)
    ask = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    long = {**ask, "modalities": ["text", "audio"], "stream": True, "audio": {"format": "pcm16"}, "ignore_eos": True}
    long |= {"min_audio_frames": 2000, "max_audio_frames": 2000, "max_tokens": 900}
    ends: list[tuple[float, str]] = []

    def listen() -> None:
        try:
            with httpx.stream("POST", f"{base}/v1/chat/completions", json=long, timeout=120) as answer:
                for _ in answer.iter_lines():
                    if stop.is_set():
                        return
            ends.append((time.monotonic(), "ended"))
        except httpx.HTTPError as e:
            ends.append((time.monotonic(), type(e).__name__))

    stop = threading.Event()
    threads = [threading.Thread(target=listen) for _ in range(4)]
    for t in threads:
        t.start()
    time.sleep(2.0)
    victim = next(a for a in list_actors(filters=[("state", "=", "ALIVE")]) if "ServeReplica" in a.class_name)
    hosts = [a.pid for a in list_actors(filters=[("state", "=", "ALIVE")]) if a.class_name == "HostAgent"]
    killed = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    statuses: list[int] = []
    while time.monotonic() - killed < 15.0:
        try:
            statuses.append(httpx.post(f"{base}/v1/chat/completions", json=ask, timeout=60).status_code)
        except httpx.HTTPError:
            statuses.append(0)
        time.sleep(0.1)

    def up() -> int:
        states = serve.status().applications["stretto"].deployments["Replica"].replica_states
        return sum(n for state, n in states.items() if str(getattr(state, "value", state)) == "RUNNING")

    while up() < 2:
        time.sleep(0.1)
    found["up_s"] = time.monotonic() - killed
    stop.set()
    for t in threads:
        t.join()
    found["cut"] = [{"after_s": at - killed, "how": how} for at, how in ends if at - killed < 10]
    found["new"] = {
        "asked": len(statuses),
        "refused": sum(s != 200 for s in statuses),
        "statuses": sorted(set(statuses)),
    }
    found["agents_before"] = len(hosts)
    found["agents_left"] = sum(Path(f"/proc/{pid}").exists() for pid in hosts)
    serve.delete("stretto")
    return found


# ---- ingress


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


async def hear(base: str) -> tuple[list[float], list[float]]:
    """First bytes, and each packet's delay, of all streams."""
    firsts: list[float] = []
    delays: list[float] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(random.Random(number).random())
        asked = time.monotonic()
        async with client.stream("GET", f"{base}/stream") as answer:
            first = True
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    now = time.monotonic()
                    if first:
                        firsts.append(now - asked)
                        first = False
                    delays.append(now - json.loads(line[6:])["at"])

    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        await asyncio.gather(*(one(client, i) for i in range(STREAMS)))
    return firsts, delays


def until_answered(base: str) -> None:
    while True:
        try:
            if httpx.get(f"{base}/stream", timeout=60).status_code == 200:
                return
        except httpx.ConnectError:
            pass
        time.sleep(0.2)


def ingress(port: int, rounds: int) -> dict[str, Any]:
    from ray import serve

    from stretto.cluster.app import ACTOR

    @serve.deployment(max_ongoing_requests=200, ray_actor_options=ACTOR)
    @serve.ingress(stream_app)
    class Stream:
        pass

    serve.run(Stream.bind(), name="stream", route_prefix="/")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        plain = s.getsockname()[1]
    # In a process of its own, as a replica is: in this one it would wait for its clients' interpreter.
    command = [sys.executable, "-m", "uvicorn", "--factory", "bench.cluster:stream_app", "--port", str(plain)]
    server = subprocess.Popen([*command, "--log-level", "warning", "--no-access-log"], cwd=ROOT)
    ways = {"uvicorn": f"http://127.0.0.1:{plain}", "haproxy": f"http://127.0.0.1:{port}"}
    heard: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    try:
        for base in ways.values():
            until_answered(base)
        for _ in range(rounds):
            for name, base in ways.items():
                firsts, delays = asyncio.run(hear(base))
                heard[name][0].extend(firsts)
                heard[name][1].extend(delays)
    finally:
        server.terminate()
        server.wait()
    serve.delete("stream")
    found = {
        name: {"first_byte_ms": quantiles([1e3 * v for v in first]), "packet_ms": quantiles([1e3 * v for v in each])}
        | {"packets": len(each)}
        for name, (first, each) in heard.items()
    }
    print(json.dumps(found), flush=True)
    return found


def main(given: Sequence[str]) -> int:
    p = parser("cluster", __doc__)
    add_parts(p, ("kills", "replicas", "ingress"))
    p.add_argument("--kills", type=int, default=100)
    p.add_argument("--seconds", type=float, default=3600.0, help="for the kills: as many as fit")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(given)
    from stretto.cluster.extra import require_ray
    from stretto.registry import write_tiny

    require_ray()
    parts: dict[str, Callable[[Any, Path, int], dict[str, Any]]] = {
        "kills": lambda it, model, port: kills(it, model, port, args.kills, args.seconds, args.seed),
        "replicas": lambda it, model, port: replicas(model, port),
        "ingress": lambda it, model, port: ingress(port, args.rounds),
    }
    found: dict[str, Any] = {"arguments": arguments(args), "env": describe()}
    run = os.environ[MARK] = secrets.token_hex(8)
    before = segments()
    with tempfile.TemporaryDirectory() as folder, cluster() as it:
        from ray import serve
        from ray.serve.config import HTTPOptions

        model = Path(folder) / "tiny"
        write_tiny(model)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="0.0.0.0", port=port))
        for name in args.parts:
            found[name] = parts[name](it, model, port)
            write(args.out, found)
        serve.shutdown()
    time.sleep(END_S)
    found["left"] = {"processes": left_of(run), "segments": sorted(segments() - before)}
    print(found["left"], flush=True)
    write(args.out, found)
    return 0
