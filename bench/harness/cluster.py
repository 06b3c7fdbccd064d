"""A Ray cluster of this machine with three nodes, and Serve behind HAProxy on it: for the benchmark
`ingress` and for tests/slow/cluster. Imports Ray when it starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.ray import environment

NODES = ("a", "b")  # beside the head
NODE_CPUS = 3  # what a host takes: one fits on a node, and none beside the replica
ENVIRONMENT = {
    **environment.ENVIRONMENT,
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
}


@contextmanager
def serve_cluster() -> Iterator[tuple[Any, int]]:
    """The cluster, its nodes as `named`, and the port at which Serve answers."""
    with cluster() as it:
        from ray import serve
        from ray.serve.config import HTTPOptions

        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="0.0.0.0", port=port))
        yield it, port
        serve.shutdown()


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
