"""The embedded model says what it is asked to say, as an independent recogniser hears it, and
understands questions.

Needs the weights (`packages/nano`). What is heard needs the recogniser, which
`scripts/recogniser.py` fetches; spoken questions need flite and espeak-ng. `make setup-test` brings
both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.nano import aloud, grammar, heard, score, voices
from stretto import Engine, embedded
from stretto.preprocess.english import as_words
from tests.recipes.conftest import RECOGNISER

CHECKPOINT = embedded.find()
pytestmark = [
    pytest.mark.skipif(CHECKPOINT is None, reason="the embedded model's weights are not here"),
]
hears = pytest.mark.skipif(
    not (RECOGNISER / "tokenizer.bin").exists(),
    reason="no recogniser: scripts/recogniser.py fetches it",
)
SENTENCES, DOMAIN = (
    slice(40, 80, 4),
    slice(80, None, 14),
)  # ten held-out ones to repeat, ten answers, of the score
CONTROL = 3


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(CHECKPOINT, device="cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def listener() -> score.Recogniser:
    return score.Recogniser(RECOGNISER)


def error_rate(
    speech: score.Speech, pairs: list[grammar.Pair], listener: score.Recogniser
) -> float:
    return score.error_rate(
        [(p.answer, listener.hear(w)) for p, w in zip(pairs, speech.waves, strict=True)]
    )


def test_it_answers_questions_it_has_not_seen(engine: Engine) -> None:
    pairs = score.domain_pairs(4)
    answers = [engine.chat(p.question, modalities=("text",)).text for p in pairs]
    assert sum(a == p.answer for a, p in zip(answers, pairs, strict=True)) >= len(pairs) - 1


def test_it_answers_what_the_page_suggests(engine: Engine) -> None:
    assert engine.info.example_prompts
    for idea in engine.info.example_prompts:
        assert engine.chat(idea, modalities=("text",)).text != grammar.REFUSAL, idea


@hears
@pytest.mark.parametrize(("part", "greedy"), [(SENTENCES, True), (DOMAIN, False)])
def test_it_is_understood(
    engine: Engine, listener: score.Recogniser, part: slice, greedy: bool
) -> None:
    """Twice as many wrong words as the score found would be too many; all sentences end by
    themselves."""
    pairs = score.questions()[part]
    speech = score.asked(engine, "test", pairs, greedy_speech=greedy)
    assert len(pairs) == 10
    assert speech.ended == [True] * len(pairs)
    assert error_rate(speech, pairs, listener) < 0.25


@hears
def test_six_sentences_are_understood_as_one_is(engine: Engine, listener: score.Recogniser) -> None:
    """With numbers among them, and all of them are read."""
    sentences = [
        *grammar.held_out_sentences()[4:8],
        "The hat costs $15.",
        "It is 5 km to the city.",
    ]
    answer = engine.read_aloud(" ".join(sentences), greedy_speech=True)
    assert not answer.cut
    said = as_words(" ".join(sentences))
    assert score.error_rate([(said, aloud.hear(listener, answer.audio))]) < 0.25


@hears
def test_a_random_checkpoint_is_not_understood(listener: score.Recogniser) -> None:
    pairs = score.questions()[:CONTROL]
    speech = score.untrained(pairs)
    assert error_rate(speech, pairs, listener) > 0.9


@pytest.mark.parametrize(("number", "program"), [(0, "flite"), (1, "espeak-ng")])
def test_it_understands_a_voice_it_has_not_heard(
    engine: Engine, tmp_path: Path, number: int, program: str
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: scripts/debian.sh voices")
    asked = voices.chunk(number)[:8]
    said = [heard.message(voices.speak(a, tmp_path / "q.wav"), heard.SILENCES[0]) for a in asked]
    answers = [engine.chat(s, modalities=("text",)).text for s in said]
    assert sum(t == a.pair.answer for t, a in zip(answers, asked, strict=True)) >= 5


def test_it_writes_down_what_a_voice_asks_that_it_has_not_heard(
    engine: Engine, tmp_path: Path
) -> None:
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed: scripts/debian.sh voices")
    assert engine.info.transcription is not None
    prompt = {"type": "text", "text": engine.info.transcription.transcribe}
    asked = voices.chunk(1)[:8]
    said = [
        heard.message(voices.speak(a, tmp_path / "q.wav"), heard.SILENCES[0], prompt) for a in asked
    ]
    wrote = [engine.chat(s, modalities=("text",)).text for s in said]
    pairs = [(a.pair.question, text) for a, text in zip(asked, wrote, strict=True)]
    assert score.error_rate(pairs) < heard.WRITTEN
