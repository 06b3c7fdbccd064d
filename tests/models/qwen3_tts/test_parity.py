"""Qwen3-TTS equals the model's own package, as golden files tell it: codes in every mode, samples,
voices."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from stretto.kernels.reference.sampling import SamplingRows
from stretto.models.parts import run_through
from stretto.models.qwen3_tts.enroller import Copied
from stretto.models.qwen3_tts.load import Source
from stretto.models.qwen3_tts.params import RESIDUAL, ClonedVoice, reference
from stretto.models.qwen3_tts.rows import speech_prompt
from stretto.models.qwen3_tts.talker import Talker, TalkerAdapter, TalkerInput
from stretto.models.speech.talker import FrameRows
from tests.models.qwen3_tts.cases import GOLDEN, KINDS, NOISE_SAMPLES, SEED, cases, clip, digests
from tests.models.qwen3_tts.conftest import Checkpoint
from tests.models.qwen3_tts.hosted import CODE0, Hosted
from tests.models.qwen3_tts.ids import ROLE, instruct_ids


def golden(kind: str, size: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{kind}-{size}.json").read_text())


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_checkpoints_are_those_that_the_golden_files_are_about(
    tts: Checkpoint, kind: str, size: str
) -> None:
    assert digests(tts(kind, size)) == golden(kind, size)["digests"]


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_codes_are_the_packages_in_every_mode(tts: Checkpoint, kind: str, size: str) -> None:
    """Alone and all together, with prompts in small parts."""
    expected = [c["codes"] for c in golden(kind, size)["cases"]]
    all_cases = cases(kind, size)
    alone = Hosted(tts(kind, size))
    assert [alone.speak(case, str(i)).codes for i, case in enumerate(all_cases)] == expected
    together = Hosted(
        tts(kind, size), prefill_chunk=3, lone_prefill_chunk=5, block_size=4, max_rows=3
    )
    for i, case in enumerate(all_cases):
        together.admit(str(i), case)
    together.run()
    assert [together.answers[str(i)].codes for i in range(len(all_cases))] == expected
    for node in together.host.stages.values():
        assert not len(node)


class Sequential:
    """The package's draws, in its order: torch's own noise for each pick. In the package's run, the
    greedy answer of the same case came first, without a draw."""

    def __call__(self, seeds: torch.Tensor, draw: torch.Tensor, vocabulary: int) -> torch.Tensor:
        return torch.empty(len(seeds), vocabulary).exponential_(1)


@torch.inference_mode()
def drawn(
    model: Talker, case: dict[str, Any], forced: list[list[int]] | None = None
) -> list[list[int]]:
    """A case's codes by the plainest loop. `forced` frames are fed back instead of those that were
    picked."""
    config, cloned = model.config, None
    if "vector" in case:
        codes = np.array(case.get("ref_codes", []), np.int16).tobytes()
        vector = np.array(case["vector"], np.float32).tobytes()
        cloned = reference(config, ClonedVoice(vector, codes, tuple(case.get("ref_text", ()))))
    ids = [*(instruct_ids(case["instruct"]) if "instruct" in case else ()), *ROLE]
    prompt = speech_prompt(
        config, ids, case.get("speaker"), case.get("language"), cloned, case["whole"]
    )
    prompt.take(case["text"])
    prompt.end()
    cache = model.cache(40, 16)
    adapter = TalkerAdapter(model, cache, 1, 512)
    texts = [*prompt.spoken, prompt.after]
    x, positions = adapter.prompt_input(TalkerInput(prompt, CODE0, RESIDUAL), 0, len(prompt))
    seen, frames, n = torch.zeros(1, 3072, dtype=torch.bool), [], len(prompt)
    hidden = model(
        x, torch.from_numpy(positions.copy()), cache, cache.page([(list(range(1, 40)), 0, n)])
    )[-1:]

    def hold(logits: torch.Tensor) -> None:
        if len(frames) < 2:
            logits[:, config.talker.codec.eos] = float("-inf")

    while True:
        rows = FrameRows(
            SamplingRows.of([CODE0], model.device),
            SamplingRows.of([RESIDUAL], model.device),
            torch.tensor([0]),
            seen,
        )
        before = torch.get_rng_state()
        step = model.frame(hidden, rows, model.frame_cache(1), Sequential(), hold)
        if step.codes[0, 0] == config.talker.codec.eos or len(frames) == case["max_new"] - 1:
            torch.set_rng_state(before)
            return frames
        frames.append(step.codes[0].tolist())
        fed = torch.tensor([forced[len(frames) - 1] if forced else frames[-1]])
        text = texts[len(frames)] if len(frames) < len(texts) else config.tokens.tts_pad
        x = model.frame_rows(fed) + model.text_rows(torch.tensor([text]))
        at = torch.full((3, 1), float(n + len(frames) - 1))
        hidden = model(x, at, cache, cache.page([(list(range(1, 40)), n + len(frames) - 1, 1)]))


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_the_same_draws_give_the_packages_codes(tts: Checkpoint, kind: str, size: str) -> None:
    model = Source.open(tts(kind, size), progress=False).talker()
    all_cases = list(zip(cases(kind, size), golden(kind, size)["cases"], strict=True))
    for case, golden_cases in all_cases[::2] + all_cases[-1:]:
        torch.manual_seed(SEED)
        assert drawn(model, case) == golden_cases["sampled"]
    torch.manual_seed(SEED)
    assert drawn(model, case, forced=golden_cases["sampled"]) == golden_cases["sampled"]


def test_samples_are_the_packages(tts: Checkpoint) -> None:
    """However the frames are cut."""
    vocoder = Source.open(tts("custom_voice"), progress=False).vocoder()
    golden_cases = golden("custom_voice", "1b7")["cases"]
    codes = torch.tensor(golden_cases[0]["codes"] + golden_cases[1]["codes"])
    expected = np.load(GOLDEN / "samples.npy")
    whole = vocoder.decode(codes).numpy()
    assert len(whole) == 1920 * len(codes)
    np.testing.assert_allclose(whole[: len(expected)], expected, rtol=0, atol=1e-5)
    from stretto.models.speech.vocoder import VocoderStream

    for sizes in ((1,), (3, 1, 7), (25,)):
        stream, parts, at = VocoderStream(vocoder), [], 0
        while at < len(codes):
            n = sizes[len(parts) % len(sizes)]
            parts.append(stream.push(codes[at : at + n]).numpy())
            at += n
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", ["0b6", "1b7"])
def test_a_clip_becomes_the_packages_voice(size: str, tts: Checkpoint) -> None:
    model, golden_cases = (
        Source.open(tts("base", size), progress=False).enroller(),
        golden("base", size),
    )
    with torch.inference_mode():
        voice, alone = (
            Copied.of(
                run_through(model.run(torch.from_numpy(clip(NOISE_SAMPLES)), text)), None
            ).voice(text)
            for text in ((1, 2), ())
        )
    vector = np.frombuffer(voice.vector, np.float32)
    np.testing.assert_allclose(vector, golden_cases["vector"], rtol=0, atol=1e-5)
    assert np.frombuffer(voice.codes, np.int16).reshape(-1, 16).tolist() == golden_cases["clip"]
    assert (alone.vector, alone.codes, alone.text) == (voice.vector, b"", ())
