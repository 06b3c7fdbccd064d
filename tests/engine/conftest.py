from pathlib import Path

import pytest

from stretto.models.qwen3_omni.load import Models, Source


@pytest.fixture(scope="session")
def models(tiny_dir: Path) -> Models:
    """The same weights in this process, for the plain driver."""
    return Models.open(Source.open(tiny_dir, progress=False))
