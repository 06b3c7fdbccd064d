"""Hosts that die, and how the log, the health report and the metrics show it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from stretto.config.engine import EngineConfig, HostSettings
from stretto.engine import engine as engine_module
from stretto.engine.engine import PipelineEngine
from stretto.engine.supervisor import FIRST_STARTS
from stretto.errors import StageDead, StrettoError
from tests.engine.common import run

STAGES = "thinker, talker, code2wav"


async def until(fulfilled) -> None:
    while not fulfilled():
        await asyncio.sleep(0.01)


def test_a_host_that_never_comes_up_is_given_up(
    tiny_dir: Path, tmp_path: Path, monkeypatch, caplog
) -> None:
    """Killed by the system, say, for its memory. (Here it kills itself.)"""
    starts = tmp_path / "starts"
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho start >> {starts}\nkill -9 $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    async def work() -> None:
        engine = PipelineEngine(tiny_dir, EngineConfig())
        try:
            with pytest.raises(StageDead, match=r"killed by SIGKILL .*\(3 tries\)"):
                await engine.start()
            assert engine.progress.state == "dead"
            assert "killed by SIGKILL" in str(engine.progress.error)
        finally:
            await engine.close()

    run(work())
    assert len(starts.read_text().split()) == FIRST_STARTS
    assert all(
        f"(stages {STAGES})" in r.getMessage() for r in caplog.records if "died" in r.getMessage()
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_torch_cannot_use_is_tried_once(tiny_dir: Path, monkeypatch, caplog) -> None:
    """A build of PyTorch without CUDA beside a GPU, or no driver: a permanent error that only the
    host can find."""
    monkeypatch.setattr(engine_module, "cards", lambda: ("0",))

    async def work() -> None:
        engine = PipelineEngine(tiny_dir, EngineConfig(host=HostSettings(device="cuda")))
        try:
            with pytest.raises(
                StrettoError, match=r"cannot be used: PyTorch .*; --device cpu runs without a GPU"
            ):
                await engine.start()
            assert engine.progress.state == "dead"
            assert "cannot be used: PyTorch" in str(engine.progress.error)
        finally:
            await engine.close()

    run(work())
    assert "died" not in caplog.text  # and nothing was started again


def test_a_host_that_dies_is_named_and_its_return_is_told(tiny_dir: Path, caplog) -> None:
    caplog.set_level(logging.INFO)

    async def work() -> None:
        async with PipelineEngine.open(tiny_dir, EngineConfig()) as engine:
            assert engine.progress.error is None
            series = 'stretto_host_restarts_total{host="thinker+talker+code2wav"}'
            assert engine.metrics()[series] == 0
            os.kill(engine.pids[0] or 0, signal.SIGTERM)
            await until(
                lambda: engine.progress.state == "dead" and "SIGTERM" in str(engine.progress.error)
            )
            assert (
                engine.progress.error
                == f"host p0.0 died: it was killed by SIGTERM (stages {STAGES})"
            )
            await until(lambda: engine.metrics()[series] == 1)
            assert engine.progress.state == "ready"
            assert engine.progress.error is None

    run(work())
    told = [r.getMessage() for r in caplog.records if r.name == "stretto.engine.supervisor"]
    assert "killed by SIGTERM" in told[0]
    assert "host p0.0 is back after" in told[1]
