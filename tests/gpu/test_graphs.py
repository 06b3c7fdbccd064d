"""On a GPU: captured steps give what eager ones give, and no step waits for the device behind the
loop's back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from stretto.models.qwen3_omni.load import Models
from stretto.stage.request import Reason
from stretto.stage.vocoder import CodecConfig, VocoderCore
from stretto.types import RequestId, SamplingParams
from tests.prompts import make
from tests.solo import Options
from tests.stage.desk import CONFIG, Desk
from tests.stage.stepping import idle, in_flight, poll_core, wait_for_device
from tests.stage.vocoder.test_core import Ears, codes

pytestmark = pytest.mark.gpu
SIZE = 6


def options(i: int) -> Options:
    base = Options().seeded(i) if i % 2 else Options().greedy()
    text = SamplingParams(temperature=0.9 * (i % 2), top_k=40, seed=i)
    return replace(base, text=text, max_text_tokens=20 + i, max_frames=12 + i)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def think(models: Models, graphs: bool, depth: int = 2) -> Desk:
    desk = Desk(
        models, "thinker", replace(CONFIG, overlap_depth=depth, max_context=256), graphs=graphs
    )
    for i in range(SIZE):
        desk.think(str(i), make("text", models.config, seed=i), options(i), stop_ids=frozenset())
    desk.run()
    return desk


def talk(models: Models, graphs: bool, depth: int = 2) -> Desk:
    desk = Desk(
        models, "talker", replace(CONFIG, overlap_depth=depth, max_context=256), graphs=graphs
    )
    for i in range(SIZE):
        desk.speak(str(i), make("text", models.config, seed=i), options(i), stop_ids=frozenset())
        for token in range(100, 106 + i):
            desk.feed(str(i), token)
        desk.feed(str(i), None)
    desk.run()
    return desk


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_thinker_graph_equals_eager(depth: int, gpu_models: Models) -> None:
    assert think(gpu_models, True, depth).tokens == think(gpu_models, False, 1).tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_talker_graph_equals_eager(depth: int, gpu_models: Models) -> None:
    assert talk(gpu_models, True, depth).rows == talk(gpu_models, False, 1).rows


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["thinker", "talker"])
def test_steps_do_not_wait(kind: str, graphs: bool, gpu_models: Models) -> None:
    """Launching prompts and decodes never waits; only retiring does, and only for its own event."""
    desk = Desk(gpu_models, kind, replace(CONFIG, max_context=256), graphs=graphs)
    for i in range(SIZE):
        prompt = make("text", gpu_models.config, seed=i)
        if kind == "thinker":
            desk.think(str(i), prompt, options(i), stop_ids=frozenset())
        else:
            desk.speak(str(i), prompt, options(i), stop_ids=frozenset())
            for token in range(100, 110):
                desk.feed(str(i), token)
    torch.cuda.synchronize()
    runner, stage = desk.stage.runner, desk.stage
    launch = runner.launch

    def watched(*args):
        with no_waiting():
            return launch(*args)

    runner.launch = watched
    for _ in range(12):
        desk.poll()
        wait_for_device()
    assert not desk.errors
    assert stage.stats.failed == 0
    assert stage.stats.tokens >= 12


def test_vocoder_graph_equals_eager(gpu_models: Models) -> None:
    config = CodecConfig(slots=4, frame_sizes=(1, 2, 4), stream_sizes=(1, 2, 4))
    heard = []
    for graphs in (False, True):
        ears = Ears()
        stage = VocoderCore(gpu_models.code2wav, config)
        if graphs:
            stage.capture()
        rng = np.random.default_rng(0)
        for i in range(6):
            stage.open(RequestId(str(i)))
        left = {i: codes(gpu_models, 9, i).cuda() for i in range(6)}
        torch.cuda.synchronize()
        while left:
            for i in list(left):
                n = int(rng.integers(0, 4))
                part, left[i] = left[i][:n], left[i][n:]
                stage.push(RequestId(str(i)), part, None if len(left[i]) else Reason.STOP)
                if not len(left[i]):
                    del left[i]
            poll_core(stage, ears)
        while poll_core(stage, ears) or in_flight(stage):
            wait_for_device()
        assert idle(stage)
        heard.append([ears.sound(str(i)) for i in range(6)])
        for i in range(6):
            want = gpu_models.code2wav.decode(codes(gpu_models, 9, i).cuda()).cpu().numpy()
            np.testing.assert_allclose(heard[-1][i], want, atol=2e-5)
