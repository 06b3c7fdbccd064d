"""A replica's numbers as Ray's own gauges, so that one scrape of Ray's exporters shows all replicas.

Behind a balancer `/metrics` is a random replica's. Runs in the replica, every few seconds on its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families
from ray.util.metrics import Gauge

EVERY_S = 5.0
MOST = 2000
"""Series of one replica, at most."""


class Export:
    """Names stay as they are (Ray puts `ray_` before them); labels too, and one for the replica."""

    def __init__(self, replica: str, render: Callable[[], bytes]) -> None:
        self._replica, self._render = replica, render
        self._gauges: dict[tuple[str, tuple[str, ...]], Gauge] = {}

    def update(self) -> int:
        """Set all gauges; how many numbers there were."""
        count = 0
        for family in text_string_to_metric_families(self._render().decode()):
            for sample in family.samples:
                if sample.name.endswith("_created") or count >= MOST:
                    continue
                labels = {**sample.labels, "replica_id": self._replica}
                self._gauge(sample.name, family.documentation, tuple(sorted(labels))).set(sample.value, labels)
                count += 1
        return count

    def _gauge(self, name: str, what: str, labels: tuple[str, ...]) -> Gauge:
        if (name, labels) not in self._gauges:
            self._gauges[name, labels] = Gauge(name, what or name, labels)
        return self._gauges[name, labels]

    async def run(self) -> None:
        while True:
            self.update()
            await asyncio.sleep(EVERY_S)
