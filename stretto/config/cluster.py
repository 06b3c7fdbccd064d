"""How a server is spread over a cluster of machines. Frozen, validated once; imports neither torch
nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stretto.config.engine import EngineConfig
from stretto.config.setting import check_finite, setting, tuning
from stretto.errors import Invalid

Backend = Literal["local", "ray"]


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    backend: Backend = setting(  # noqa: RUF009
        "local",
        "cluster",
        "local: this machine alone; ray: a Ray cluster, one pipeline per replica",
    )
    cluster_secret_file: str | None = setting(
        None,
        "cluster",
        "a file with the cluster's secret, the same on every machine; needed with --backend ray",
        "FILE",
    )
    insecure_cluster: bool = setting(
        False,
        "cluster",
        "serve on a Ray cluster without token authentication: whoever reaches it can run code "
        "there",
    )
    ray_address: str = setting(
        "auto",
        "cluster",
        "address of the Ray cluster's head; auto: the one of this machine",
        "ADDRESS",
    )
    target_streams: int = setting(
        24,
        "cluster",
        "requests of a replica at which another one is started; earlier if they fall behind",
        "N",
    )
    host_cpus: float = tuning(1.0, "CPUs that Ray reserves for each host")
    host_gpus: float = setting(
        1.0,
        "cluster",
        "cards for each host, or the part of one that it shares; 0 on machines without",
        "N",
    )

    def __post_init__(self) -> None:
        check_finite(self)
        fine = {
            "backend": self.backend in ("local", "ray"),
            "target_streams": self.target_streams >= 1,
            "host_cpus": 0 < self.host_cpus <= 1024,
            "host_gpus": self.host_gpus in (0.0, 1.0) or 0 < self.host_gpus < 1,
        }
        for name, good in fine.items():
            if not good:
                raise Invalid(f"{name} is out of range: {getattr(self, name)!r}", name)


def check_cluster(cluster: ClusterConfig, engine: EngineConfig) -> None:
    """Refuse what cannot work on a cluster, before anything is started there."""
    if cluster.cluster_secret_file is None:
        raise Invalid(
            "hosts on other machines need a secret by which they are known: --cluster-secret-file, "
            "the same file on every machine (make one with `openssl rand -hex 32`)",
            "cluster_secret_file",
        )
    hosts = engine.placement if isinstance(engine.placement, tuple) else ()
    if engine.devices or any(h.device for h in hosts):
        raise Invalid(
            "on a cluster each host gets a card of its own from Ray: name no devices", "placement"
        )
    if engine.placement != "one" and len(hosts) != 1 and engine.connector == "shm":
        raise Invalid(
            "hosts on different machines share no memory: --connector tcp, or mooncake on a closed "
            "network",
            "connector",
        )
