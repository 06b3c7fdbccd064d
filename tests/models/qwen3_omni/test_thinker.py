"""The thinker against the reference: logits and accept-layer rows for any chunking, alone and in
ragged batches."""

from typing import Any

import pytest
import torch

from stretto.models.qwen3_omni.load import Models
from stretto.preprocess.prompt import Prompt
from tests.models.qwen3_omni.prefill import run
from tests.oracle import media_inputs
from tests.prompts import KINDS, make


@pytest.fixture(scope="module")
def reference(
    oracle: Any, tiny_config: Any
) -> dict[str, tuple[Prompt, torch.Tensor, torch.Tensor]]:
    found = {}
    for kind in KINDS:
        prompt = make(kind, tiny_config)
        device = oracle.thinker.device
        with torch.no_grad():
            out = oracle.thinker(
                input_ids=torch.tensor([prompt.ids], device=device),
                attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.long, device=device),
                output_hidden_states=True,
                **media_inputs(prompt, device),
            )
        accept = out.hidden_states[tiny_config.talker.accept_layer]
        found[kind] = (prompt, out.logits[0], accept[0])
    return found


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_logits_and_accept_rows(
    kind: str, chunk: int, models: Models, reference: dict[str, Any]
) -> None:
    prompt, logits, accept = reference[kind]
    [(got, rows)] = run(models, [prompt], chunk)
    torch.testing.assert_close(got, logits, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(rows, accept, atol=3e-5, rtol=1e-5)


@torch.inference_mode()
def test_all_prompts_in_one_ragged_batch(models: Models, reference: dict[str, Any]) -> None:
    results = run(models, [reference[k][0] for k in KINDS], 5)
    for kind, (got, rows) in zip(KINDS, results, strict=True):
        torch.testing.assert_close(got, reference[kind][1], atol=3e-5, rtol=1e-5)
        torch.testing.assert_close(rows, reference[kind][2], atol=3e-5, rtol=1e-5)
