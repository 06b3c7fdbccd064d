from pathlib import Path

import pytest
import torch

from stretto.models.qwen3_omni.load import Models, Source


@pytest.fixture(scope="session")
def models(tiny_dir: Path, device: torch.device) -> Models:
    return Models.open(Source.open(tiny_dir, device, torch.float32, progress=False))
