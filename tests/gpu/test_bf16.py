"""bf16 on a GPU: with the reference's own tokens forced on both, our error against float32 is no larger than the
reference's own in bf16 (free-running tokens differ as soon as rounding flips one)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.models.qwen3_omni.load import Models, Source
from tests.models.test_thinker import run
from tests.oracle import load_oracle, media_inputs
from tests.prompts import KINDS, make

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ours(tiny_dir: Path, cuda: torch.device) -> Models:
    return Models.open(Source.open(tiny_dir, cuda, torch.bfloat16, progress=False))


@pytest.fixture(scope="module")
def references(tiny_dir: Path, cuda: torch.device) -> tuple[Any, Any]:
    return load_oracle(tiny_dir, cuda), load_oracle(tiny_dir, cuda, torch.bfloat16)


def error(x: torch.Tensor, true: torch.Tensor) -> float:
    """Root mean square error as a share of the signal, of the median row: rounding now and then sends a row to other
    experts, here as there, and such a row is far off."""
    off = (x.double() - true.double()).pow(2).mean(-1).sqrt()
    return float((off / true.double().pow(2).mean(-1).sqrt()).median())


def forward(model: Any, kind: str, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    prompt, dtype = make(kind, config), model.thinker.dtype
    media = {k: v.to(dtype) if v.is_floating_point() and k != "video_second_per_grid" else v
             for k, v in media_inputs(prompt, "cuda").items() if isinstance(v, torch.Tensor)}  # fmt: skip
    if prompt.audio_in_video:
        media["use_audio_in_video"] = True
    with torch.no_grad():
        out = model.thinker(
            input_ids=torch.tensor([prompt.ids], device="cuda"),
            attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.long, device="cuda"),
            output_hidden_states=True,
            **media,
        )
    return out.logits[0], out.hidden_states[config.talker.accept_layer][0]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_thinker(kind: str, ours: Models, references: tuple[Any, Any]) -> None:
    exact, rounded = references
    true, true_rows = forward(exact, kind, ours.config)
    theirs, their_rows = forward(rounded, kind, ours.config)
    [(logits, rows)] = run(ours, [make(kind, ours.config)], 13)
    assert error(logits, true) < 1.6 * error(theirs, true) + 0.01
    assert error(rows, true_rows) < 1.6 * error(their_rows, true_rows) + 0.01


@torch.inference_mode()
def test_vocoder(ours: Models, references: tuple[Any, Any]) -> None:
    exact, rounded = references
    codes = torch.randint(0, 2048, (40, 16), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        true = exact.code2wav(codes.T[None]).flatten()
        theirs = rounded.code2wav(codes.T[None]).flatten()
    mine = ours.code2wav.decode(codes)
    assert error(mine[None], true[None]) < 1.5 * error(theirs[None], true[None]) + 0.01
