"""Imports point down only: what must stay light or ignorant is checked in a fresh interpreter."""

import subprocess
import sys

import pytest


def loaded(module: str) -> set[str]:
    code = f"import sys, {module}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("stretto.stage.scheduler.scheduler", {"torch"}),
        ("stretto.models.qwen3_omni.prompts", {"torch", "transformers"}),
        ("stretto.orchestrator.engine", {"torch", "transformers", "stretto.stage.stage"}),
        ("stretto.server.app", {"torch", "transformers", "stretto.stage"}),
        ("stretto.cli", {"torch", "transformers"}),
        ("stretto.cpu", {"torch"}),
        ("stretto.client.command", {"torch"}),
        ("stretto.connector.shm", {"stretto.models.qwen3_omni.thinker", "stretto.stage.stage"}),
        ("stretto.stage.host", {"transformers", "stretto.server"}),
        ("stretto.kernels.paged", {"stretto.models", "stretto.stage"}),
    ],
)
def test_stays_out(module: str, never: set[str]) -> None:
    assert not loaded(module) & never
