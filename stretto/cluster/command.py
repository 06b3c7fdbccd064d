"""`stretto serve --backend ray`: finds the cluster, looks whether it will do, and serves there until told to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from stretto.cluster.extra import require_ray
from stretto.cluster.secret import read_secret
from stretto.control.cluster import ClusterConfig, check_cluster
from stretto.errors import Invalid, StageDead

if TYPE_CHECKING:
    from stretto.cluster.app import Spec
    from stretto.control.settings import EngineConfig
    from stretto.server.config import ServerConfig

APP = "stretto"
HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"


def run_on_ray(model: str | None, engine: EngineConfig, server: ServerConfig, cluster: ClusterConfig) -> int:
    """All that can be refused is refused before Ray is asked, the rest before anything is started there."""
    require_ray()
    check_cluster(cluster, engine)
    read_secret(cluster.cluster_secret_file)
    if model is None:
        raise Invalid("--backend ray needs a model: a directory that every machine has", "model")
    if server.host != "0.0.0.0":
        raise Invalid(
            "Ray's ingress listens on all addresses of every node: say so with --host 0.0.0.0, behind a firewall",
            "host",
        )
    from stretto.cluster.app import application, spec_of

    spec = spec_of(model, engine, server, cluster)
    connect(cluster)
    check_nodes(spec)
    return _serve(application(spec), server)


def connect(cluster: ClusterConfig) -> None:
    import ray

    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines that hosts have in common are not one line
    try:
        ray.init(address=cluster.ray_address, namespace=APP, logging_level="warning")
    except (ConnectionError, ValueError, RuntimeError, OSError) as e:
        words = str(e).strip().partition("\n")[0]
        raise Invalid(
            f"no Ray cluster answers at {cluster.ray_address} ({words}); start one with `ray start --head`",
            "ray_address",
        ) from None
    facts = ray.get(ray.remote(_facts).options(num_cpus=0).remote())
    if not facts["token"] and not cluster.insecure_cluster:
        ray.shutdown()
        raise Invalid(
            "this Ray cluster has no token authentication: whoever reaches it can run code on it. Start all nodes with "
            "RAY_AUTH_MODE=token and a token file, or say --insecure-cluster", "insecure_cluster",
        )  # fmt: skip
    if not facts["haproxy"]:
        _say(f"stretto: warning: {HAPROXY}=1 is not set on the nodes: Ray's Python proxy delays audio")


def _facts() -> dict[str, bool]:
    """Of the cluster, as one of its workers sees them: workers have their node's environment."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return {"token": is_token_auth_enabled(), "haproxy": os.environ.get(HAPROXY) == "1"}


def check_nodes(spec: Spec) -> None:
    """Bundles that fit nowhere would wait for ever."""
    import ray

    from stretto.cluster.app import REPLICA_CPUS, bundle_of

    bundle, least = bundle_of(spec.cluster), spec.engine.replica_range[0]
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    if not any(all(n.get(kind, 0) >= amount for kind, amount in bundle.items()) for n in nodes):
        raise StageDead(f"no node of the cluster has {shown(bundle)} for a host; the largest are {largest(nodes)}")
    have = ray.cluster_resources()
    need = {kind: least * spec.hosts * amount for kind, amount in bundle.items()}
    need["CPU"] += least * REPLICA_CPUS
    short = {kind: amount for kind, amount in need.items() if have.get(kind, 0) < amount}
    if short:
        raise StageDead(
            f"{least} replicas of {spec.hosts} hosts need {shown(need)}, but the cluster has "
            f"{shown({kind: have.get(kind, 0) for kind in short})}"
        )


def shown(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items()) or "nothing"


def largest(nodes: list[dict[str, float]]) -> str:
    return shown({kind: max((n.get(kind, 0) for n in nodes), default=0) for kind in ("CPU", "GPU")})


def _serve(app: Any, server: ServerConfig) -> int:
    from ray import serve
    from ray.serve.config import HTTPOptions

    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    serve.start(proxy_location="EveryNode", http_options=HTTPOptions(host=server.host, port=server.port))
    try:
        serve.run(app, name=APP, route_prefix=server.root_path or "/", blocking=False)
        _say(f"stretto: serves at port {server.port} of every node with a replica; Ctrl-C drains and ends it")
        over.wait()
    except RuntimeError as e:
        _say(f"stretto: {e}")
        return 1
    finally:
        serve.delete(APP)
        serve.shutdown()
    return 0


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
