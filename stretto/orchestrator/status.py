"""How an engine's pipelines are, for people and for metrics. Asked by the engine, on the event loop; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.observe.recorder import labelled
from stretto.orchestrator.events import Progress
from stretto.orchestrator.pipeline import Pipeline


def progress_of(pipelines: Sequence[Pipeline], error: str | None, up: bool, draining: bool) -> Progress:
    """`error`: why the engine will not come up. `up`: it was, once."""
    stages = {
        (stage if len(pipelines) == 1 else f"{p.name}.{stage}"): what
        for p in pipelines
        for stage, what in p.upkeep.progress.items()
    }
    if error is not None:
        return Progress("dead", stages, error)
    trouble = "; ".join(filter(None, (p.upkeep.trouble for p in pipelines))) or None
    if not up:
        return Progress("loading", stages, trouble)
    if draining:
        return Progress("draining", stages)
    if not any(p.ready(path) for p in pipelines for path in p.spec.paths.values()):
        return Progress("dead", stages, trouble or "no pipeline is up")
    return Progress("ready", stages, trouble)


def numbers_of(pipelines: Sequence[Pipeline]) -> dict[str, float]:
    """Of their hosts, told apart where there are several pipelines."""
    values: dict[str, float] = {}
    for p in pipelines:
        own = p.metrics()
        values |= own if len(pipelines) == 1 else {labelled(k, replica=p.name): v for k, v in own.items()}
    return values
