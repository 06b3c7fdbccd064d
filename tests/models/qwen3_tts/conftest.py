from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.qwen3_tts.cases import write

Checkpoint = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def tts(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Tiny checkpoints by kind and size, each written once per run and shared by all workers."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    root = base / "tiny-tts"
    root.mkdir(exist_ok=True)

    def find(kind: str, size: str = "1b7") -> Path:
        with open(base / "tiny-tts.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = root / f"{kind}-{size}"
            return folder if (folder / "config.json").exists() else write(root, kind, size)

    return find
