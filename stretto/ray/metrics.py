"""A replica's numbers as Ray's own gauges, so that one scrape of Ray's exporters shows all
replicas.

Behind a balancer `/metrics` is a random replica's. Runs in the replica, every few seconds on the
event loop that carries packets: hundreds of numbers at once would make those late, so it goes a few
at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from prometheus_client.parser import text_string_to_metric_families
from ray.util.metrics import Gauge

EVERY_S = 5.0
MAX_SERIES = 2000
"""Series of one replica, at most."""
AT_ONCE = 32
"""Numbers, before others have their turn: a fraction of a millisecond."""


class Export:
    """Names stay as they are (Ray puts `ray_` before them); labels too, and one for the replica."""

    def __init__(self, replica: str, render: Callable[[], bytes]) -> None:
        self._replica = replica
        self._render = render
        self._gauges: dict[tuple[str, tuple[str, ...]], Gauge] = {}
        self._series: dict[str, tuple[Gauge, dict[str, str]]] = {}
        """By the text of a line before its number: to parse a line again takes three times as long
        as to set its gauge."""

    def update(self) -> Iterator[int]:
        """Set all gauges; after some of them, how many there were so far."""
        count, name, what = 0, "", ""
        for line in self._render().decode().splitlines():
            if line.startswith("# HELP "):
                name, _, what = line[7:].partition(" ")
            elif line.startswith("# TYPE ") and line.split(" ")[2] != name:
                what = ""  # this one has no help text
            if not line or line[0] == "#":
                continue
            key, _, number = line.rpartition(" ")
            if key.partition("{")[0].endswith("_created"):
                continue
            if key not in self._series:
                self._series[key] = self._learn(line, what)
            gauge, labels = self._series[key]
            gauge.set(float(number), labels)
            count += 1
            if count >= MAX_SERIES:
                break
            if count % AT_ONCE == 0:
                yield count
        yield count

    def _learn(self, line: str, what: str) -> tuple[Gauge, dict[str, str]]:
        [family] = text_string_to_metric_families(line)
        [sample] = family.samples
        labels = {**sample.labels, "replica_id": self._replica}
        return self._gauge(sample.name, what, tuple(sorted(labels))), labels

    def _gauge(self, name: str, what: str, labels: tuple[str, ...]) -> Gauge:
        if (name, labels) not in self._gauges:
            self._gauges[name, labels] = Gauge(name, what or name, labels)
        return self._gauges[name, labels]

    async def run(self) -> None:
        while True:
            for _ in self.update():
                await asyncio.sleep(0)
            await asyncio.sleep(EVERY_S)
