"""How an engine's pipelines are, for people and for metrics. Asked by the engine, on the event
loop; no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence

from stretto.engine.events import EngineState, Progress
from stretto.engine.pipeline import Pipeline
from stretto.observe.descriptors import OPEN_FILES, open_descriptors
from stretto.observe.recorder import labelled
from stretto.preprocess.pool.threads import Prompts


def progress_of(
    pipelines: Sequence[Pipeline], prompts: Prompts, error: str | None, up: bool, draining: bool
) -> Progress:
    """`error`: why the engine will not come up. `up`: it was, once."""
    stages = {
        (stage if len(pipelines) == 1 else f"{p.name}.{stage}"): what
        for p in pipelines
        for stage, what in p.supervisor.progress.items()
    }
    if error is not None:
        return Progress("dead", stages, error)
    trouble = "; ".join(filter(None, (p.supervisor.trouble for p in pipelines))) or None
    if not up:
        return Progress("loading", stages, trouble)
    if draining:
        return Progress("draining", stages)
    if not any(p.ready(path) for p in pipelines for path in p.spec.paths.values()):
        return Progress("dead", stages, trouble or "no pipeline is up")
    if prompts.trouble is not None:
        state: EngineState = "loading" if prompts.hopeful else "dead"
        return Progress(state, stages, prompts.trouble, accepts=prompts.hopeful)
    return Progress("ready", stages, trouble)


def open_files(prompts: Prompts) -> dict[str, float]:
    """Descriptors of this process and of the one that builds prompts; hosts count their own."""
    pids = {"server": os.getpid(), "prompt worker": prompts.pid}
    counted = {name: open_descriptors(pid) for name, pid in pids.items() if pid is not None}
    return {
        labelled(OPEN_FILES, process=name): count
        for name, count in counted.items()
        if count is not None
    }


def numbers_of(pipelines: Sequence[Pipeline]) -> dict[str, float]:
    """Of their hosts, told apart where there are several pipelines."""
    values: dict[str, float] = {}
    for p in pipelines:
        own = p.metrics()
        values |= (
            own if len(pipelines) == 1 else {labelled(k, replica=p.name): v for k, v in own.items()}
        )
    return values
