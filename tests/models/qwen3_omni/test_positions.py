"""Positions against the reference model's own, for all mixes of modalities."""

from typing import Any

import numpy as np
import pytest
import torch

from stretto.errors import Invalid
from stretto.models.qwen3_omni.bridge import talker_prompt, user_places
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.positions import rope_positions
from stretto.preprocess.prompt import Prompt
from tests.prompts import KINDS, Maker, make


def ours(prompt: Prompt, config: OmniConfig) -> tuple[np.ndarray, float]:
    t = config.thinker
    return rope_positions(
        prompt.ids, config.tokens, t.vision.merge, t.positions_per_second, prompt.images,
        prompt.videos,
        prompt.audio_in_video,
    )  # fmt: skip


def theirs(model: Any, prompt: Prompt) -> tuple[np.ndarray, float]:
    grids = {
        "image_grid_thw": torch.tensor([p.grid for p in prompt.images]) if prompt.images else None,
        "video_grid_thw": torch.tensor([p.grid for p in prompt.videos]) if prompt.videos else None,
        "second_per_grids": torch.tensor([p.seconds_per_grid for p in prompt.videos])
        if prompt.videos
        else None,
        "audio_seqlens": torch.tensor([a.mel.shape[1] for a in prompt.audios])
        if prompt.audios
        else None,
    }
    ids = torch.tensor([prompt.ids])
    positions, _ = model.thinker.get_rope_index(
        ids, attention_mask=torch.ones_like(ids), use_audio_in_video=prompt.audio_in_video, **grids
    )
    return positions[:, 0].numpy(), float(positions.max()) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_equal_the_reference(kind: str, tiny_config: OmniConfig, oracle: Any) -> None:
    prompt = make(kind, tiny_config)
    got, nxt = ours(prompt, tiny_config)
    want, after = theirs(oracle, prompt)
    np.testing.assert_array_equal(got, want)
    assert nxt == after


@pytest.mark.parametrize("seed", range(12))
def test_random_mixes_equal_the_reference(seed: int, tiny_config: OmniConfig, oracle: Any) -> None:
    rng = np.random.default_rng(seed)
    m = Maker(tiny_config, seed)
    sizes = lambda: (2 * int(rng.integers(1, 5)), 2 * int(rng.integers(1, 5)))  # noqa: E731
    for _ in range(int(rng.integers(1, 4))):
        parts: list[list[int]] = []
        for _ in range(int(rng.integers(1, 5))):
            pick = rng.integers(0, 4)
            if pick == 0:
                parts.append(m.words(int(rng.integers(1, 9))))
            elif pick == 1:
                parts.append(m.audio(int(rng.integers(20, 400))))
            elif pick == 2:
                parts.append(m.image(*sizes()))
            else:
                parts.append(m.video(int(rng.integers(1, 4)), *sizes(), float(rng.uniform(0.2, 2))))
        m.turn("user", *parts)
    prompt = m.prompt()
    if not (prompt.images or prompt.videos):
        return  # the reference then counts up from zero, as the next test says
    np.testing.assert_array_equal(ours(prompt, tiny_config)[0], theirs(oracle, prompt)[0])


@pytest.mark.parametrize(
    ("seconds", "frames"), [(0.4, 500), (2.0, 60), (1.0, 100), (0.1, 700), (1.7, 333)]
)
def test_merged_sound_tracks_equal_the_reference(
    seconds: float, frames: int, tiny_config: OmniConfig, oracle: Any
) -> None:
    m = Maker(tiny_config)
    m.turn("user", m.words(3), m.video_with_sound(4, 4, 6, seconds, frames), m.words(5))
    prompt = m.prompt()
    got, nxt = ours(prompt, tiny_config)
    want, after = theirs(oracle, prompt)
    np.testing.assert_array_equal(got, want)
    assert nxt == after


def test_text_and_audio_count_up(tiny_config: OmniConfig) -> None:
    for kind in ("text", "audio", "multi-turn"):
        prompt = make(kind, tiny_config)
        got, nxt = ours(prompt, tiny_config)
        np.testing.assert_array_equal(got, np.broadcast_to(np.arange(len(prompt.ids)), got.shape))
        assert nxt == len(prompt.ids)


def test_a_prompt_that_ends_inside_a_block_is_refused(tiny_config: OmniConfig) -> None:
    prompt = make("image", tiny_config)
    cut = prompt.ids.index(tiny_config.tokens.image_pad) + 3
    t = tiny_config.thinker
    with pytest.raises(Invalid, match="media block"):
        rope_positions(
            prompt.ids[:cut],
            tiny_config.tokens,
            t.vision.merge,
            t.positions_per_second,
            prompt.images,
        )


def test_the_talker_sees_user_turns_only(tiny_config: OmniConfig) -> None:
    m = Maker(tiny_config)
    first, answer, second = m.words(4), m.words(5), m.words(3)
    m.turn("system", m.words(6)).turn("user", first).turn("assistant", answer).turn("user", second)
    prompt = m.prompt()
    seen = [prompt.ids[p] for p in user_places(prompt.ids, tiny_config.tokens)]
    t = tiny_config.tokens
    opening = [t.im_start, t.user, prompt.ids[2]]
    assert seen == [
        *opening,
        *first,
        t.im_end,
        prompt.ids[2],
        *opening,
        *second,
        t.im_end,
        prompt.ids[2],
    ]


def test_unknown_voice_and_unfinished_prompt_are_refused(tiny_config: OmniConfig) -> None:
    prompt = make("text", tiny_config)
    with pytest.raises(Invalid, match="nobody") as e:
        talker_prompt(prompt, tiny_config, "nobody")
    assert e.value.param == "voice"
    assert (
        talker_prompt(prompt, tiny_config, "ETHAN").speaker == tiny_config.talker.speakers["ethan"]
    )
    with pytest.raises(Invalid, match="assistant"):
        talker_prompt(Prompt(prompt.ids[:-3]), tiny_config)
