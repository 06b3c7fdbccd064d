"""Sound end to end: the samples that a client gets over HTTP, from hosts in processes of their own,
beside those of the offline model.

In float32 with the kernels off they are the same, text and codes too. In bfloat16 a close call may
tip either way, so the codes that were chosen are decoded again: by the reference in float32, and
(for the bound) by the reference in bfloat16."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stretto.config.engine import DType, EngineConfig, HostSettings
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.load import Models, Source
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params
from tests.engine.answer_recorder import AnswerRecorder
from tests.engine.common import CHATS, expected
from tests.gpu.onehost import kernels
from tests.oracle import load_oracle
from tests.rows import row_errors
from tests.server.real_engine import Served, served

TEXT, FRAMES, SEED = 10, 14, 5
STEP = 1 / 32767


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(str(request.param))


@contextmanager
def server(
    directory: Path, device: torch.device, dtype: DType
) -> Iterator[tuple[Served, AnswerRecorder]]:
    """With pools of a fixed size: other tests are on the device."""
    host = HostSettings(
        device=device.type, dtype=dtype, block_size=8, blocks={"thinker": 96, "talker": 96},
        max_rows=2, max_context=256,
    )  # fmt: skip
    engine = AnswerRecorder(directory, EngineConfig(host=host))
    engine.answers = []
    with served(engine) as it:
        yield it, engine


def samples_of(it: Served, messages: list[dict[str, Any]], **more: Any) -> np.ndarray:
    """As a client gets them: 16 bits each."""
    body = it.chat(
        messages, modalities=["text", "audio"], audio={"format": "pcm16"}, seed=SEED,
        max_tokens=TEXT, max_audio_frames=FRAMES, **more,
    )  # fmt: skip
    data = base64.b64decode(body["choices"][0]["message"]["audio"]["data"])
    return np.frombuffer(data, "<i2").astype(np.int32)


@pytest.mark.parametrize("chat", ["text", "audio"])
def test_float32_is_the_offline_answer(
    chat: str, tiny_dir: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit of a sample: rounding to 16 bits may tip where two sums differ in their
    last."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # libraries would round float32 products
    with kernels("off"), server(tiny_dir, device, "float32") as (it, engine):
        got = samples_of(it, CHATS[chat])
        models = Models.open(Source.open(tiny_dir, device, torch.float32, progress=False))
        builder = PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))
        params = Params(max_text_tokens=TEXT, max_frames=FRAMES, seed=SEED)
        want = expected(models, builder, CHATS[chat], params)
        [answer] = engine.answers
    assert answer.ids == want.ids
    assert answer.codes == want.codes
    wanted = np.rint(np.clip(want.samples, -1, 1) / STEP).astype(np.int32)
    assert len(got) == len(wanted)
    assert np.abs(got - wanted).max() <= 1


def test_bfloat16_is_within_the_references_own_error(directory: Path, device: torch.device) -> None:
    """On a GPU through the fused kernels and captured steps."""
    mode = "force" if device.type == "cuda" else "off"
    with kernels(mode), server(directory, device, "bfloat16") as (it, engine):
        told = samples_of(it, CHATS["text"], ignore_eos=True, min_audio_frames=FRAMES)
        [answer] = engine.answers
    got = torch.from_numpy(told * STEP)
    assert len(answer.codes) == FRAMES
    codes = torch.tensor(answer.codes, device=device).T[None]
    with torch.no_grad():
        true, rounded = (
            load_oracle(directory, device, dtype).code2wav(codes).flatten().double().cpu()
            for dtype in (torch.float32, torch.bfloat16)
        )
    assert len(got) == len(true)
    error, theirs = (float(row_errors(one[None], true[None])) for one in (got, rounded))
    assert error < 1.5 * theirs + 0.01
