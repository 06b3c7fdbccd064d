"""One request through all stages, against the reference; then the same requests together; then the
edges."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stretto.errors import Invalid, TooLong
from stretto.kernels.reference.sampling import Noise
from stretto.models.qwen3_omni.load import Models
from stretto.preprocess.prompt import Prompt
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
from tests.oracle import generate
from tests.prompts import KINDS, Maker, make
from tests.solo import Audio, Done, Frame, Options, Solo, TextToken


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_the_reference(kind: str, models: Models, oracle: Any) -> None:
    check_greedy(kind, models, oracle)


@pytest.mark.parametrize("kind", ["text", "audio", "image", "multi-turn"])
def test_sampled_with_the_same_draws_equals_the_reference(
    kind: str, models: Models, oracle: Any, device: torch.device
) -> None:
    if device.type != "cpu":
        pytest.skip("the reference draws from the CPU's generator")
    prompt = make(kind, models.config, seed=3)
    want = generate(oracle, prompt, max_text=TEXT, max_frames=FRAMES + 1, seed=11)
    sampled = replace(LIMITS, text=SamplingParams(temperature=1.0, top_k=50))
    noise: Noise = LibraryNoise(11, models.config.thinker.text.vocab_size, len(want.text))
    got = list(Solo(models, noise=noise).run(prompt, sampled))
    assert texts(got) == want.text
    np.testing.assert_array_equal(codes(got), want.codes.numpy())
    np.testing.assert_allclose(wave(got), want.waveform.numpy(), atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_chunked_prompt_gives_the_same_answer(chunk: int, models: Models) -> None:
    for kind in ("audio+image", "audio-in-video"):
        prompt = make(kind, models.config)
        options = LIMITS.seeded(4)
        whole = list(Solo(models).run(prompt, options))
        cut = list(Solo(models).run(prompt, replace(options, prefill_chunk=chunk)))
        assert texts(cut) == texts(whole)
        np.testing.assert_array_equal(codes(cut), codes(whole))
        np.testing.assert_allclose(wave(cut), wave(whole), atol=1e-5)


@pytest.mark.parametrize("size", [3, 8])
def test_batched_equals_alone(size: int, models: Models) -> None:
    """Ragged neighbours: other kinds, lengths, samplers, chunk sizes; some end early, one does not
    speak."""
    kinds = [KINDS[i % len(KINDS)] for i in range(size)]
    prompts = [make(k, models.config, seed=i) for i, k in enumerate(kinds)]
    options = [
        replace(
            Options().seeded(i) if i % 2 else Options().greedy(),
            text=SamplingParams(0.8 * (i % 2), top_p=0.9, seed=i, repetition_penalty=[1.0, 1.1,
            1.2][i % 3]),
            max_text_tokens=4 + 2 * i, max_frames=6 + 3 * (i % 4), prefill_chunk=[None, 5,
            11][i % 3], speak=i != 2,
        )
        for i in range(size)
    ]  # fmt: skip
    together = list(Solo(models).run(prompts, options))
    for i in range(size):
        alone = list(Solo(models, block_size=8).run(prompts[i], options[i]))
        assert texts(together, i) == texts(alone)
        np.testing.assert_array_equal(codes(together, i), codes(alone))
        np.testing.assert_allclose(wave(together, i), wave(alone), atol=1e-5)
        assert replace(done(together, i), request=0) == done(alone)
        assert (len(codes(alone)) > 0) == options[i].speak


def test_k_text_tokens_give_k_frames(models: Models) -> None:
    """While text is still coming, the k-th frame is out before text token k + 1 is known, and
    sounds at once."""
    events = list(Solo(models).run(make("text", models.config), LIMITS.greedy()))
    spoken, text, frames = len(texts(events)) - 1, 0, 0
    assert spoken >= 3
    for e in events:
        if isinstance(e, TextToken):
            assert frames == text  # so far, a frame per token
            text += 1
        elif isinstance(e, Frame):
            frames += 1
            assert frames <= text or text > spoken
    first = next(e for e in events if isinstance(e, Audio))
    c = models.config.code2wav
    assert len(first.samples) == c.samples_per_frame - c.samples_dropped
    kinds = [type(e) for e in events[:3]]
    assert kinds == [TextToken, Frame, Audio]


def test_lengths_and_finish_reasons(models: Models) -> None:
    prompt = make("text", models.config)
    c = models.config.code2wav
    events = list(
        Solo(models).run(prompt, replace(LIMITS, max_text_tokens=3, max_frames=5).greedy())
    )
    assert len(texts(events)) == 3
    assert len(codes(events)) <= 5
    assert len(wave(events)) == len(codes(events)) * c.samples_per_frame - c.samples_dropped
    assert done(events).text == "length"
    silent = list(Solo(models).run(prompt, replace(LIMITS, speak=False).greedy()))
    assert not [e for e in silent if isinstance(e, Frame | Audio)]
    assert done(silent).audio is None
    assert texts(silent)[:3] == texts(events)


def force(token: int) -> Noise:
    """Noise that makes `token` certain wherever it is in the vocabulary."""

    def noise(seeds: torch.Tensor, draw: torch.Tensor, size: int) -> torch.Tensor:
        e = torch.ones(len(seeds), size, device=seeds.device)
        if token < size:
            e[:, token] = 1e-30
        return e

    return noise


HOT = SamplingParams(temperature=100.0)


def test_an_empty_answer_is_silent(models: Models) -> None:
    options = replace(LIMITS, text=HOT)
    events = list(
        Solo(models, noise=force(models.config.tokens.im_end)).run(
            make("text", models.config), options
        )
    )
    assert texts(events) == [models.config.tokens.im_end]
    assert len(codes(events)) == len(wave(events)) == 0
    assert done(events) == Done(0, "stop", "stop")


def test_an_immediate_codec_end_is_silent(models: Models) -> None:
    options = replace(LIMITS.greedy(), code0=HOT)
    events = list(
        Solo(models, noise=force(models.config.talker.codec.eos)).run(
            make("text", models.config), options
        )
    )
    assert len(texts(events)) > 1
    assert len(codes(events)) == len(wave(events)) == 0
    assert done(events).audio == "stop"


def test_no_user_turn_is_answered(models: Models) -> None:
    m = Maker(models.config)
    m.turn("system", m.words(6))
    events = list(Solo(models).run(m.prompt(), LIMITS.greedy()))
    assert len(texts(events)) > 0
    assert len(codes(events)) > 0


def test_media_outside_of_the_last_turn(models: Models, oracle: Any) -> None:
    m = Maker(models.config, 5)
    m.turn("user", m.audio(120), m.image(4, 4)).turn("assistant", m.words(5)).turn(
        "user", m.words(4)
    )
    want = generate(oracle, m.prompt(), max_text=TEXT, max_frames=FRAMES + 1)
    got = list(Solo(models).run(m.prompt(), LIMITS.greedy()))
    assert texts(got) == want.text
    np.testing.assert_array_equal(codes(got), want.codes.cpu().numpy())


def test_bad_requests_are_refused_before_anything_runs(models: Models) -> None:
    solo, prompt = Solo(models), make("text", models.config)
    with pytest.raises(Invalid, match="voice"):
        solo.run(prompt, Options(voice="nobody"))
    with pytest.raises(Invalid, match="empty"):
        solo.run(Prompt(()))
    with pytest.raises(TooLong, match="positions"):
        solo.run(prompt, Options(max_text_tokens=models.config.thinker.text.max_positions))
    with pytest.raises(Invalid, match="max_frames"):
        Options(max_frames=0)
    with pytest.raises(Invalid, match="at least one prompt"):
        solo.run([])
