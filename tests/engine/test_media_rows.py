"""Rows of a prompt's media that the talker needs: only requests that are spoken pay for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from stretto.config.engine import HostSettings
from stretto.messages.requests import Ended
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.params import RESIDUAL
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.preprocess.packed_prompt import pack
from stretto.preprocess.prompt import Prompt
from stretto.stage.ar import CoreOutput
from stretto.types import GREEDY, RequestId
from tests.engine.common import HandDriven, picture, say, sound
from tests.pipeline import STAGES, announcement
from tests.solo import CODE0

GREEDILY = [replace(s, temperature=0.0) for s in (GREEDY, CODE0, RESIDUAL)]
WORDS = (
    "These are enough words to fill some blocks of the cache, of sixteen tokens each, and a few "
    "more than that."
)
NUMBERS = count()


class Asked(HandDriven):
    """Notes the media rows that leave the thinker's core."""

    def __init__(self, model: Path) -> None:
        super().__init__(model, HostSettings())
        core = self.host.stages["thinker"].core
        self.rows, poll = 0, core.poll

        def noted() -> list[CoreOutput]:
            found = poll()
            self.rows += sum(len(c.media.places) for c in found if c.media is not None)
            return found

        core.poll = noted

    def ask(self, prompt: Prompt, speak: bool) -> tuple[int, int]:
        """Media rows of a whole answer, and tokens of its prompt that were found in the thinker's
        cache."""
        self.rows = 0
        self.reports.clear()
        packed, id = pack(prompt), RequestId(f"r{next(NUMBERS)}")
        self.host.handle(
            announcement(id, packed, speak, None, *GREEDILY, 2, 2), packed.feature_bytes()
        )
        stages = STAGES if speak else STAGES[:1]
        while len(ended := {m.stage: m for m, _ in self.reports if isinstance(m, Ended)}) < len(
            stages
        ):
            assert self.host.loop.round(), "nothing to do, but the answer is not complete"
        return self.rows, ended["thinker"].cached


@pytest.fixture
def asked(tiny_dir: Path) -> Iterator[Asked]:
    made = Asked(tiny_dir)
    yield made
    made.host.close()


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_media_rows_are_handed_out_only_to_be_spoken_of(
    asked: Asked, tiny_dir: Path, kind: str
) -> None:
    config = OmniConfig.read(tiny_dir)
    media = picture() if kind == "image" else sound()
    prompt = PromptBuilder.open(tiny_dir, config).build(
        [{"role": "user", "content": [media, say(WORDS)]}]
    )
    pads = sum(i in config.tokens.media_pads for i in prompt.ids)
    whole = (len(prompt.ids) - 1) // 16 * 16
    assert asked.ask(prompt, speak=False) == (0, 0)
    assert asked.ask(prompt, speak=False) == (0, whole), (
        "what nobody needs the rows of is found in the cache"
    )
    rows, cached = asked.ask(prompt, speak=True)
    assert rows == pads > 0, "one that is spoken has them made"
    assert cached < whole
    assert asked.ask(prompt, speak=True) == (pads, whole), "and the next one finds them"
    assert asked.ask(prompt, speak=False) == (0, whole), "which is nothing to one that is not"
