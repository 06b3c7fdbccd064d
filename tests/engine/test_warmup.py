"""Hosts warm_up before they are ready, wherever their stages are, and when they come back. Nobody
sees it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from stretto.config.engine import EngineConfig
from stretto.config.placement import Placement
from stretto.engine.engine import PipelineEngine
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from tests.engine.common import CHATS, collect, expected, run, same
from tests.pipeline import ONE_HOST, PROCESSES

PARAMS = Params(max_text_tokens=4, max_frames=4, seed=3, want_codes=True)
COUNTED = (
    "_steps_total",
    "_tokens_total",
    "_rows_total",
    "_frames_total",
    "_chunks_total",
    "_handed_total",
    "_count",
)


@pytest.mark.parametrize(("placement", "replicas"), [(ONE_HOST, 2), (PROCESSES, 1)])
def test_hosts_warm_up_anywhere_and_nobody_sees_it(
    tiny_dir: Path,
    models: Models,
    placement: Placement,
    replicas: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STRETTO_LOG", "INFO")
    want = expected(
        models, PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir)), CHATS["text"], PARAMS
    )

    def untouched(engine: PipelineEngine) -> bool:
        values = {k: v for k, v in engine.metrics().items() if k.split("{")[0].endswith(COUNTED)}
        return len(values) > 20 and not any(values.values())

    async def work() -> None:
        async with PipelineEngine.open(
            tiny_dir, EngineConfig(placement, replicas=replicas)
        ) as engine:
            hosts = len(engine.pids)
            assert capfd.readouterr().err.count("served 1 warm-up requests") == hosts
            assert untouched(engine)
            last = engine.pids[-1]
            assert last is not None
            os.kill(last, signal.SIGKILL)
            up = engine.pipelines[-1].supervisor
            while not up.restarts[-1]:
                await asyncio.sleep(0.01)
            assert capfd.readouterr().err.count("served 1 warm-up requests") == 1
            for _ in range(replicas):
                same(await collect(engine.generate(CHATS["text"], params=PARAMS)), want)

    run(work())
