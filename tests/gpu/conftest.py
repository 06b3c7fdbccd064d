from pathlib import Path

import pytest
import torch

from stretto.models.qwen3_omni.load import Models, Source


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    return torch.device("cuda")


@pytest.fixture(scope="session")
def gpu_models(tiny_dir: Path, cuda: torch.device) -> Models:
    return Models.open(Source.open(tiny_dir, cuda, torch.float32, progress=False))
