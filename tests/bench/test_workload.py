"""Workloads, and what becomes of them."""

from pathlib import Path

import pytest

from bench.harness.workload import WORKLOADS, Question, Workload
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.prompts import PromptBuilder


def tokens(builder: PromptBuilder, text: str) -> int:
    return len(builder.tokenizer.encode(text)) if text else 0


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_prompts_differ_and_lengths_are_fixed(workload: Workload, tiny_dir: Path) -> None:
    builder = PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))
    made = [workload.messages(i, lambda text: tokens(builder, text)) for i in (0, 1, 1)]
    assert made[1] == made[2]
    prompts = [builder.build(m) for m in made[:2]]
    # Requests share what the workload says they share, and their own part differs from the start.
    text = [next(p["text"] for p in m[-1]["content"] if p["type"] == "text") for m in made[:2]]
    assert text[0].split()[0] != text[1].split()[0]
    for words in text:
        assert tokens(builder, words) == workload.prompt.text_tokens
    shared = next(
        i for i, (a, b) in enumerate(zip(prompts[0].ids, prompts[1].ids, strict=False)) if a != b
    )
    pads = 0 if not prompts[0].audios and not prompts[0].images else len(prompts[0].ids)
    assert workload.prompt.system_tokens <= shared <= workload.prompt.system_tokens + 16 + pads
    assert len(prompts[0].audios) == bool(workload.prompt.audio_s)
    assert len(prompts[0].images) == bool(workload.prompt.image)
    params = workload.params(7)
    assert (params.min_frames, params.max_frames) == (workload.frames, workload.frames)
    assert params.ignore_eos
    assert params.max_text_tokens == workload.text_tokens


def test_sound_and_picture_differ_by_request() -> None:
    workload = Workload("x", "", Question(audio_s=1.0, image=(64, 48)), 4, 4)
    first, second = (workload.messages(i, len)[0]["content"] for i in (0, 1))
    assert first[0] != second[0]
    assert first[1] != second[1]
