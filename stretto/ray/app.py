"""What Ray Serve runs: `build` for `serve deploy`, `serve run` and a RayService, and the replica
that it makes.

A replica is our own server app and one engine with one pipeline, no GPU and no torch. Its hosts are
in the other bundles of its placement group. Serve starts, checks, scales, drains and replaces
it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.util import get_current_placement_group
from starlette.applications import Starlette

from stretto.config.cluster import ClusterConfig, check_cluster
from stretto.config.engine import EngineConfig
from stretto.config.loader import load_settings
from stretto.config.placement import places
from stretto.config.server import ServerConfig
from stretto.engine.engine import PipelineEngine
from stretto.engine.remote_host import RemoteLauncher
from stretto.errors import Invalid, StageDead, StrettoError
from stretto.ray import scaling
from stretto.ray.dependency import require_ray
from stretto.ray.leaving import close_websockets_on_exit, shutdown_flag
from stretto.ray.metrics import Export
from stretto.ray.secret import read_secret
from stretto.ray.starter import RayStarter
from stretto.registry import open_model
from stretto.server.app import make_app, metrics_of
from stretto.server.service import Service

log = logging.getLogger(__name__)

REPLICA_CPUS = 0.5
OWN_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""The application runs in the replica's own event loop. By default it has a thread and a loop to
itself: then every message crosses threads twice, and a client that reads slowly is not felt."""
ACTOR = {"num_cpus": REPLICA_CPUS, "runtime_env": {"env_vars": OWN_LOOP}}
POLL_S = 0.05
LAST_S = 10.0  # beside the time that running requests have, for the hosts to end
# without a pipeline, after which a replica is given up: its own restarts have had their chance
DEAD_S = 120.0


@dataclass(frozen=True, slots=True)
class Spec:
    """All that a replica needs to know. Goes to it through Ray; holds no secret but API keys, so
    give those by file or environment where the cluster's network is not closed."""

    model: str
    engine: EngineConfig
    server: ServerConfig
    cluster: ClusterConfig
    hosts: int


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of these settings, named as in a YAML file of `stretto serve`, with `model`
    among them."""
    require_ray()
    settings = load_settings({}, os.environ, args, "the application's args")
    for warning in settings.warnings:
        log.warning("%s", warning)
    if settings.model is None:
        raise Invalid("the application's args name no model", "model")
    cluster = replace(settings.cluster, backend="ray")
    return application(spec_of(settings.model, settings.engine, settings.server, cluster))


def spec_of(model: str, engine: EngineConfig, server: ServerConfig, cluster: ClusterConfig) -> Spec:
    """Checked as far as this machine can: it must have the model, and the others are asked when
    they start a host."""
    check_cluster(cluster, engine)
    if not Path(model).is_dir():
        raise Invalid(
            f"{model}: on a cluster the model is a directory that every machine has, this one too",
            "model",
        )
    if server.ssl_certfile:
        raise Invalid(
            "TLS ends before Ray's ingress, not in it: leave ssl_certfile out", "ssl_certfile"
        )
    if server.metrics_port is not None:
        raise Invalid(
            "on a cluster Ray shows the numbers of all replicas: leave metrics_port out",
            "metrics_port",
        )
    device = "cuda" if cluster.host_gpus else "cpu"
    share = cluster.host_gpus if 0 < cluster.host_gpus < 1 else engine.host.memory_share
    engine = replace(engine, host=replace(engine.host, device=device, memory_share=share))
    names = open_model(model).pipeline.names
    return Spec(model, engine, server, cluster, len(places(engine.placement, names)))


def application(spec: Spec) -> serve.Application:
    least, most = spec.engine.replica_range
    c = spec.cluster
    scale: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scale = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": c.target_streams,
                "policy": {"policy_function": scaling.policy},
                "upscale_delay_s": 5.0,
                "downscale_delay_s": 300.0,
            }
        }
    options = serve.deployment(
        name="Replica",
        max_ongoing_requests=spec.server.max_concurrent + 64,  # probes and refusals beside requests
        ray_actor_options=ACTOR,
        placement_group_bundles=[{"CPU": REPLICA_CPUS}, *([bundle_of(c)] * spec.hosts)],
        placement_group_strategy="PACK",
        graceful_shutdown_timeout_s=spec.server.drain_timeout + LAST_S,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        max_constructor_retry_count=3,
        **scale,
    )
    app: serve.Application = options(serve.ingress(_ingress(spec))(Replica)).bind()
    return app


def bundle_of(c: ClusterConfig) -> dict[str, float]:
    return {"CPU": c.host_cpus} | ({"GPU": c.host_gpus} if c.host_gpus else {})


def _ingress(spec: Spec) -> Callable[[], Starlette]:
    def make() -> Starlette:
        return replica_app(spec)

    return make


def replica_app(spec: Spec) -> Starlette:
    """The app of a replica, made in it. Its lifespan starts when the constructor is done, and
    traffic comes when it has started."""

    async def open_engine() -> PipelineEngine:
        group = get_current_placement_group()
        if group is None:
            raise StageDead("this replica has no placement group")
        secret = read_secret(spec.cluster.cluster_secret_file)
        starter = RayStarter(group, spec.model, spec.cluster)
        launcher = RemoteLauncher(starter, secret, ray.util.get_node_ip_address())
        # In a thread: a large vocabulary takes seconds to read, and Serve asks for the replica's
        # state on this loop.
        engine = await asyncio.to_thread(
            PipelineEngine, Path(spec.model), spec.engine.replica(0), launcher
        )
        await engine.start()
        return engine

    app = make_app(spec.server, open_engine)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[Any]:
        async with inner(app) as state:
            service: Service = app.state.service
            await service.opened.wait()
            if service.failure is not None:
                # Serve shows errors from `check_health`, not from the lifespan.
                yield state
                return
            export = Export(serve.get_replica_context().replica_tag, lambda: metrics_of(service))
            tasks = [
                asyncio.create_task(w)
                for w in (export.run(), close_websockets_on_exit(service, shutdown_flag()))
            ]
            try:
                yield state
            finally:
                for task in tasks:
                    task.cancel()

    app.router.lifespan_context = lifespan
    return app


class Replica:
    """What Serve asks beside requests. `app` is what the ingress made."""

    app: Starlette
    _dead_since: float | None = None

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service

    def check_health(self) -> None:
        """Raises when the engine did not come up, or will not come back, so that Serve replaces
        this replica. Serve asks a first time before it lets anybody in."""
        progress = self.service.progress
        if progress.state != "dead":
            self._dead_since = None
            return
        self._dead_since = self._dead_since or time.monotonic()
        if self.service.failure is not None or time.monotonic() - self._dead_since > DEAD_S:
            raise StrettoError(progress.error or "the engine is dead")

    def record_autoscaling_stats(self) -> dict[str, float]:
        engine = self.service.maybe_engine
        pace = min(
            engine.pace if isinstance(engine, PipelineEngine) else scaling.NO_PACE, scaling.NO_PACE
        )
        return {scaling.STREAMS: float(self.service.admission.running), scaling.PACE: pace}
