"""The thinker against the reference: logits and accept-layer rows for any chunking, alone and in
ragged batches."""

from typing import Any

import pytest
import torch

from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.positions import rope_positions
from stretto.models.qwen3_omni.thinker import Deep
from stretto.preprocess.prompt import Prompt
from tests.oracle import media_inputs
from tests.prompts import KINDS, make


def run(
    models: Models, prompts: list[Prompt], chunk: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits and accept-layer rows of all positions; the prompts advance together, `chunk` rows at
    a time."""
    thinker, c = models.thinker, models.config.thinker
    cache = thinker.cache(200, block_size=8)
    tables, free = [], iter(range(1, 200))
    for p in prompts:
        tables.append([next(free) for _ in range(-(-len(p.ids) // 8))])
    media = [thinker.encode(p) for p in prompts]
    positions = [
        torch.from_numpy(
            rope_positions(
                p.ids,
                models.config.tokens,
                c.vision.merge,
                c.positions_per_second,
                p.images,
                p.videos,
                p.audio_in_video,
            )[0]
        )
        for p in prompts
    ]
    done = [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    accept: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(d < len(p.ids) for d, p in zip(done, prompts, strict=True)):
        todo = {
            i: min(chunk, len(p.ids) - done[i])
            for i, p in enumerate(prompts)
            if done[i] < len(p.ids)
        }
        order = sorted(todo, key=lambda i: todo[i] != 1)
        xs, places, deep_rows, levels, row = [], [], [], [], 0
        for i in order:
            start, stop = done[i], done[i] + todo[i]
            part = media[i].within(start, stop) if media[i] is not None else None
            ids = torch.tensor(prompts[i].ids[start:stop], device=thinker.device)
            xs.append(thinker.embed(ids, part))
            places.append(positions[i][:, start:stop])
            if part is not None:
                deep_rows.append(part.visual_places + row)
                levels.append(part.deep)
            row += stop - start
        deep = (
            Deep(torch.cat(deep_rows).to(thinker.device), torch.cat(levels, 1))
            if deep_rows
            else None
        )
        paging = cache.page([(tables[i], done[i], todo[i]) for i in order])
        hidden, rows = thinker(
            torch.cat(xs),
            torch.cat(places, 1).to(thinker.device),
            cache,
            paging,
            deep,
            torch.arange(row),
        )
        assert rows is not None
        sizes = [todo[i] for i in order]
        for i, a, b in zip(
            order, thinker.logits(hidden).split(sizes), rows.split(sizes), strict=True
        ):
            logits[i].append(a)
            accept[i].append(b)
            done[i] += todo[i]
    return [(torch.cat(a), torch.cat(b)) for a, b in zip(logits, accept, strict=True)]


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
