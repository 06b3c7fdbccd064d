"""Fixtures every test may use: the tiny checkpoint, its configuration, the reference model, the
device."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

from stretto import cpu
from stretto.config.engine import EngineConfig, PoolSettings
from stretto.engine import request_manager
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Models, Source
from stretto.models.qwen3_omni.prompts import PromptBuilder, open_builder
from stretto.observe.logs import JsonLines, TextLines
from stretto.observe.stderr import QueuedStderr
from stretto.testing.qwen3_omni import write_tiny
from tests.oracle import PromptMaker, load_oracle

if TYPE_CHECKING:
    from tests.server.conftest import Running

# Tests compute in bfloat16. Decided before anything is computed; workers and hosts inherit the
# answer.
cpu.limit_onednn(os.environ)

# Exact on a GPU too: cuDNN would round float32 convolutions.
torch.backends.cudnn.allow_tf32 = False
# Tiny tensors: threads cost more than they give, and workers share the cores.
torch.set_num_threads(1)

# The same examples in every run, and no clock: the machine may be busy.
settings.register_profile("stretto", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("stretto")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Requests without a seed get the same ones in every run: engines of this process draw nothing
    by chance."""
    seeds = itertools.count(zlib.crc32(item.nodeid.encode()))
    request_manager.fresh_seed = lambda: next(seeds)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def logs_of_its_own() -> Iterator[None]:
    """A command that a test runs in this process writes its log to that test's stderr, and to no
    later one's."""
    root, hook = logging.getLogger(), sys.excepthook
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    level = root.level
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if isinstance(sys.stderr, QueuedStderr):
        sys.stderr.drain()
        sys.stderr = sys.__stderr__
    for handler in list(root.handlers):
        if isinstance(handler.formatter, TextLines | JsonLines):
            root.removeHandler(handler)
    root.setLevel(level)
    sys.excepthook = hook
    logging.captureWarnings(False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tests run the model: the CPU, or what STRETTO_TEST_DEVICE names."""
    return torch.device(os.environ.get("STRETTO_TEST_DEVICE", "cpu"))


EVEN = {
    "talker_config": {
        "text_config": {
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        "code_predictor_config": {"hidden_size": 64},
    }
}
"""Sizes that the GPU kernels take. With STRETTO_TEST_SIZES=even STRETTO_KERNELS=force
STRETTO_TEST_DEVICE=cuda, tests of models and stages run through the kernels, in float32, against
the same oracles."""


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint of seed 0, written once per run and shared by all workers."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker has its own folder inside the run's
    directory = base / "tiny-checkpoint"
    with open(base / "tiny-checkpoint.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "config.json").exists():  # written last
            write_tiny(
                directory, changes=EVEN if os.environ.get("STRETTO_TEST_SIZES") == "even" else None
            )
    return directory


@pytest.fixture(scope="session")
def roomy_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with room for many pictures: prompts that take seconds to build are not
    refused early."""
    path = tmp_path_factory.mktemp("roomy")
    for file in tiny_dir.iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((tiny_dir / "config.json").read_text())
    config["thinker_config"]["text_config"]["max_position_embeddings"] = 1 << 20
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def real_server(tiny_dir: Path) -> Iterator[Running]:
    """A server with the engine and the tiny model, its host and its prompt worker in processes. All
    tests of a session share it: they leave it as it was."""
    from tests.server.real_engine import served

    with served(tiny_dir, EngineConfig(prompts=PoolSettings())) as it:
        yield it.running


@pytest.fixture(scope="session")
def tiny_config(tiny_dir: Path) -> OmniConfig:
    return OmniConfig.read(tiny_dir)


@pytest.fixture(scope="session")
def models(tiny_dir: Path, device: torch.device) -> Models:
    """The tiny weights in this process, float32, for the plain driver."""
    return Models.open(Source.open(tiny_dir, device, torch.float32, progress=False))


@pytest.fixture(scope="session")
def builder(tiny_dir: Path) -> PromptBuilder:
    return open_builder(tiny_dir)


@pytest.fixture(scope="session")
def oracle(tiny_dir: Path, device: torch.device) -> Any:
    """The reference model with the tiny weights, float32, eager."""
    return load_oracle(tiny_dir, device)


@pytest.fixture(scope="session")
def prompts(tiny_dir: Path) -> PromptMaker:
    """Builds prompts with the tiny checkpoint's tokenizer."""
    return PromptMaker.open(tiny_dir)
