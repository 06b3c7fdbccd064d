"""On the trained checkpoint, too, text, codes and sound are those of `transformers`: greedy, and
with equal draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stretto import embedded
from stretto.models.qwen3_omni.load import Models, Source
from stretto.types import SamplingParams
from tests.models.qwen3_omni.greedy import (
    FRAMES,
    LIMITS,
    TEXT,
    LibraryNoise,
    check_greedy,
    codes,
    done,
    texts,
    wave,
)
from tests.oracle import PromptMaker, generate, load_oracle
from tests.prompts import KINDS, make
from tests.solo import CODE0, Options, Solo

CHECKPOINT = embedded.find()
pytestmark = [
    pytest.mark.skipif(CHECKPOINT is None, reason="the embedded model's weights are not here"),
]


@pytest.fixture(scope="module")
def trained() -> Models:
    assert CHECKPOINT is not None
    return Models.open(Source.open(CHECKPOINT, torch.device("cpu"), torch.float32, progress=False))


@pytest.fixture(scope="module")
def reference() -> Any:
    assert CHECKPOINT is not None
    return load_oracle(CHECKPOINT)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "multi-turn"])
def test_greedy_equals_the_reference(kind: str, trained: Models, reference: Any) -> None:
    check_greedy(kind, trained, reference)


@pytest.mark.parametrize("kind", ["text", "audio", "image", "video", "audio-in-video"])
def test_sampled_with_the_same_draws_equals_the_reference(
    kind: str, trained: Models, reference: Any
) -> None:
    """With the sampling that the checkpoint's generation_config gives."""
    prompt = make(kind, trained.config, seed=3)
    shipped = {
        "talker_temperature": 0.2,
        "talker_top_k": 20,
        "talker_top_p": 0.9,
        "talker_repetition_penalty": 1.0,
    }
    want = generate(reference, prompt, max_text=TEXT, max_frames=FRAMES + 1, seed=11, **shipped)
    first = replace(CODE0, temperature=0.2, top_k=20, top_p=0.9, repetition_penalty=1.0)
    sampled = replace(LIMITS, text=SamplingParams(temperature=1.0, top_k=50), code0=first)
    noise = LibraryNoise(11, trained.config.thinker.text.vocab_size, len(want.text))
    got = list(Solo(trained, noise=noise).run(prompt, sampled))
    assert texts(got) == want.text
    np.testing.assert_array_equal(codes(got), want.codes.numpy())
    np.testing.assert_allclose(wave(got), want.waveform.numpy(), atol=1e-5)


def test_a_whole_answer_equals_the_reference(trained: Models, reference: Any) -> None:
    assert CHECKPOINT is not None
    maker = PromptMaker.open(CHECKPOINT)
    prompt = maker.build([("user", ["What is two plus three?"])])
    want = generate(reference, prompt, max_text=32, max_frames=60, talker_repetition_penalty=1.0)
    plain = replace(Options(), code0=replace(CODE0, repetition_penalty=1.0)).greedy()
    got = list(Solo(trained).run(prompt, plain))
    assert texts(got) == want.text
    assert maker.tokenizer.decode(texts(got)) == "Two plus three is five."
    assert (done(got).text, done(got).audio) == ("stop", "stop")
    np.testing.assert_array_equal(codes(got), want.codes.numpy())
    np.testing.assert_allclose(wave(got), want.waveform.numpy(), atol=1e-5)
