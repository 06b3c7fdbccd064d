"""`stretto serve --backend ray`: finds the cluster, looks whether it will do, and serves there
until it is stopped."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.config.cluster import ClusterConfig, check_cluster
from stretto.errors import Invalid, StageDead, StrettoError
from stretto.ray.dependency import require_ray
from stretto.ray.secret import read_secret

if TYPE_CHECKING:
    from stretto.config.engine import EngineConfig
    from stretto.config.server import ServerConfig
    from stretto.ray.app import Spec

APP = "stretto"
HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
ALERT = "[ALERT]"  # how HAProxy begins what it ends with
REACH_S = 5.0
POLL_S = 0.2


def run_on_ray(
    model: str | None, engine: EngineConfig, server: ServerConfig, cluster: ClusterConfig
) -> int:
    """All that can be refused is refused before Ray is asked, the rest before anything is started
    there."""
    require_ray()
    check_cluster(cluster, engine)
    read_secret(cluster.cluster_secret_file)
    if model is None:
        raise Invalid("--backend ray needs a model: a directory that every machine has", "model")
    if server.host != "0.0.0.0":
        raise Invalid(
            "Ray's ingress listens on all addresses of every node: say so with --host 0.0.0.0, "
            "behind a firewall",
            "host",
        )
    from stretto.ray.app import application, spec_of

    # Whole paths: other machines work in other directories.
    cluster = replace(
        cluster, cluster_secret_file=os.path.abspath(cluster.cluster_secret_file or "")
    )
    spec = spec_of(
        os.path.abspath(model) if Path(model).is_dir() else model, engine, server, cluster
    )
    connect(cluster)
    check_nodes(spec)
    return _serve(application(spec), server)


def connect(cluster: ClusterConfig) -> None:
    import ray

    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines that hosts have in common are not one line

    where = cluster.ray_address
    try:
        reached = reach(os.environ.get("RAY_ADDRESS", where) if where == "auto" else where)
        ray.init(address=where, namespace=APP, logging_level="error")
    except ray.exceptions.AuthenticationError as e:
        raise Invalid(f"Ray's token cannot be used: {first_line(e)}", "ray_address") from None
    except (ConnectionError, ValueError, RuntimeError, OSError) as e:
        raise Invalid(unanswered(where, reached, first_line(e)), "ray_address") from None
    facts = ray.get(ray.remote(_facts).options(num_cpus=0).remote())
    if not facts["token"] and not cluster.insecure_cluster:
        ray.shutdown()
        raise Invalid(
            "this Ray cluster has no token authentication: whoever reaches it can run code on it. "
            "Start all nodes with "
            "RAY_AUTH_MODE=token and a token file, or say --insecure-cluster", "insecure_cluster",
        )  # fmt: skip
    if not facts["haproxy"]:
        _say(
            f"stretto: warning: {HAPROXY}=1 is not set on the nodes: Ray's Python proxy delays "
            f"audio"
        )


def reach(address: str) -> bool:
    """Check that something listens at HOST:PORT: Ray itself would try for minutes. False: the
    address names no host and port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as e:
        raise Invalid(unanswered(address, False, str(e)), "ray_address") from None
    return True


def unanswered(where: str, reached: bool, reason: str) -> str:
    if reached:
        return (
            f"the Ray cluster at {where} lets nobody in from here ({reason}): are RAY_AUTH_MODE "
            f"and the token of RAY_AUTH_TOKEN_PATH those of its nodes, and Ray's and Python's "
            f"versions?"
        )
    return f"no Ray cluster answers at {where} ({reason}); start one with `ray start --head`"


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _facts() -> dict[str, bool]:
    """Settings of the cluster as one of its workers sees them: it has its node's environment."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return {"token": is_token_auth_enabled(), "haproxy": os.environ.get(HAPROXY) == "1"}


def check_nodes(spec: Spec) -> None:
    """Bundles that fit nowhere would wait for ever."""
    import ray

    from stretto.ray.app import REPLICA_CPUS, bundle_of

    bundle, least = bundle_of(spec.cluster), spec.engine.replica_range[0]
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    if not any(all(n.get(kind, 0) >= amount for kind, amount in bundle.items()) for n in nodes):
        raise StageDead(
            f"no node of the cluster has {describe_resources(bundle)} for a host; the largest are "
            f"{largest(nodes)}"
            + ("" if any(n.get("GPU") for n in nodes) else "; --host-gpus 0 runs without")
        )
    have = ray.cluster_resources()
    need = {kind: least * spec.hosts * amount for kind, amount in bundle.items()}
    need["CPU"] += least * REPLICA_CPUS
    short = {kind: amount for kind, amount in need.items() if have.get(kind, 0) < amount}
    if short:
        raise StageDead(
            f"{least} replicas of {spec.hosts} hosts need {describe_resources(need)}, but the "
            f"cluster has {describe_resources({kind: have.get(kind, 0) for kind in short})}"
        )


def describe_resources(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items()) or "nothing"


def largest(nodes: list[dict[str, float]]) -> str:
    return describe_resources(
        {kind: max((n.get(kind, 0) for n in nodes), default=0) for kind in ("CPU", "GPU")}
    )


def _serve(app: Any, server: ServerConfig) -> int:
    from ray import serve
    from ray.serve.config import HTTPOptions

    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    failed: list[Exception] = []

    def deploy() -> None:
        try:
            serve.start(
                proxy_location="EveryNode",
                http_options=HTTPOptions(host=server.host, port=server.port),
            )
            serve.run(app, name=APP, route_prefix=server.root_path or "/", blocking=False)
        except Exception as e:  # noqa: BLE001 - raised by the thread that waits
            failed.append(e)

    try:
        # In a thread: it lasts as long as the model loads, or for ever where others have the nodes.
        work = threading.Thread(target=deploy, daemon=True, name="deploy")
        work.start()
        while work.is_alive() and not over.wait(POLL_S):
            pass
        if failed:
            raise StageDead(why(serve.status(), failed[0]))
        if not over.is_set():
            _say(
                f"stretto: serves at port {server.port} of every node with a replica; Ctrl-C "
                f"drains and ends it"
            )
            over.wait()
    finally:
        serve.delete(APP)
        if not serve.status().applications:  # those of others go on
            serve.shutdown()
    return 0


def why(status: Any, error: Exception) -> str:
    """The error of a replica that failed, or HAProxy's about its settings: Serve shows both in
    tracebacks."""
    app = status.applications.get(APP)
    lines = (
        [line for d in app.deployments.values() for line in d.message.splitlines()] if app else []
    )
    errors = [
        line.partition(": ")[2] for line in lines if line.startswith(f"{StrettoError.__module__}.")
    ]
    errors = errors or [line for line in str(error).splitlines() if line.startswith(ALERT)][:1]
    return errors[-1] if errors else first_line(error)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
