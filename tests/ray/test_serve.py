"""The whole server on Ray Serve behind its HAProxy: streams, sessions, readiness, replicas that go,
and their numbers. Skipped where Ray is not installed; `make ray` installs it and runs these."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from stretto.server.realtime.endpoint import DRAINING

pytestmark = pytest.mark.ray
ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
ALOUD = {**ASK, "modalities": ["text", "audio"], "stream": True, "audio": {"format": "pcm16"}}
LONG = {
    **ALOUD,
    "ignore_eos": True,
    "min_audio_frames": 400,
    "max_audio_frames": 400,
    "max_tokens": 200,
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Served:
    def __init__(self, port: int, args: dict[str, Any]) -> None:
        self.base, self.args = f"http://127.0.0.1:{port}", args

    def deploy(self, replicas: int) -> None:
        from ray import serve

        from stretto.ray.app import build

        serve.run(build({**self.args, "replicas": replicas}), name="stretto", route_prefix="/")

    def replicas(self) -> int:
        from ray import serve

        states = serve.status().applications["stretto"].deployments["Replica"].replica_states
        return sum(states.values())

    def who(self, **headers: str) -> str:
        """Which replica answers: each knows its own number of requests."""
        answer = httpx.get(f"{self.base}/metrics", headers=headers, timeout=30)
        return next(
            line
            for line in answer.text.splitlines()
            if line.startswith("stretto_engine_requests_total")
        )


@pytest.fixture(scope="module")
def served(
    cluster: Any, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    from ray import serve
    from ray.serve.config import HTTPOptions

    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text(secrets.token_hex(32))
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="0.0.0.0", port=port))
    args = {
        "model": str(tiny_dir),
        "cluster-secret-file": str(secret),
        "host-gpus": 0.0,
        "min-pace": 0.0,
    }
    it = Served(
        port, {**args, "drain-timeout": 300, "prompt-workers": 1}
    )  # however slow the machine
    it.deploy(2)
    yield it
    serve.delete("stretto")
    serve.shutdown()


def until(holds: Any, what: str, limit: float = 300.0) -> None:
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline, f"not in {limit} s: {what}"
        time.sleep(0.1)


def test_it_is_ready_when_it_is_up(served: Served) -> None:
    """No answer was ever "loading": traffic comes when the engine is there."""
    for _ in range(6):
        assert httpx.get(f"{served.base}/health", timeout=30).json()["status"] == "ready"


def test_answers_stream_and_a_session_stays(served: Served) -> None:
    with httpx.stream(
        "POST", f"{served.base}/v1/chat/completions", json=ALOUD, timeout=60
    ) as answer:
        chunks = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert answer.status_code == 200
    assert chunks[-1] == "data: [DONE]"
    assert any(
        json.loads(c[6:])["choices"][0]["delta"].get("audio", {}).get("data")
        for c in chunks[:-1]
        if c[6] == "{"
    )
    for _ in range(3):
        httpx.post(
            f"{served.base}/v1/chat/completions",
            json=ASK,
            headers={"x-session-id": "one"},
            timeout=60,
        )
    counts = {served.who(**{"x-session-id": "one"}) for _ in range(6)}
    assert len(counts) == 1, "each request of a session meets the same replica"
    assert int(float(counts.pop().split()[-1])) >= 3


def test_replicas_tell_their_numbers_to_ray(served: Served, cluster: Any) -> None:
    import ray

    def scraped() -> set[str]:
        ports = {
            (n["NodeManagerAddress"], n["MetricsExportPort"]) for n in ray.nodes() if n["Alive"]
        }
        found: set[str] = set()
        for host, port in ports:
            text = httpx.get(f"http://{host}:{port}/metrics", timeout=30).text
            lines = [
                line
                for line in text.splitlines()
                if line.startswith("ray_stretto_engine_requests_total{")
            ]
            found |= {line.partition('replica_id="')[2].partition('"')[0] for line in lines}
        return found

    until(lambda: len(scraped()) == 2, "both replicas in the exporters' pages")


def test_a_replica_shows_when_it_is_told_to_go(served: Served) -> None:
    """The flag that is no API is there in this version of Ray, and false while the replica
    serves."""
    from stretto.ray.leaving import shutdown_flag

    def look(replica: Any) -> bool | None:
        going = shutdown_flag()
        return None if going is None else going()

    assert asked(look) == [False, False]
    assert shutdown_flag() is None, "this process has no replica"


def asked(look: Callable[[Any], Any]) -> list[Any]:
    """What `look` finds in each of the two replicas' processes."""
    import ray
    from ray.util.state import list_actors

    found = list_actors(filters=[("state", "=", "ALIVE")])
    names = [(a.name, a.ray_namespace) for a in found if "ServeReplica" in a.class_name]
    assert len(names) == 2
    handles = [ray.get_actor(name, namespace) for name, namespace in names]
    answers: list[Any] = ray.get([h.__ray_call__.remote(look) for h in handles])
    return answers


def test_the_application_runs_in_the_replicas_own_loop(served: Served) -> None:
    """Else every message crosses threads twice. Nor do other processes of the machine come
    first."""

    def look(replica: Any) -> tuple[bool, int]:
        from ray import serve

        service = serve.get_replica_context().servable_object.app.state.service
        return service.cut.get_loop() is replica._replica_impl._event_loop, os.getpriority(
            os.PRIO_PROCESS, 0
        )

    assert asked(look) == [(True, os.getpriority(os.PRIO_PROCESS, 0))] * 2


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/version", None, 200), ("GET", "/v1/models/nobody", None, 404), ("POST",
        "/version", None, 405),
        ("POST", "/v1/chat/completions", b"{", 400), ("POST", "/v1/chat/completions",
        json.dumps(ASK).encode(), 200),
    ],
)  # fmt: skip
def test_statuses_come_through(
    served: Served, method: str, path: str, body: bytes | None, status: int
) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.request(
        method, f"{served.base}{path}", content=body, headers=headers, timeout=60
    )
    assert answer.status_code == status


def test_a_client_that_leaves_is_noticed(served: Served) -> None:
    """Its answer is given up in the engine, long before it would have ended."""
    session = {"x-session-id": "leaver"}

    def cancelled() -> float:
        metrics = httpx.get(f"{served.base}/metrics", headers=session, timeout=60).text
        return sum(
            float(n)
            for n in re.findall(r"^stretto_engine_cancelled_total(?:{.*})? (\S+)$", metrics, re.M)
        )

    before = cancelled()
    with httpx.stream(
        "POST", f"{served.base}/v1/chat/completions", json=LONG, headers=session, timeout=60
    ) as answer:
        next(line for line in answer.iter_lines() if line.startswith("data: "))
    until(lambda: cancelled() == before + 1, "the request is cancelled")


def test_a_prompt_worker_that_dies_in_a_replica_is_replaced(served: Served) -> None:
    """Ray's loop is uvloop, in a thread that is not the process's first, and must still hear of a
    child's end."""

    def worker(replica: Any) -> int:
        from ray import serve

        pid: int = (
            serve.get_replica_context()
            .servable_object.app.state.service.engine()
            .prompts.worker.process.pid
        )
        return pid

    before = asked(worker)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not set(before) & set(asked(worker)), "other prompt workers")
    for number in range(4):
        session = {"x-session-id": f"p{number}"}
        answer = httpx.post(
            f"{served.base}/v1/chat/completions", json=ASK, headers=session, timeout=60
        )
        assert answer.status_code == 200


@contextmanager
def talking(served: Served, number: int) -> Iterator[ClientConnection]:
    where, session = (
        f"ws{served.base.removeprefix('http')}/v1/realtime",
        {"x-session-id": f"s{number}"},
    )
    with connect(where, additional_headers=session, open_timeout=60) as socket:
        assert json.loads(socket.recv(timeout=60))["type"] == "session.created"
        yield socket


def last_words(socket: ClientConnection) -> tuple[int, str]:
    """With which it was closed."""
    with pytest.raises(ConnectionClosed) as told:
        socket.recv(timeout=60)
    assert told.value.rcvd is not None, "cut without a word"
    return told.value.rcvd.code, told.value.rcvd.reason


def test_a_replica_that_goes_says_good_bye_and_lets_its_streams_end(served: Served) -> None:
    """A new deployment replaces both: each WebSocket is told at once, though answers still run."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(talking(served, i)) for i in range(8)]
        go(served)
        assert {last_words(s) for s in sockets} == {(1012, DRAINING.words)}
    with talking(served, 0) as again:
        again.send(json.dumps({"type": "session.update", "session": {"type": "realtime"}}))
        assert json.loads(again.recv(timeout=60))["type"] == "session.updated"


def go(served: Served) -> None:
    """Deploy anew while four listen and others ask: nobody is cut, nobody refused."""
    ended: list[bool] = []

    def listen(number: int) -> None:
        with httpx.stream(
            "POST", f"{served.base}/v1/chat/completions", json=LONG, timeout=300
        ) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        ended.append(answer.status_code == 200 and lines[-1] == "data: [DONE]")

    threads = [threading.Thread(target=listen, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    refused = 0
    served.deploy(1)
    while any(t.is_alive() for t in threads):
        refused += httpx.get(f"{served.base}/v1/models", timeout=60).status_code != 200
        time.sleep(0.05)
    for t in threads:
        t.join()
    assert ended == [True] * 4
    assert refused == 0
    until(lambda: served.replicas() == 1, "the others are gone")
