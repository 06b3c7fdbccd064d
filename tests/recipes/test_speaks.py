"""The embedded model says what it is asked to say, as an independent recogniser hears it.

Needs the weights (`packages/nano`) and the recogniser's files: STRETTO_TEST_RECOGNISER names their folder
(`recipes/nano/score.py` says where they come from)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipes.nano import score
from recipes.nano.sentences import FIXED
from recipes.nano.speak import domain_pairs
from stretto import Engine, embedded

CHECKPOINT = embedded.find()
RECOGNISER = os.environ.get("STRETTO_TEST_RECOGNISER")
needed = (
    pytest.mark.skipif(CHECKPOINT is None, reason="the embedded model's weights are not here"),
    pytest.mark.skipif(RECOGNISER is None, reason="STRETTO_TEST_RECOGNISER names no recogniser"),
    pytest.mark.slow,
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    assert CHECKPOINT is not None
    with Engine(CHECKPOINT, device="cpu") as opened:
        yield opened


@pytest.mark.skipif(CHECKPOINT is None, reason="the embedded model's weights are not here")
@pytest.mark.slow
def test_it_answers_questions_it_has_not_seen(engine: Engine) -> None:
    pairs = domain_pairs(12)
    answers = [engine.chat(p.question, modalities=("text",)).text for p in pairs]
    assert sum(a == p.answer for a, p in zip(answers, pairs, strict=True)) >= 11


@pytest.mark.parametrize("part", [pytest.param(FIXED[:20], marks=needed), pytest.param(FIXED[20:], marks=needed)])
def test_it_is_understood(engine: Engine, part: tuple[str, ...]) -> None:
    listener = score.Recogniser(Path(str(RECOGNISER)))
    heard = []
    for sentence in part[::4]:
        answer = engine.chat(f"Say: {sentence}", seed=1)
        assert answer.text == sentence
        assert answer.finished.audio == "stop"
        heard.append((sentence, listener.hear(answer.audio)))
    assert score.error_rate(heard) < 0.3, heard
