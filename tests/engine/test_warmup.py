"""The engine sends ordinary requests through its pipelines before it is ready, wherever their
stages are. Clients' answers are as without them, and its counts begin behind them."""

import logging
from pathlib import Path

import pytest

from stretto.config.engine import EngineConfig
from stretto.config.placement import Placement
from stretto.engine.engine import PipelineEngine
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from tests.engine.common import CHATS, collect, come_to, expected, run, same
from tests.pipeline import ONE_HOST, PROCESSES, STAGES

PARAMS = Params(max_text_tokens=4, max_frames=4, seed=3, want_codes=True)
FRAMES = 2.0


@pytest.mark.parametrize(("placement", "replicas"), [(ONE_HOST, 2), (PROCESSES, 1)])
def test_each_pipeline_is_warm_before_the_engine_is_ready(
    tiny_dir: Path,
    models: Models,
    placement: Placement,
    replicas: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    builder = PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))
    want = expected(models, builder, CHATS["text"], PARAMS)

    async def work() -> None:
        config = EngineConfig(placement, replicas=replicas)
        async with PipelineEngine.open(tiny_dir, config) as engine:
            assert caplog.text.count("served 1 warm-up requests") == replicas
            counts = {k: v for k, v in engine.metrics().items() if "_engine_" in k}
            assert not any(counts.values())
            values = await come_to(engine, lambda v: True)  # of the first pipeline
            assert values['stretto_stage_frames_total{stage="code2wav"}'] == FRAMES
            for _ in range(replicas):
                same(await collect(engine.generate(CHATS["text"], params=PARAMS)), want)
            assert engine.metrics()["stretto_engine_requests_total"] == replicas

    with caplog.at_level(logging.INFO, "stretto.engine.warmup"):
        run(work())


def test_a_warm_up_that_fails_does_not_fail_the_start(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stretto.engine.warmup.LIMIT_S", 0.0)

    async def work() -> None:
        async with PipelineEngine.open(tiny_dir, EngineConfig()) as engine:
            assert "a warm-up request failed: it was not over in 0 s" in caplog.text
            assert list(engine.progress.stages) == list(STAGES)
            assert not engine.requests.running
            await collect(engine.generate(CHATS["text"], params=PARAMS))

    run(work())
