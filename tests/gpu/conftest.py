from pathlib import Path

import pytest
import torch

from stretto.models.qwen3_omni.load import Models, Source
from stretto.testing.qwen3_omni import write_tiny
from tests.conftest import EVEN


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    return torch.device("cuda")


@pytest.fixture(scope="session")
def gpu_models(tiny_dir: Path, cuda: torch.device) -> Models:
    return Models.open(Source.open(tiny_dir, cuda, torch.float32, progress=False))


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in sizes that the kernels take."""
    directory = tmp_path_factory.mktemp("even") / "tiny"
    write_tiny(directory, changes=EVEN)
    return directory
