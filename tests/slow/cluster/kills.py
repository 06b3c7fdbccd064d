"""The part `kills` of `python -m tests.slow cluster`: all that can die is killed, at seeded
moments, during answers.

One Serve replica with two hosts, each on a node of its own; all callers come through HAProxy.
Killed are hosts, the workers of the actors that started them, raylets of nodes, and the replica.
The next answer must equal the first one, and nothing may be left when all is ended. Imports no
torch."""

from __future__ import annotations

import base64
import json
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.harness.cluster import NODE_CPUS, NODES

KINDS = ("host", "worker", "raylet", "replica")
MARK = "STRETTO_BENCH_RUN"
"""In the environment of all that a run starts, so that what is left of it is found."""
HANG_S, UP_S = 30.0, 180.0
CHAT = "/v1/chat/completions"
ASK = {
    "messages": [{"role": "user", "content": "Hello, what is the weather like?"}],
    "modalities": ["text", "audio"],
    "audio": {"format": "pcm16"}, "temperature": 0.0, "greedy_speech": True, "seed": 5,
}  # fmt: skip
SHORT = {**ASK, "max_tokens": 8, "max_audio_frames": 10}
LONG = {
    **ASK, "stream": True, "ignore_eos": True, "max_tokens": 900, "min_audio_frames": 3000,
    "max_audio_frames": 3000,
}  # fmt: skip


class Answer:
    """Words, and samples that may differ by one step of their 16 bits: how packets are grouped
    depends on timing."""

    def __init__(self, body: dict[str, Any]) -> None:
        audio = body["choices"][0]["message"]["audio"]
        self.words = audio["transcript"]
        self.samples = np.frombuffer(base64.b64decode(audio["data"]), "<i2").astype(int)

    def same(self, other: Answer) -> bool:
        if self.words != other.words or len(self.samples) != len(other.samples):
            return False
        return bool(np.abs(self.samples - other.samples).max() <= 1)


class Stand:
    def __init__(self, cluster: Any, base: str) -> None:
        self.cluster, self.base = cluster, base
        self.client = httpx.Client(base_url=base, timeout=HANG_S)

    def raylet(self, node: str) -> int:
        pid: int = self.cluster.named[node].all_processes["raylet"][0].process.pid
        return pid

    def agent(self, node: str) -> int:
        [pid] = [p for p in children(self.raylet(node)) if "HostAgent" in command(p)]
        return pid

    def replica(self) -> int:
        head: int = self.cluster.head_node.all_processes["raylet"][0].process.pid
        [pid] = [p for p in children(head) if "ServeReplica:stretto" in command(p)]
        return pid

    def victim(self, kind: str, node: str) -> int:
        match kind:
            case "host":
                return children(self.agent(node))[0]
            case "worker":
                return self.agent(node)
            case "raylet":
                return self.raylet(node)
            case _:
                return self.replica()

    def mend(self, node: str) -> None:
        self.cluster.remove_node(
            self.cluster.named[node], allow_graceful=False
        )  # what is left of it
        self.cluster.named[node] = self.cluster.add_node(num_cpus=NODE_CPUS, resources={node: 1})

    def short(self) -> Answer | int:
        try:
            reply = self.client.post(CHAT, json=SHORT)
        except httpx.HTTPError:
            return 0
        return Answer(reply.json()) if reply.status_code == 200 else reply.status_code

    def until_up(self) -> tuple[Answer, list[int]]:
        """The first answer, and what came before it."""
        before: list[int] = []
        begun = time.monotonic()
        while isinstance(got := self.short(), int):
            before.append(got)
            if time.monotonic() - begun > UP_S:
                raise TimeoutError(f"not up again after {UP_S:g} s")
            time.sleep(0.1)
        return got, before

    def listen(self, packets: int, kill: Callable[[], None]) -> tuple[float, str]:
        """Kill in the middle of an answer. When and how its listener learned of it."""
        killed = 0.0
        try:
            with self.client.stream("POST", CHAT, json=LONG) as answer:
                for line in answer.iter_lines():
                    packets -= '"data"' in line
                    if packets == 0 and not killed:
                        kill()
                        killed = time.monotonic()
                    if line.startswith('data: {"error"'):
                        return time.monotonic() - killed, json.loads(line[6:])["error"]["message"]
            return time.monotonic() - killed, "the body ended"
        except httpx.ReadTimeout:
            return time.monotonic() - killed, "hung"
        except httpx.HTTPError as e:
            return time.monotonic() - killed, f"the connection was cut ({type(e).__name__})"


def kills(
    cluster: Any, model: Path, port: int, count: int, seconds: float, seed: int
) -> dict[str, Any]:
    from ray import serve

    from stretto.ray.app import build

    secret = model.parent / "secret"
    secret.write_text(secrets.token_hex(32))
    args = {
        "model": str(model), "cluster-secret-file": str(secret), "host-gpus": 0.0,
        "tune": {"host_cpus": float(NODE_CPUS)},
        "min-pace": 0.0, "placement": "two", "connector": "tcp", "drain-timeout": 5,
        "prompt-workers": 1,
    }  # fmt: skip
    begun = time.monotonic()
    serve.run(build(args), name="stretto", route_prefix="/")
    found: dict[str, Any] = {"start_s": time.monotonic() - begun, "seed": seed, "kills": []}
    it, rng = Stand(cluster, f"http://127.0.0.1:{port}"), random.Random(seed)
    with closing(it.client):
        want, _ = it.until_up()
        begun = time.monotonic()
        while len(found["kills"]) < count and time.monotonic() - begun < seconds:
            found["kills"].append(one_kill(it, rng, want))
            print(len(found["kills"]), json.dumps(found["kills"][-1]), flush=True)
    found["took_s"] = time.monotonic() - begun
    found["agents"] = [
        len([p for p in children(it.raylet(n)) if "HostAgent" in command(p)]) for n in NODES
    ]
    serve.delete("stretto")
    return {**found, **summary(found["kills"])}


def one_kill(it: Stand, rng: random.Random, want: Answer) -> dict[str, Any]:
    kind, node, packets = rng.choice(KINDS), rng.choice(NODES), rng.randrange(1, 8)
    victim = it.victim(kind, node)
    seen_s, how = it.listen(packets, lambda: os.kill(victim, signal.SIGKILL))
    told = time.monotonic()
    if kind == "raylet":
        it.mend(node)
        told = time.monotonic()
    answer, before = it.until_up()
    up_s = time.monotonic() - told + (0.0 if kind == "raylet" else seen_s)
    return {
        "kind": kind, "node": node, "seen_s": seen_s, "how": how, "up_s": up_s,
        "before": sorted(set(before)),
        "exact": answer.same(want),
    }  # fmt: skip


def summary(kills: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "hung": sum(k["how"] == "hung" for k in kills),
        "inexact": sum(not k["exact"] for k in kills),
    }
    for kind in KINDS:
        some = [k for k in kills if k["kind"] == kind]
        if some:
            times = {name: sorted(k[name] for k in some) for name in ("seen_s", "up_s")}
            found[kind] = {"kills": len(some)} | {
                name: {"p50": t[len(t) // 2], "max": t[-1]} for name, t in times.items()
            }
    return found


# ---- processes


def children(pid: int) -> list[int]:
    return [p for p, parent in processes() if parent == pid]


def processes() -> Iterator[tuple[int, int]]:
    """All that live, and their parents."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            yield int(stat.parent.name), int(parent)


def command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""


def left_of(run: str) -> list[str]:
    """Commands of processes of this run that live."""
    mark, found = f"{MARK}={run}".encode(), []
    for pid, _ in processes():
        try:
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(
                b"\0"
            ):
                found.append(command(pid)[:80])
        except OSError:
            continue
    return found


def segments() -> set[str]:
    return {p.name for p in Path("/dev/shm").iterdir()}
