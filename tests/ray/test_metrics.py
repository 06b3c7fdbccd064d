"""A replica's numbers as gauges of Ray. Needs Ray, but no cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stretto.server.metrics import Metrics

metrics = pytest.importorskip(
    "stretto.ray.metrics", reason="needs Ray: `make ray` installs it and runs this"
)


class Gauge:
    made: list[Gauge]

    def __init__(self, name: str, what: str, labels: tuple[str, ...]) -> None:
        self.name, self.what, self.labels = name, what, labels
        self.values: dict[tuple[tuple[str, str], ...], float] = {}
        self.made.append(self)

    def set(self, value: float, labels: dict[str, str]) -> None:
        assert tuple(sorted(labels)) == self.labels
        self.values[tuple(sorted(labels.items()))] = value


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Gauge]:
    gauges: list[Gauge] = []
    monkeypatch.setattr(Gauge, "made", gauges, raising=False)
    monkeypatch.setattr(metrics, "Gauge", Gauge)
    return gauges


def shown(made: list[Gauge], name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return {
        labels: value
        for gauge in made
        if gauge.name == name
        for labels, value in gauge.values.items()
    }


def test_all_numbers_are_told_with_their_labels_and_words(
    made: list[Gauge], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Metrics()
    ours.requests.labels('a "quoted" route', "200").inc(3)
    ours.first_audio.observe(0.05)
    engine = {
        "stretto_engine_requests_total": 7.0,
        'stretto_stage_waiting{stage="a b"}': 2.0,
        "other": float("nan"),
    }
    export = metrics.Export("r1", lambda: ours.render(1, engine))
    *_, count = export.update()
    own = ("replica_id", "r1")
    route = ("route", 'a "quoted" route')
    assert shown(made, "stretto_requests_total") == {(own, route, ("status", "200")): 3.0}
    assert shown(made, "stretto_engine_requests_total") == {(own,): 7.0}
    assert shown(made, "stretto_stage_waiting") == {(own, ("stage", "a b")): 2.0}
    assert shown(made, "stretto_time_to_first_audio_seconds_bucket")[("le", "0.08"), own] == 1.0
    words = {gauge.name: gauge.what for gauge in made}
    assert words["stretto_requests_total"] == "Requests by route and status"
    assert words["stretto_engine_requests_total"] == "Requests that the engine took"
    assert words["other"] == "other", "not those of the number before"
    assert not any(name.endswith("_created") for name in words)
    assert count == sum(len(gauge.values) for gauge in made)
    ours.requests.labels('a "quoted" route', "200").inc()
    monkeypatch.setattr(
        metrics, "text_string_to_metric_families", None
    )  # what is known is not parsed again
    *_, again = export.update()
    assert again == count
    assert len(made) == len({(gauge.name, gauge.labels) for gauge in made}), "nothing is made twice"
    assert shown(made, "stretto_requests_total") == {(own, route, ("status", "200")): 4.0}


def test_others_have_their_turn_in_between(made: list[Gauge]) -> None:
    lines = "".join(f'n{{i="{i}"}} {i}\n' for i in range(10 * metrics.AT_ONCE))
    export = metrics.Export("r", lambda: lines.encode())
    most: list[int] = []

    async def others() -> None:
        task: asyncio.Task[Any] = asyncio.create_task(export.run())
        told = 0
        while told < 10 * metrics.AT_ONCE:
            await asyncio.sleep(0)
            now = sum(len(gauge.values) for gauge in made)
            most.append(now - told)
            told = now
        task.cancel()

    asyncio.run(others())
    assert max(most) == metrics.AT_ONCE


def test_a_replica_tells_no_more_than_so_many(
    made: list[Gauge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MOST", 5)
    lines = "".join(f'n{{i="{i}"}} {i}\n' for i in range(9))
    *_, count = metrics.Export("r", lambda: lines.encode()).update()
    assert count == 5
    assert sum(len(gauge.values) for gauge in made) == 5
