"""bf16 on a GPU: with the tokens and the experts of the float32 reference forced on both, our error
against it is no larger than that of the reference in bf16 (free-running ones differ as soon as
rounding flips one)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.models.qwen3_omni.load import Models, Source
from tests.models.qwen3_omni.prefill import run
from tests.oracle import load_oracle, media_inputs
from tests.prompts import KINDS, make
from tests.rows import SHARE, Forced, check_rows, chosen, row_errors

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ours(tiny_dir: Path, cuda: torch.device) -> Models:
    return Models.open(Source.open(tiny_dir, cuda, torch.bfloat16, progress=False))


@pytest.fixture(scope="module")
def references(tiny_dir: Path, cuda: torch.device) -> tuple[Any, Any]:
    return load_oracle(tiny_dir, cuda), load_oracle(tiny_dir, cuda, torch.bfloat16)


def routers(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in model.thinker.model.layers]


def forward(model: Any, kind: str, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    prompt, dtype = make(kind, config), model.thinker.dtype
    media = {k: v.to(dtype) if v.is_floating_point() and k != "video_second_per_grid" else v
             for k, v in media_inputs(prompt, "cuda").items() if isinstance(v,
             torch.Tensor)}  # fmt: skip
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
    """All but a few rows are at most 1.6 times as far off as the reference's in bf16 are (all but a
    few of them), and 0.01 (about two roundings) for rows that it happens to hit."""
    exact, rounded = references
    moe = ours.config.thinker.text.moe
    assert moe is not None
    with chosen(routers(exact)) as ids:
        true, true_rows = forward(exact, kind, ours.config)
    forced = Forced(len(ids), len(true), moe.num_experts, true.device, in_parts=True)
    forced.give(ids)
    hooks = [router.register_forward_hook(forced.experts_of) for router in routers(rounded)]
    theirs, their_rows = forward(rounded, kind, ours.config)
    for hook in hooks:
        hook.remove()
    forced.give(ids)
    with forced():
        [(logits, rows)] = run(ours, [make(kind, ours.config)], 13)
    assert forced.start == len(true), "every row was forced"
    for found, other, wanted in ((logits, theirs, true), (rows, their_rows, true_rows)):
        check_rows(found, wanted, 1.6 * float(row_errors(other, wanted).quantile(SHARE)) + 0.01)


@torch.inference_mode()
def test_vocoder(ours: Models, references: tuple[Any, Any]) -> None:
    exact, rounded = references
    codes = torch.randint(0, 2048, (40, 16), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        true = exact.code2wav(codes.T[None]).flatten()
        theirs = rounded.code2wav(codes.T[None]).flatten()
    mine = ours.code2wav.decode(codes)
    # One number for the whole sound: the square root of its mean squared error, as a share of its
    # size.
    assert (
        float(row_errors(mine[None], true[None]))
        < 1.5 * float(row_errors(theirs[None], true[None])) + 0.01
    )
