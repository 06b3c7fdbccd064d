"""The talker's rows and logits against the reference, with the reference's own text and codes
forced on it."""

from typing import Any

import pytest
import torch

from stretto.kernels.reference.sampling import SamplingRows
from stretto.models.qwen3_omni.bridge import talker_prompt
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.talker import first_text_row, opening_rows, user_rows
from stretto.models.speech.code_predictor import FrameCache
from stretto.types import SamplingParams
from tests.oracle import OracleRun, generate
from tests.prompts import KINDS, make
from tests.solo import media_places

TEXT, FRAMES = 8, 12


@pytest.fixture(scope="module")
def runs(oracle: Any, tiny_config: Any) -> dict[str, OracleRun]:
    return {
        k: generate(oracle, make(k, tiny_config), max_text=TEXT, max_frames=FRAMES) for k in KINDS
    }


def prompt_rows(
    models: Models, kind: str, run: OracleRun
) -> tuple[torch.Tensor, torch.Tensor, float]:
    talker, prompt = models.talker, make(kind, models.config)
    plan = talker_prompt(prompt, models.config)
    media = run.accept_rows[media_places(plan)].to(talker.device)
    rows = torch.cat(
        [
            user_rows(talker, plan.ids, plan.is_media, media),
            opening_rows(talker, plan),
            first_text_row(talker, torch.tensor(run.text[:1], device=talker.device)),
        ]
    )
    return rows, torch.from_numpy(plan.positions), plan.first_decode


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_prompt_rows_and_positions(kind: str, models: Models, runs: dict[str, OracleRun]) -> None:
    rows, positions, _ = prompt_rows(models, kind, runs[kind])
    torch.testing.assert_close(rows.cpu(), runs[kind].talker_prompt, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(positions, runs[kind].talker_positions, atol=0, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_codec_logits_with_teacher_forcing(
    kind: str, chunk: int, models: Models, runs: dict[str, OracleRun]
) -> None:
    """The reference's codes are fed back; inputs of each step and logits must match, also from a
    chunked prompt."""
    talker, run, t = models.talker, runs[kind], models.config.tokens
    rows, positions, first_decode = prompt_rows(models, kind, run)
    cache = talker.cache(64, block_size=8)
    table = list(range(1, 64))
    hidden = torch.empty(0)
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        place = positions[:, start : start + chunk].to(rows.device)
        hidden = talker(part, place, cache, cache.page([(table, start, len(part))]))[-1:]
    logits = [talker.codec_head(hidden)]
    spoken = run.text[:-1]
    for j, frame in enumerate(run.codes.tolist(), start=1):
        if j > len(run.talker_inputs):
            break
        text = spoken[j] if j < len(spoken) else t.tts_eos if j == len(spoken) else t.tts_pad
        table_rows = [talker.codec_rows(torch.tensor(frame[0], device=rows.device))]
        for g, code in enumerate(frame[1:]):
            table_rows.append(
                talker.code_predictor.model.codec_embedding[g](
                    torch.tensor(code, device=rows.device)
                )
            )
        x = torch.stack(table_rows).sum(0) + talker.text_rows(
            torch.tensor(text, device=rows.device)
        )
        torch.testing.assert_close(x.cpu(), run.talker_inputs[j - 1], atol=3e-6, rtol=1e-5)
        at = torch.full((3, 1), first_decode + j - 1, device=rows.device)
        place = len(rows) + j - 1
        logits.append(
            talker.codec_head(talker(x[None], at, cache, cache.page([(table, place, 1)])))
        )
    got = torch.cat(logits).cpu()
    torch.testing.assert_close(got, run.codec_logits[: len(got)], atol=3e-5, rtol=1e-5)
    assert len(got) >= len(run.codes)


@torch.inference_mode()
def test_predictor_equals_a_full_forward(models: Models, oracle: Any) -> None:
    """15 cached forwards give the codes and the frame embedding that one forward over all 16
    positions implies."""
    predictor, device = models.talker.code_predictor, models.talker.device
    g = torch.Generator().manual_seed(0)
    size = models.config.talker.text.hidden_size
    hidden, first = (torch.randn(5, size, generator=g).to(device) for _ in range(2))
    greedy = SamplingRows.of([SamplingParams()] * 5, device)
    assert greedy.all_greedy
    cache: FrameCache = models.talker.frame_cache(7)  # more rows than are used
    codes, total = predictor(hidden, first, cache, lambda scores, group: scores.argmax(-1))
    embedded = [predictor.model.codec_embedding[i](codes[:, i]) for i in range(15)]
    torch.testing.assert_close(total, torch.stack([first, *embedded]).sum(0), atol=1e-5, rtol=1e-5)
    ref = oracle.talker.code_predictor
    x = torch.stack([hidden, first, *embedded[:-1]], 1)
    with torch.no_grad():
        out = ref.model(inputs_embeds=x).last_hidden_state
    for i in range(15):
        want = ref.lm_head[i](out[:, i + 1]).argmax(-1)
        assert codes[:, i].tolist() == want.tolist()


@torch.inference_mode()
def test_frame_rows_are_independent(models: Models) -> None:
    """A frame depends on its own row: not on its neighbours, nor on what an earlier frame left in
    the buffers."""
    from stretto.models.speech.talker import FrameRows

    talker, device = models.talker, models.talker.device
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(8, models.config.talker.text.hidden_size, generator=g).to(device)
    params = [
        SamplingParams(temperature=0.9 * (i % 2), top_k=50, repetition_penalty=1.05, seed=i)
        for i in range(8)
    ]

    def frame(rows: list[int]) -> torch.Tensor:
        pick = [params[i] for i in rows]
        seen = torch.zeros(
            len(rows), models.config.talker.text.vocab_size, dtype=torch.bool, device=device
        )
        state = FrameRows(
            SamplingRows.of(pick, device),
            SamplingRows.of(pick, device),
            torch.tensor(rows, device=device),
            seen,
        )
        return talker.frame(hidden[rows], state, talker.frame_cache(len(rows))).codes

    together = frame(list(range(8)))
    for i in range(8):
        assert frame([i])[0].tolist() == together[i].tolist()
    assert len({tuple(r) for r in together.tolist()}) == 8
    assert int(together[:, 0].max()) <= models.config.talker.codec.eos
