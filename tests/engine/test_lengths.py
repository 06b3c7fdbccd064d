"""Least lengths, to the token and to the frame: with a model that ends as soon as it may, it ends
right there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.config.engine import HostSettings
from stretto.messages.requests import Ended, Pcm, Text
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.params import RESIDUAL
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.preprocess.packed_prompt import pack
from stretto.types import GREEDY, RequestId
from tests.engine.common import CHATS, HandDriven
from tests.pipeline import announcement
from tests.solo import CODE0

SURELY = 1e6  # a logit


def hurry(driven: HandDriven, config: OmniConfig) -> None:
    """Both models want nothing but the end."""
    thinker, talker = driven.host.stages["thinker"].model, driven.host.stages["talker"].model
    logits, frame = thinker.logits, talker.frame

    def wanting(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = logits(hidden)
        out[:, config.tokens.im_end] = SURELY
        return out

    def ending(*given: Any, hold: Any) -> Any:
        def held(scores: torch.Tensor) -> None:
            scores[:, config.talker.codec.eos] = SURELY
            hold(scores)

        return frame(*given, hold=held)

    thinker.logits, talker.frame = wanting, ending


@pytest.mark.parametrize(("tokens", "frames"), [(1, 0), (2, 1), (3, 2), (6, 9), (9, 9)])
def test_the_end_comes_right_after_what_must_come(tiny_dir: Path, tokens: int, frames: int) -> None:
    config = OmniConfig.read(tiny_dir)
    packed = pack(PromptBuilder.open(tiny_dir, config).build(CHATS["text"]))
    greedy = [replace(s, temperature=0.0) for s in (GREEDY, CODE0, RESIDUAL)]
    driven = HandDriven(tiny_dir, HostSettings())
    try:
        hurry(driven, config)
        least = {"min_text_tokens": tokens, "min_frames": frames}
        driven.answer(
            announcement(RequestId("r"), packed, True, None, *greedy, 20, 20, **least),
            packed.feature_bytes(),
        )
        said = [i for m, _ in driven.reports if isinstance(m, Text) for i in m.ids]
        assert len(said) == tokens + 1
        assert said.index(config.tokens.im_end) == tokens
        assert max([m.frames for m, _ in driven.reports if isinstance(m, Pcm)], default=0) == frames
        ended = {m.stage: m.reason for m, _ in driven.reports if isinstance(m, Ended)}
        assert ended == {"thinker": "stop", "talker": "stop", "code2wav": "stop"}
    finally:
        driven.host.close()
