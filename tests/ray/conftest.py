"""A Ray cluster of three nodes on this machine, where Ray is installed (`make ray` does so, and
runs these tests)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from stretto.errors import Invalid
from stretto.ray.dependency import require_ray
from tests.ray import environment

NODES = ("a", "b")
FAST = {"period_ms": 500, "timeout_ms": 1000, "failure_threshold": 2, "initial_delay_ms": 500}
"""How soon the head calls a node dead."""
ENVIRONMENT = {
    **environment.ENVIRONMENT,
    "RAY_DEDUP_LOGS": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    **{f"RAY_health_check_{name}": str(value) for name, value in FAST.items()},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Each node has a resource of its own, so that tests can say what goes where."""
    try:
        require_ray()
    except Invalid as e:
        pytest.skip(str(e))
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    import ray
    from ray.cluster_utils import Cluster

    it = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"head": 1}})
    try:
        it.named = {
            name: it.add_node(num_cpus=3, num_gpus=2, resources={name: 1}) for name in NODES
        }
        it.wait_for_nodes()
        ray.init(address=it.address, namespace="stretto", log_to_driver=False)
        yield it
    finally:
        ray.shutdown()
        it.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
