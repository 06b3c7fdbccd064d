"""On a Ray cluster of this machine: what dies, what callers see and when it is up again.

    python -m tests.slow cluster --out bench/results/cluster.json

Needs the extra `stretto[ray]`. Parts:
    kills      hosts, workers, raylets and the replica are killed at seeded moments; nothing may be
               left
    replicas   one of two Serve replicas is killed while others ask
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.harness.cluster import serve_cluster
from bench.harness.env import describe
from bench.harness.parts import add_parts
from bench.harness.results import arguments, parser, write
from tests.slow.cluster.kills import MARK, kills, left_of, segments

END_S = 5.0  # for what was told to end


def replicas(model: Path, port: int) -> dict[str, Any]:
    """Kill one of two replicas while it speaks and others ask."""
    from ray import serve
    from ray.util.state import list_actors

    from stretto.ray.app import build

    secret = model.parent / "secret"
    secret.write_text(secrets.token_hex(32))
    args = {
        "model": str(model),
        "cluster-secret-file": str(secret),
        "host-gpus": 0.0,
        "min-pace": 0.0,
        "replicas": 2,
    }
    begun = time.monotonic()
    serve.run(build(args), name="stretto", route_prefix="/")
    base, found = f"http://127.0.0.1:{port}", {"start_s": time.monotonic() - begun}
    while httpx.get(f"{base}/health", timeout=60).status_code != 200:
        time.sleep(0.2)
    ask = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    long = {
        **ask,
        "modalities": ["text", "audio"],
        "stream": True,
        "audio": {"format": "pcm16"},
        "ignore_eos": True,
    }
    long |= {"min_audio_frames": 2000, "max_audio_frames": 2000, "max_tokens": 900}
    ends: list[tuple[float, str]] = []

    def listen() -> None:
        try:
            with httpx.stream(
                "POST", f"{base}/v1/chat/completions", json=long, timeout=120
            ) as answer:
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
    victim = next(
        a for a in list_actors(filters=[("state", "=", "ALIVE")]) if "ServeReplica" in a.class_name
    )
    hosts = [
        a.pid for a in list_actors(filters=[("state", "=", "ALIVE")]) if a.class_name == "HostAgent"
    ]
    killed = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    statuses: list[int] = []
    while time.monotonic() - killed < 15.0:
        try:
            statuses.append(
                httpx.post(f"{base}/v1/chat/completions", json=ask, timeout=60).status_code
            )
        except httpx.HTTPError:
            statuses.append(0)
        time.sleep(0.1)

    def up() -> int:
        states = serve.status().applications["stretto"].deployments["Replica"].replica_states
        return sum(
            n for state, n in states.items() if str(getattr(state, "value", state)) == "RUNNING"
        )

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


def main(given: Sequence[str]) -> int:
    p = parser("cluster", __doc__, package="tests.slow")
    add_parts(p, ("kills", "replicas"))
    p.add_argument("--kills", type=int, default=100)
    p.add_argument("--seconds", type=float, default=3600.0, help="for the kills: as many as fit")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(given)
    from stretto.ray.dependency import require_ray
    from stretto.registry import write_tiny

    require_ray()
    parts: dict[str, Callable[[Any, Path, int], dict[str, Any]]] = {
        "kills": lambda it, model, port: kills(
            it, model, port, args.kills, args.seconds, args.seed
        ),
        "replicas": lambda it, model, port: replicas(model, port),
    }
    found: dict[str, Any] = {"arguments": arguments(args), "env": describe()}
    run = os.environ[MARK] = secrets.token_hex(8)
    before = segments()
    with tempfile.TemporaryDirectory() as folder, serve_cluster() as (it, port):
        model = Path(folder) / "tiny"
        write_tiny(model)
        for name in args.parts:
            found[name] = parts[name](it, model, port)
            write(args.out, found)
    time.sleep(END_S)
    found["left"] = {"processes": left_of(run), "segments": sorted(segments() - before)}
    print(found["left"], flush=True)
    write(args.out, found)
    return 0
